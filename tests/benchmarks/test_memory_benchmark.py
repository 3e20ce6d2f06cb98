"""The benchmark of memory: options, what is measured of a cell, its tables, and rows that are failures."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import pickle
import re
from pathlib import Path

import pytest
import torch

from benchmarks import memory, memory_cell, suite
from benchmarks.memory import cells_of, no_room, parse
from benchmarks.memory_cell import FLOAT32, FORWARD_ONLY, MIXED, STEP, TRAINED, Cell, Conditions, measure_cell
from benchmarks.memory_plots import CATEGORIES_OF_PEAK, CHECKPOINTING, PEAKS
from benchmarks.memory_report import best_block_size, largest_of, report, row_of
from cs336_systems.profiling.environment import collect_environment
from cs336_systems.profiling.recording import TRACKED_TENSORS

SIZES = (("vocab_size", 64), ("context_length", 32), ("d_model", 32), ("d_ff", 64), ("num_layers", 2), ("num_heads", 2))
CELL = Cell("tiny", "2025", SIZES, 2, "naive", STEP, FLOAT32)
FLAGS = ("--preset", "tiny", "--vocab-size", "64", "--d-model", "32", "--d-ff", "64", "--num-layers", "2")
SMALL = (*FLAGS, "--num-heads", "2", "--batch", "2", "--device", "cpu", "--steps", "1")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _precision(matmul_precision):
    """Cells set it for the whole process, which is theirs elsewhere."""


pytestmark = pytest.mark.parametrize("matmul_precision", ["highest"], indirect=True)


@pytest.fixture
def conditions(tmp_path):
    return Conditions(CPU, steps=1, tf32=False, seed=0, folder=tmp_path, snapshots=True)


def finished(cell, **columns):
    """A row as if it had been measured."""
    found = {
        "status": "ok",
        "reason": "",
        "memory_method": TRACKED_TENSORS,
        "recording_method": TRACKED_TENSORS,
        "median_ms": 1.0,
        "at_peak": {"FFN": 5},
    }
    found |= {"peak_bytes": 3 * 2**20, "held_bytes": 2**20, "largest": [], "largest_of_category": [], "operations": []}
    return row_of(cell, found | columns, argparse.Namespace(device=CPU, tf32=False, seed=0))


class TestOptions:
    def test_without_a_gpu_the_default_is_tiny(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        cells = cells_of(parse([]))
        assert len(cells) == len({cell.key for cell in cells}) == len({cell.slug for cell in cells}) == 3 * 2 + 2 * 2
        assert {(cell.preset, cell.context) for cell in cells} == {("tiny", 128)}

    def test_with_a_gpu_it_is_every_preset(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(suite, "choose_device", torch.device)
        cells = cells_of(parse(["--device", "cuda"]))
        plain = [cell for cell in cells if cell.every is None]
        assert len(plain) == 5 * 3 * 3 * 2
        assert {cell.batch for cell in cells} == {4}
        assert {(cell.context, cell.mode) for cell in cells if cell.every} == {(512, STEP)}

    def test_blocks_are_recomputed_by_no_more_than_there_are(self):
        options = parse([*SMALL, "--context", "64", "32", "--mode", STEP, "--checkpoint-every", "4", "2", "1", "0"])
        assert [(cell.context, cell.every) for cell in cells_of(options) if cell.dtype == MIXED] == [
            *((32, None), (64, None), (64, 1), (64, 2))
        ]
        assert all(cell.every is None for cell in cells_of(parse([*SMALL, "--mode", FORWARD_ONLY])))

    def test_sizes_by_flags(self):
        (cell,) = cells_of(parse([*SMALL, "--context", "32", "--mode", TRAINED, "--dtype", FLOAT32]))
        assert cell == dataclasses.replace(CELL, mode=TRAINED)
        assert (cell.config.d_ff, cell.config.num_layers, cell.config.attn) == (64, 2, "naive")
        assert cell.slug == (
            "tiny-2025-vocab-size-64-d-model-32-d-ff-64-num-layers-2-num-heads-2-2-x-32-naive-forward-backward-float32"
        )

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--preset", "huge"], "--preset must be one of tiny, small, .*; got huge"),
            (["--num-heads", "7"], "the sizes of tiny do not fit together: .*7"),
            (["--checkpoint-every", "-1"], "--checkpoint-every must be at least 0; got -1"),
            (["--model", "cudnn"], "invalid choice: 'cudnn'"),
        ],
    )
    def test_what_cannot_be_is_refused(self, capsys, arguments, message):
        with pytest.raises(SystemExit):
            parse(["--preset", "tiny", *arguments])
        assert re.search(message, " ".join(capsys.readouterr().err.split()))

    def test_longer_sequences_of_what_ran_out_of_memory_are_not_tried(self):
        longer = dataclasses.replace(CELL, sizes=(("context_length", 64), *SIZES[2:], SIZES[0]))
        rows = [finished(CELL) | {"status": "oom"}]
        skipped = no_room(longer, rows)
        assert skipped is not None
        assert str(skipped) == "skipped: memory ran out at a context of 32 already"
        assert no_room(CELL, rows) is None
        for change in ({"mode": FORWARD_ONLY}, {"dtype": MIXED}, {"every": 1}, {"model": "sdpa"}):
            assert no_room(dataclasses.replace(longer, **change), rows) is None


class TestCell:
    def test_a_step(self, conditions):
        row = measure_cell((CELL, conditions))
        assert row["status"] == "ok", row
        parameters = 4 * CELL.config.parameters()
        assert 3 * parameters <= row["allocated_bytes"] < 3.2 * parameters
        assert row["peak_bytes"] == row["recorded_peak_bytes"] == sum(row["at_peak"].values())
        assert (row["memory_method"], row["reserved_bytes"]) == (TRACKED_TENSORS, None)
        assert row["block_bytes"] == row["block_estimate_bytes"]
        assert sum(each["bytes"] for each in row["operations"]) == row["block_bytes"]
        # Held are what autograd keeps, and the loss.
        assert row["held_bytes"] == row["saved_bytes"] + 4
        (largest, *_), every = row["largest"], row["largest"]
        assert largest["bytes"] == max(each["bytes"] for each in every)
        assert len(every) == 10
        json.dumps(row)
        (page,) = (conditions.folder / "timelines").glob("*.html")
        assert page.stem == CELL.slug
        assert "what an operation allocates inside itself is not seen" in page.read_text()
        with (conditions.folder / "snapshots" / f"{CELL.slug}.pickle").open("rb") as file:
            assert pickle.load(file)["device_traces"][0]

    def test_a_forward_holds_nothing(self, conditions):
        quiet = dataclasses.replace(conditions, snapshots=False)
        row = measure_cell((dataclasses.replace(CELL, mode=FORWARD_ONLY), quiet))
        assert row["status"] == "ok", row
        assert row["held_bytes"] is None
        assert "saved_bytes" not in row
        assert not (conditions.folder / "snapshots").exists()

    def test_recomputation_holds_less(self, conditions):
        usual, less = (
            measure_cell((dataclasses.replace(CELL, mode=TRAINED, every=every), conditions)) for every in (None, 1)
        )
        assert less["held_bytes"] < usual["held_bytes"]
        assert less["block_bytes"] is None

    def test_mixed_precision_halves_the_scores(self, conditions):
        sizes = []
        for dtype in (FLOAT32, MIXED):
            cell = dataclasses.replace(CELL, mode=TRAINED, dtype=dtype)
            row = finished(cell, **measure_cell((cell, conditions)))
            largest = largest_of(row)
            assert largest["attention scores"] == row["quadratic_bytes"]
            assert largest["gradient"] == 64 * 32 * 4
            assert row["quadratic_kept_bytes"] == 2 * row["quadratic_bytes"]
            assert largest["residual stream"] == row["residual_bytes"] == 2 * 32 * 32 * 4
            sizes.append(largest["attention scores"])
        assert sizes == [2 * 2 * 32 * 32 * 4, 2 * 2 * 32 * 32 * 2]

    def test_memory_that_ran_out_is_a_status(self, monkeypatch, conditions):
        def full(*arguments):
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(memory_cell, "prepared", full)
        assert measure_cell((CELL, conditions)) == {"status": "oom", "reason": "CUDA out of memory"}

    def test_what_needs_a_gpu_says_so(self, conditions):
        row = measure_cell((dataclasses.replace(CELL, model="flash"), conditions))
        assert row["status"] == "unsupported"

    @pytest.mark.gpu
    @pytest.mark.parametrize("model", ["naive", "flash", "sdpa"])
    @pytest.mark.parametrize("mode", [FORWARD_ONLY, TRAINED, STEP])
    def test_on_a_gpu(self, conditions, model, mode):
        sizes = (("vocab_size", 512), ("context_length", 256), ("d_model", 256), ("num_layers", 3))
        cell = dataclasses.replace(CELL, model=model, mode=mode, dtype=MIXED, sizes=sizes)
        row = measure_cell((cell, dataclasses.replace(conditions, device=torch.device("cuda"))))
        assert row["status"] == "ok", row
        assert row["reserved_bytes"] >= row["peak_bytes"] > row["allocated_bytes"] >= 4 * cell.config.parameters()
        # The recorded step is like the measured one.
        assert row["recorded_peak_bytes"] == pytest.approx(row["peak_bytes"], rel=0.1)
        if mode != FORWARD_ONLY and model != "sdpa":
            assert row["block_bytes"] == pytest.approx(row["block_estimate_bytes"], rel=0.01)


class TestReport:
    def test_differences_and_the_best_block_size(self):
        rows = [
            finished(CELL),
            finished(dataclasses.replace(CELL, dtype=MIXED), peak_bytes=2 * 2**20),
            finished(dataclasses.replace(CELL, every=1), peak_bytes=2**20, median_ms=3.0),
            finished(dataclasses.replace(CELL, mode=TRAINED), status="oom", reason="too large"),
        ]
        text = report(rows, collect_environment(CPU))
        assert re.search(r"\| tiny, 2 × 32, naive, step +\| +3\.00 \| +2\.00 \| +-1\.00 \|", text)
        assert "Least measured: 1; of all sizes the formula has its least at 1, of 2 blocks." in text
        assert "- tiny, 2 × 32, naive, forward+backward, float32: oom: too large" in text
        assert re.search(r"\| tiny, 2 × 32, naive, forward\+backward, float32 +\| +– \| +oom \|", text)

    def test_the_best_block_size_is_the_formulas(self):
        deep = dataclasses.replace(CELL, sizes=(*SIZES[:4], ("num_layers", 64), SIZES[5]))
        config = deep.config
        block = deep.estimate("cpu").blocks / 64
        ideal = (64 * 2 * 32 * config.d_model * 4 / block) ** 0.5
        assert abs(best_block_size(deep, "cpu") - ideal) <= 1


class TestRun:
    def test_rows_are_kept_and_memory_that_ran_out_is_told(self, tmp_path, monkeypatch):
        asked = [*SMALL, "--context", "32", "--dtype", FLOAT32, "--mode", STEP, "--checkpoint-every", "1"]
        assert memory.main([*asked, "--output", str(tmp_path)]) == 0
        measured = []

        def small_device(measure, job, limit):
            measured.append(job[0].key)
            return {"status": "oom", "reason": "CUDA out of memory"} if job[0].context == 48 else measure(job)

        monkeypatch.setattr(suite, "measured_alone", small_device)
        asked[len(SMALL) + 1 : len(SMALL) + 2] = ["32", "48", "64"]
        assert memory.main([*asked, "--output", str(tmp_path), "--resume"]) == 0
        assert len(measured) == 2  # of context 48, and the step of context 64 whose blocks are recomputed
        with (tmp_path / "results.csv").open() as file:
            rows = {(row["context"], row["every"]): row for row in csv.DictReader(file)}
        assert {key: row["status"] for key, row in rows.items()} == {
            ("32", ""): "ok",
            ("32", "1"): "ok",
            ("48", ""): "oom",
            ("64", ""): "skipped",
            ("64", "1"): "ok",
        }
        assert int(rows["32", "1"]["held_bytes"]) < int(rows["32", ""]["held_bytes"])
        tables = (tmp_path / "tables.md").read_text()
        assert "Memory from: tracked tensors" in tables
        assert "memory ran out at a context of 48 already" in tables
        for name in ("largest.csv", "operations.csv", "at-peak.csv"):
            with (tmp_path / name).open() as file:
                assert len(list(csv.DictReader(file))) > 5
        pytest.importorskip("matplotlib")
        assert all((tmp_path / name).exists() for name in (PEAKS, CATEGORIES_OF_PEAK, CHECKPOINTING))
        assert len(list(Path(tmp_path / "timelines").glob("*.png"))) == 3

    def test_a_dry_run_estimates(self, tmp_path, capsys):
        assert memory.main([*SMALL, "--context", "32", "--dry-run", "--filter", "step", "--output", str(tmp_path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 2 + 4 + 1
        assert all("GiB" in line for line in lines[:-1])
        assert list(tmp_path.iterdir()) == []
