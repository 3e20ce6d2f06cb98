"""The benchmark of a model's passes: what is measured, and rows that are failures."""

from __future__ import annotations

import csv
import dataclasses
import json
import re

import pytest
import torch

from benchmarks import suite, transformer, transformer_cell, transformer_report
from benchmarks.transformer import COMPARED, no_room, parse
from benchmarks.transformer_cell import measure_cell, row_of
from cs336_systems.transformer import preset

from .transformer_rows import CELL, CONDITIONS, CONFIG, ENVIRONMENT, found, row_with

TINY = ("--preset", "tiny", "--vocab-size", "64", "--batch-size", "2", "--device", "cpu", "--steps", "2")


@pytest.fixture(autouse=True)
def _precision(matmul_precision):
    """Cells set it for the whole process, which is theirs elsewhere."""


pytestmark = pytest.mark.parametrize("matmul_precision", ["highest"], indirect=True)


class TestOptions:
    def test_every_axis_is_multiplied_with_the_others(self):
        axes = {
            "--preset": ["small", "medium"],
            "--context-length": ["256", "128"],
            "--batch-size": ["4", "8"],
            "--dtype": ["float32", "tf32", "bfloat16", "float16"],
            "--attn": ["naive", "sdpa"],
            "--compile": ["none", "model"],
            "--mode": ["step", "forward", "forward+backward"],
            "--warmup": ["0", "5"],
        }
        cells = parse([word for flag, values in axes.items() for word in (flag, *values)]).cells
        assert len(cells) == len({cell.key for cell in cells}) == 2 * 2 * 2 * 4 * 2 * 2 * 3 * 2
        assert [cell.config.context_length for cell in cells] == sorted(
            [cell.config.context_length for cell in cells[: len(cells) // 4]]
        ) * 4
        assert [cell.mode for cell in cells[:6:2]] == ["forward", "forward+backward", "step"]
        assert cells[0].config == preset("small", context_length=128, attn="naive")

    def test_without_a_gpu_the_default_is_tiny(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        cells = parse([]).cells
        assert {(cell.name, cell.warmup) for cell in cells} == {("tiny", 1)}
        assert len(cells) == 8

    def test_sizes_of_ones_own(self):
        sizes = ("--d-model", "64", "--d-ff", "96", "--num-layers", "3", "--num-heads", "2")
        (cell,) = parse([*sizes, "--context-length", "32", "--dtype", "float32", "--mode", "step"]).cells
        config = cell.config
        assert (cell.name, config.d_model, config.d_ff, config.num_layers, config.num_heads) == ("custom", 64, 96, 3, 2)
        assert (config.vocab_size, config.context_length, cell.batch) == (10_000, 32, 4)

    def test_sizes_of_a_preset_are_changed(self):
        cells = parse(["--preset", "small", "--num-layers", "2", "--vocab-size", "50"]).cells
        assert {(cell.config.num_layers, cell.config.vocab_size, cell.config.d_ff) for cell in cells} == {(2, 50, 3072)}

    def test_a_name_belongs_to_a_suite(self):
        of = {suite: parse(["--preset", "xl", "--suite", suite]).cells[0] for suite in ("2025", "2026")}
        assert of["2025"].config.parameters() == 1_998_235_200
        assert of["2026"].config.parameters() == 3_406_809_600
        assert of["2026"].name == "xl (2026)"

    def test_sizes_at_which_compilation_is_compared(self):
        cells = parse(["--compare-compile", "--mode", "step", "--dtype", "float32"]).cells
        assert [(cell.name, cell.compile) for cell in cells] == [
            (name, how) for name in COMPARED for how in ("none", "model")
        ]
        last = cells[-1]
        assert (last.batch, last.config.context_length) == (8, 512)
        assert (last.config.d_model, last.config.d_ff) == (768, 3072)
        assert (last.config.num_layers, last.config.num_heads) == (12, 12)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--preset", "huge"], "--preset must be one of tiny, small, .* with --suite 2025; got huge"),
            (["--d-model", "64"], "sizes without --preset need --d-ff, --num-layers, --num-heads too"),
            (["--preset", "tiny", "--num-heads", "3"], "num_heads must divide d_model, 128; got 3"),
            (["--compare-compile", "--preset", "tiny"], "leave out --preset"),
            (["--compare-compile", "--batch-size", "8"], "leave no --context-length and --batch-size"),
            (["--warmup", "-1"], "expected a whole number"),
            (["--steps", "0"], "expected a whole number of at least 1; got '0'"),
            (["--device", "nowhere"], "device must be"),
        ],
    )
    def test_what_cannot_be_is_refused(self, capsys, arguments, message):
        with pytest.raises(SystemExit):
            parse(arguments)
        assert re.search(message, " ".join(capsys.readouterr().err.split()))


class TestCell:
    @pytest.mark.parametrize(
        ("mode", "phases"),
        [
            ("forward", {"forward"}),
            ("forward+backward", {"forward", "backward"}),
            ("step", {"forward", "backward", "optimizer"}),
        ],
    )
    def test_each_mode_has_its_phases(self, mode, phases):
        row = measure_cell((dataclasses.replace(CELL, mode=mode), CONDITIONS))
        assert row["status"] == "ok", row
        assert {name.removesuffix("_median_ms") for name in row if name.endswith("_median_ms")} == {*phases, "step"}
        for step, *parts in zip(row["step_each_ms"], *(row[f"{phase}_each_ms"] for phase in phases), strict=True):
            assert step == pytest.approx(sum(parts))
        assert len(row["warmup_ms"]) == 1
        assert (row["last_loss"] < row["first_loss"]) == (mode == "step")

    def test_the_forward_pass_alone_has_no_graph(self, monkeypatch):
        enabled = []

        def noted(*arguments):
            step = step_of(*arguments)
            forward = step.forward
            return dataclasses.replace(step, forward=lambda: enabled.append(torch.is_grad_enabled()) or forward())

        step_of = transformer_cell.step_of
        monkeypatch.setattr(transformer_cell, "step_of", noted)
        assert measure_cell((dataclasses.replace(CELL, mode="forward"), CONDITIONS))["status"] == "ok"
        assert enabled == [False] * 3

    @pytest.mark.parametrize("arithmetic", ["float32", "tf32", "bfloat16", "float16"])
    def test_products_are_in_the_dtype_that_the_row_says(self, monkeypatch, arithmetic):
        seen = []
        linear = torch.nn.functional.linear

        def noted(x, weight):
            result = linear(x, weight)
            seen.append((weight.dtype, result.dtype, torch.get_float32_matmul_precision()))
            return result

        monkeypatch.setattr(torch.nn.functional, "linear", noted)
        cell = dataclasses.replace(CELL, arithmetic=arithmetic)
        row = measure_cell((cell, CONDITIONS))
        assert row["status"] == "ok", row
        assert set(seen) == {(torch.float32, cell.dtype, "high" if arithmetic == "tf32" else "highest")}
        whole = row_of(cell, row, ENVIRONMENT, CONDITIONS)
        assert (whole["dtype"], whole["tf32"]) == (cell.dtype_name, arithmetic == "tf32")
        assert whole["autocast"] == (arithmetic in ("bfloat16", "float16"))

    def test_without_warm_up_the_first_step_is_timed(self):
        cold = dataclasses.replace(CELL, warmup=0, compile="model")
        row = row_of(cold, found(), ENVIRONMENT, CONDITIONS)
        assert (row["first_step"], row["compilation"]) == ("timed", "timed")
        assert measure_cell((dataclasses.replace(CELL, warmup=0), CONDITIONS))["warmup_ms"] == []
        warm = row_of(dataclasses.replace(cold, warmup=1), found(), ENVIRONMENT, CONDITIONS)
        assert (warm["first_step"], warm["compilation"]) == ("warm-up", "warm-up")
        assert row_of(CELL, found(), ENVIRONMENT, CONDITIONS)["compilation"] == "none"

    def test_attention_that_cannot_is_unsupported(self):
        flash = dataclasses.replace(CELL, config=dataclasses.replace(CONFIG, attn="flash"))
        row = measure_cell((dataclasses.replace(flash, arithmetic="bfloat16"), CONDITIONS))
        assert row["status"] == "unsupported"
        assert "impl='flash' cannot" in row["reason"]

    def test_memory_that_ran_out_is_a_status(self, monkeypatch):
        def full(*arguments, **options):
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(transformer_cell, "Transformer", full)
        assert measure_cell((CELL, CONDITIONS)) == {"status": "oom", "reason": "CUDA out of memory"}

    def test_a_loss_that_is_no_number_is_an_error_but_for_float16(self, monkeypatch):
        monkeypatch.setattr("benchmarks.training_cell.LEARNING_RATE", float("inf"))
        row = measure_cell((CELL, CONDITIONS))
        assert row["status"] == "error"
        assert "the loss of the last step must be finite" in row["reason"]
        half = dataclasses.replace(CELL, arithmetic="float16")
        row = measure_cell((half, CONDITIONS))
        assert (row["status"], row["last_loss"]) == ("ok", None)
        assert "no scaler was used" in row_of(half, row, ENVIRONMENT, CONDITIONS)["warning"]

    @pytest.mark.gpu
    @pytest.mark.parametrize("how", ["none", "model"])
    @pytest.mark.parametrize("mode", ["forward", "forward+backward", "step"])
    def test_on_a_gpu_memory_is_counted(self, mode, how, compile_afresh):
        config = dataclasses.replace(CONFIG, attn="auto", context_length=128)
        cell = dataclasses.replace(CELL, config=config, mode=mode, compile=how, arithmetic="bfloat16")
        row = measure_cell((cell, dataclasses.replace(CONDITIONS, device=torch.device("cuda"))))
        assert row["status"] == "ok", row
        assert 0 < row["allocated_mib"] <= row["peak_mib"] <= row["reserved_mib"]
        copies = {"forward": 1, "forward+backward": 2, "step": 4}[mode]
        assert row["peak_mib"] * 2**20 > 4 * copies * config.parameters()


class TestRun:
    def test_rows_come_one_by_one_and_are_kept(self, tmp_path, monkeypatch, capsys):
        short = [*TINY, "--dtype", "float32", "--mode", "step", "--output", str(tmp_path), "--log-steps"]
        assert transformer.main([*short, "--context-length", "16"]) == 0
        assert re.search(r"  step 2: forward .* ms, backward .* ms, optimizer .* ms, step", capsys.readouterr().out)
        alone = suite.measured_alone
        measured = []

        def noted(measure, job, limit):
            measured.append(job[0].config.context_length)
            return alone(measure, job, limit)

        monkeypatch.setattr(suite, "measured_alone", noted)
        assert transformer.main([*short, "--context-length", "16", "32", "--resume"]) == 0
        assert measured == [32]
        with (tmp_path / "results.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [row["context"] for row in rows] == ["16", "32"]
        for row in rows:
            assert (row["status"], row["tf32"], row["seed"], row["steps"]) == ("ok", "False", "0", "2")
            assert float(row["tokens_per_second"]) == pytest.approx(
                2e3 * int(row["context"]) / float(row["step_median_ms"])
            )
            assert row["torch"] == torch.__version__
            assert row["device"]
        assert (tmp_path / transformer_report.TIME_PLOT).exists()
        assert json.loads((tmp_path / "configuration.json").read_text())["steps"] == 2

    def test_longer_sequences_of_what_ran_out_of_memory_are_not_tried(self, tmp_path, monkeypatch):
        measured = []

        def full(measure, job, limit):
            cell = job[0]
            measured.append((cell.arithmetic, cell.mode, cell.config.context_length))
            if cell.arithmetic == "float32" and cell.mode == "step" and cell.config.context_length == 16:
                return {"status": "oom", "reason": "CUDA out of memory"}
            return found(2.0, 5.0, 1.0) if cell.mode == "step" else found(2.0)

        monkeypatch.setattr(suite, "measured_alone", full)
        asked = ["--dtype", "float32", "bfloat16", "--mode", "forward", "step", "--context-length", "32", "16", "8"]
        assert transformer.main([*TINY, *asked, "--output", str(tmp_path)]) == 0
        assert ("float32", "step", 32) not in measured
        assert {("float32", "forward", 32), ("bfloat16", "step", 32), ("float32", "step", 8)} < set(measured)
        tables = (tmp_path / "tables.md").read_text()
        assert "2 × 32, float32, step: skipped: memory ran out at 2 × 16 already, step" in tables
        assert "2 × 16, float32, step: oom: CUDA out of memory" in tables

    def test_a_series_ends_at_another_model_attention_arithmetic_and_fewer_phases(self):
        rows = [row_with({"status": "oom", "reason": ""}, mode="forward+backward", batch=4)]
        assert no_room(dataclasses.replace(CELL, batch=4), rows) is not None
        assert no_room(dataclasses.replace(CELL, batch=8, warmup=5), rows) is not None
        for changes in (
            {"batch": 2},
            {"mode": "forward"},
            {"arithmetic": "bfloat16"},
            {"compile": "model"},
            {"config": dataclasses.replace(CONFIG, attn="sdpa")},
            {"config": dataclasses.replace(CONFIG, context_length=8)},
            {"config": dataclasses.replace(CONFIG, num_layers=1)},
        ):
            assert no_room(dataclasses.replace(CELL, **{"batch": 4} | changes), rows) is None, changes

    def test_a_dry_run_knows_a_gpus_time_and_memory(self, capsys, monkeypatch):
        monkeypatch.setattr(transformer, "device_name", lambda device: "NVIDIA H200")
        asked = ["--preset", "small", "--context-length", "1024", "--dtype", "bfloat16", "--device", "cpu"]
        assert transformer.main([*asked, "--mode", "forward", "forward+backward", "step", "--dry-run"]) == 0
        *lines, total = capsys.readouterr().out.splitlines()
        rooms = [float(line.removesuffix(" GiB").rpartition(" ")[2]) for line in lines]
        assert rooms == sorted(rooms)
        assert 4 * 128_625_408 / 2**30 < rooms[0] < rooms[2]
        assert re.fullmatch(r"3 rows, \d+ s", total)
