"""The benchmark of memory: cases, what is measured of one, its tables, and a run."""

from __future__ import annotations

import gc
import pickle

import pandas as pd
import pytest
import torch

from benchmarks import memory
from benchmarks.lib.flags import parse
from benchmarks.memory import MemoryCase, make_parser, measure, memory_cases
from benchmarks.parts.memory_tables import checkpointed, complete, tables

from .small_models import CONFIG, FLAGS, changed, measured, run_here

OPTIONS = {"steps": 1, "snapshots": True}
MIB = 2**20


def case_of(every: int | None = None, **changes):
    return MemoryCase(**vars(changed(**changes)) | {"recompute_every": every})


def cases_of(*arguments):
    parser = make_parser(["--device", "cpu"])
    return memory_cases(parser, parse(parser, [*FLAGS, *arguments]))


def test_blocks_are_recomputed_at_the_longest_length_and_by_at_most_all():
    axes = "--lengths 64 32 --modes step --dtypes fp32 --recompute-every 4 2 1 0"
    cases = cases_of(*axes.split())
    assert [(case.length, case.recompute_every) for case in cases] == [(32, None), (64, None), (64, 1), (64, 2)]
    assert len({case.name for case in cases}) == 4
    assert cases[-1].name.endswith("step recompute=2")
    assert all(case.recompute_every is None for case in cases_of("--modes", "forward"))


def test_a_step_and_its_files(tmp_path):
    case = case_of()
    row = measured(measure, case, tmp_path, **OPTIONS | {"plots": True})
    assert row["status"] == "ok", row
    parameters = 4 * CONFIG.parameters() / MIB
    assert 3 * parameters <= row["before_mib"] < 3.2 * parameters
    peak = sum(size for name, size in row.items() if name.startswith("peak: "))
    assert row["peak_mib"] == pytest.approx(peak)
    assert row["peak: optimizer state"] >= 2 * parameters
    assert (row["memory_method"], row["reserved_mib"]) == ("tracked tensors", None)
    # Held are what autograd saves, and the loss.
    assert row["held_mib"] == pytest.approx(row["saved_mib"] + 4 / MIB)
    assert 0 < 2 * row["block_mib"] < row["saved_mib"]
    files = {path.parent.name + path.suffix: path for path in tmp_path.glob("*/*")}
    assert set(files) == {"details.md", "timelines.png", "snapshots.pickle"}
    text = files["details.md"].read_text()
    saved = text[text.index("## Saved for the backward by one block") :].splitlines()[4:]
    assert sum(float(line.split("|")[3]) for line in saved) == pytest.approx(row["block_mib"], rel=0.01)
    assert "| layers.*.ffn" in text
    assert pickle.loads(files["snapshots.pickle"].read_bytes())["device_traces"][0]


def test_a_forward_saves_nothing(tmp_path):
    row = measured(measure, case_of(mode="forward"), tmp_path, steps=1, snapshots=False)
    assert row["status"] == "ok", row
    assert row["held_mib"] is None
    assert "saved_mib" not in row
    assert not (tmp_path / "snapshots").exists()
    assert not (tmp_path / "timelines").exists()


def test_recomputation_saves_less(tmp_path):
    usual, less = (
        measured(measure, case_of(every, mode="forward+backward"), tmp_path, **OPTIONS) for every in (None, 1)
    )
    assert less["held_mib"] < usual["held_mib"]
    assert less["block_mib"] is None
    assert less["quadratic_saved_mib"] * 2 == usual["quadratic_saved_mib"]


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_sizes_by_formula(tmp_path, dtype, itemsize):
    row = measured(measure, case_of(mode="forward+backward", dtype=dtype), tmp_path, **OPTIONS)
    assert row["largest: attention: scores"] == row["quadratic_mib"] == 2 * 2 * 16 * 16 * itemsize / MIB
    assert row["quadratic_saved_mib"] == 2 * row["quadratic_mib"]
    assert row["largest: residual"] == row["residual_mib"] == 2 * 16 * 32 * 4 / MIB
    assert (row["parameter_copies_mib"] > 0) == (dtype == "bfloat16")


def test_tables():
    def row(every=None, status="ok", **figures):
        changes = {name: figures.pop(name) for name in ("dtype", "mode") if name in figures}
        case = case_of(every, **changes)
        return {"case": case.name, **case.columns, "status": status, "peak: mlp": 1.0, **figures}

    rows = [
        row(peak_mib=3.0, held_mib=1.0, median_ms=1.0),
        row(dtype="bfloat16", peak_mib=2.0, held_mib=0.5, median_ms=1.0),
        row(1, peak_mib=1.0, median_ms=3.0),
        row(mode="forward+backward", status="oom"),
    ]
    text = tables(pd.DataFrame(rows))
    assert "3.00 → 2.00 (1.50×)" in text
    assert "Activation checkpointing" in text
    assert [*checkpointed(complete(pd.DataFrame(rows)).query("status == 'ok'"))["recompute_every"]] == ["none", "1"]
    assert "Activation checkpointing" not in tables(pd.DataFrame(rows[:2]))
    assert tables(pd.DataFrame(rows[3:])).count("oom") == 1


def test_a_run_goes_on_where_memory_runs_out(monkeypatch, tmp_path):
    real = memory.make_step

    def small_device(case, *arguments, **how):
        if case.length == 24:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(case, *arguments, **how)

    monkeypatch.setattr(memory, "make_step", small_device)
    axes = "--batch 2 --steps 1 --dtypes fp32 --modes step --recompute-every 1 --lengths 16 24 32"
    rows = run_here(monkeypatch, memory.main, tmp_path, *FLAGS, *axes.split())
    found = [(row["length"], row["recompute_every"], row["status"]) for row in rows]
    assert found == [("16", "", "ok"), ("24", "", "oom"), ("32", "", "skipped"), ("32", "1", "ok")]
    assert "memory ran out at batch 2, length 24" in (tmp_path / "tables.md").read_text()
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures >= {"peak.png", "categories.png"}


@pytest.mark.gpu
@pytest.mark.parametrize("provider", ["naive", "flash", "sdpa"])
@pytest.mark.parametrize("mode", ["forward", "forward+backward", "step"])
def test_on_a_gpu(tmp_path, provider, mode):
    case = case_of(provider=provider, mode=mode, dtype="bfloat16", context_length=256, d_model=256, vocab_size=512)
    how = {"device": torch.device("cuda"), **OPTIONS}
    measured(measure, case, tmp_path, **how)  # allocates workspaces and buffers that this process keeps
    gc.collect()
    kept = torch.cuda.memory_allocated() / MIB
    row = measured(measure, case, tmp_path, **how)
    assert row["status"] == "ok", row
    assert row["reserved_mib"] >= row["peak_mib"] > row["before_mib"] >= 4 * case.config.parameters() / MIB
    assert row["memory_method"] == "cuda allocator"
    recorded = sum(size for name, size in row.items() if name.startswith("peak: "))
    assert recorded == pytest.approx(row["peak_mib"] - kept, rel=0.1)
