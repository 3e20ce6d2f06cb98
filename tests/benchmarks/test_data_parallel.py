"""The benchmark of data parallelism: its cases, a step in every mode, memory by formula, tables, and refusals."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from dataclasses import replace

import pandas as pd
import pytest
import torch

from benchmarks import data_parallel
from benchmarks.lib.harness import Row
from benchmarks.parts import data_parallel_process
from benchmarks.parts.data_parallel_modes import MODES, STAGES, make_training, shares_of
from benchmarks.parts.data_parallel_process import PHASES, DataParallelCase, make_phases, measure
from benchmarks.parts.data_parallel_tables import complete, plots, tables, with_one_process, wrong_losses
from cs336_systems.parallel import Layout

from ..course.conftest import group_of_one
from .small_models import CONFIG, CPU, FLAGS, context, run_here

__all__ = ["group_of_one"]

CASE = DataParallelCase("tiny", "2025", CONFIG, "flat", None, 2, "float32", batch=2, warmup_steps=1)
ONE = replace(CASE, parallel="none", processes=1)
OPTIONS = Namespace(steps=2, most_steps=2, seed=0, overlap=False, trace=False)
COURSE = ("naive", "flat", "overlapped", "bucketed", "sharded-optimizer", "fsdp")
ON_GPUS = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.multi_gpu])


def gpus(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_one_process_without_communication_and_every_mode_on_several():
    cases = data_parallel.parse(["--device", "cpu", "--processes", "1,2", "4", "--bucket-mb", "10", "1"]).cases
    several = [mode for mode in MODES if mode != "none"]
    assert [(case.parallel, case.processes) for case in cases if case.bucket_mb != 10] == [
        ("none", 1),
        *((mode, count) for count in (2, 4) for mode in several),
    ]
    assert [case.bucket_mb for case in cases if case.parallel == "bucketed"] == [1, 10, 1, 10]
    assert len({case.name for case in cases}) == len(cases)


def test_defaults_on_gpus(monkeypatch):
    gpus(monkeypatch, 4)
    cases = data_parallel.parse(["--device", "cuda"]).cases
    assert {(case.parallel == "none", case.processes) for case in cases} == {(True, 1), (False, 4)}
    assert {case.bucket_mb for case in cases} == {None, 1, 10, 100, 1000}
    assert {(case.model, case.dtype) for case in cases} == {("xl", "float32"), ("xl", "bfloat16")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--device", "cuda", "--processes", "4"],
            "--processes must be at most the number of GPUs: 4 processes need 4 GPUs, one each; this machine has 2",
        ),
        (
            ["--processes", "1", "--parallel", "naive"],
            "--processes must have 1 for --parallel none, and more for others",
        ),
        (["--parallel", "zero"], "--parallel: expected one of none, naive, flat"),
        (["--models", "huge"], "--models must be of"),
        (["--dtypes", "fp16"], "--dtypes must be of float32, bfloat16; got float16"),
        (["--bucket-mb", "0"], "--bucket-mb: expected a whole number of at least 1; got '0'"),
    ],
)
def test_invalid_options_end_the_program(monkeypatch, capsys, arguments, message):
    gpus(monkeypatch, 2)
    with pytest.raises(SystemExit):
        data_parallel.parse(["--device", "cpu", *arguments])
    assert message in " ".join(capsys.readouterr().err.split())


def test_one_gpu_measures_one_process_alone(monkeypatch):
    gpus(monkeypatch, 1)
    device = torch.device("cuda")
    assert {case.processes for case in data_parallel.parse(["--device", "cuda"]).cases} == {1, 2}
    monkeypatch.setattr(data_parallel, "run_group", lambda *arguments: {"median_ms": 1.0})
    assert data_parallel.measure(ONE, context(device=device))["median_ms"] == 1.0
    row = data_parallel.measure(CASE, context(device=device))
    assert (row["status"], row["reason"]) == (
        "unsupported",
        "2 processes need 2 GPUs, one each; this machine has 1",
    )


def test_memory_by_formula_is_that_of_the_course():
    """docs/course.md has these figures: 16, 12 and 8 bytes for a parameter on two processes."""
    sizes = {mode: [*shares_of(mode).state_bytes(100, 2).values()] for mode in MODES}
    assert sizes["flat"] == sizes["torch-ddp"] == [400, 800, 1600]
    assert sizes["sharded-optimizer"] == [400, 800, 1200]
    assert sizes["fsdp"] == sizes["torch-fsdp"] == [200, 400, 800]


def taken(parallel, layout, dtype="float32"):
    """The row of a mode on one process."""
    bucket = 1.0 if parallel == "bucketed" else None
    case = replace(CASE, parallel=parallel, bucket_mb=bucket, processes=1, dtype=dtype)
    return measure(case, OPTIONS, layout)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_mode_of_the_course_takes_the_same_steps(group_of_one, dtype):
    one = taken("none", Layout(CPU), dtype)
    assert "communication_median_ms" not in one
    assert one["share_communication"] is None
    for mode in COURSE:
        row = taken(mode, group_of_one, dtype)
        losses = [row["first_loss"], row["last_loss"]]
        assert losses == pytest.approx([one["first_loss"], one["last_loss"]], rel=1e-5 if dtype == "float32" else 1e-2)
        assert len(row["steps_ms"]) == 2
        assert (row["share_communication"] is None) == (mode in ("sharded-optimizer", "fsdp"))
        assert sum(row[f"{phase}_min_ms"] for phase in PHASES) <= row["max_ms"]


def test_phases_of_a_step(group_of_one):
    torch.manual_seed(0)
    training = make_training("naive", CONFIG, group_of_one, dtype="float32", bucket_mb=None)
    tokens = torch.zeros(1, CONFIG.context_length, dtype=torch.long)
    losses: list[torch.Tensor] = []
    phases = make_phases(training, tokens, tokens, losses)
    assert [*phases] == [*PHASES]
    for phase in phases.values():
        phase()
    assert (len(losses), losses[0].requires_grad) == (1, False)
    assert all(parameter.grad is None for group in training.optimizer.param_groups for parameter in group["params"])


@pytest.mark.parametrize("keep", [False, True])
def test_overlap_is_that_of_rank_0_and_drawn(tmp_path, monkeypatch, keep):
    def record(step, path, **how):
        step()
        kernels = [("gemm", 0, 3000), ("ncclDevKernel_AllReduce", 2000, 4000)]
        events = [{"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur} for name, ts, dur in kernels]
        path.write_text(json.dumps({"traceEvents": events}))

    monkeypatch.setattr(data_parallel_process, "record_trace", record)
    options = Namespace(out=tmp_path, trace=keep, plots=True)
    ran = []
    for rank in (0, 1):
        layout = Layout(torch.device("cuda"), "ddp", rank, 2)
        row = data_parallel_process.overlap_columns({"forward": lambda: ran.append(1)}, CASE, options, layout)
        assert row == ({"collectives_ms": 4.0, "share_hidden": 0.25} if rank == 0 else {})
    assert len(ran) == 2
    assert len([*tmp_path.glob("timelines/*.png")]) == 1
    assert len([*tmp_path.glob("traces/*.json")]) == (2 if keep else 0)


def row_of(case, median=None, **figures):
    row: Row = {"status": "ok", "reason": "", **figures}
    if median is not None:
        row |= {"median_ms": median, "low_ms": median, "high_ms": median, "forward_median_ms": median / 2}
    sizes = {f"{stage}_predicted_mib": float(size) for stage, size in case.state_bytes.items()}
    return {"case": case.name, **case.columns, **sizes, **row}


def test_tables_compare_with_one_process(tmp_path):
    bucketed = [replace(CASE, parallel="bucketed", bucket_mb=size) for size in (1, 10)]
    rows = [
        row_of(ONE, 10.0, **{f"{stage}_held_mib": 1.0 + index for index, stage in enumerate(STAGES)}),
        row_of(CASE, 16.0, share_communication=0.25, communication_median_ms=4.0, collectives_ms=5.0, share_hidden=0.5),
        *(row_of(case, 12.5) for case in bucketed),
        row_of(replace(CASE, parallel="fsdp"), status="oom", reason="full"),
    ]
    frame = pd.DataFrame(rows)
    found = with_one_process(complete(frame)).set_index("parallel")
    assert found["efficiency"]["bucketed 10 MiB"] == 0.8
    assert found["over_one_ms"].dropna().to_dict() == {"flat": 6.0, "bucketed 1 MiB": 2.5, "bucketed 10 MiB": 2.5}
    text = re.sub(" +", " ", tables(frame))
    assert "| flat | 16.0 | 8.00 | – | 4.00 | – | 0.250 | 6.00 | 0.625 | 5.00 | 0.500 |" in text
    assert "| bucket_mb 1 | bucket_mb 10 |" in text
    assert "| after step, held | after step, predicted |" in text
    assert "| fsdp | oom |" in text
    plots(frame, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"phases.png", "memory.png"}
    frame.to_csv(tmp_path / "results.csv", index=False)
    plots(pd.read_csv(tmp_path / "results.csv"), tmp_path)
    plots(frame[4:], tmp_path / "none")


def test_another_loss_of_the_same_tokens_is_a_warning():
    same = {"first_loss": 4.0, "last_loss": 3.0}
    rows = [row_of(ONE, **same | {"last_loss": 1.0}), row_of(CASE, **same)]
    rows += [row_of(replace(CASE, parallel="fsdp"), **same | {"last_loss": 3.5})]
    (text,) = wrong_losses(complete(pd.DataFrame(rows)))
    assert "last_loss is 3.0000 with flat and 3.5000 with fsdp; one of them is wrong" in text


def test_a_dry_run_says_what_each_process_needs_at_least(capsys):
    arguments = ["--device", "cpu", "--models", "xl", "--parallel", "flat", "sharded-optimizer", "fsdp", "--dry-run"]
    assert data_parallel.main(arguments) == 0
    sizes = [float(size) for size in re.findall(r": ([\d.]+) GiB", capsys.readouterr().out)]
    assert sizes == [pytest.approx(n * 1_998_235_200 / 2**30, abs=0.01) for n in (16, 12, 8)]


@pytest.mark.parametrize("place", ["cpu", ON_GPUS])
def test_two_processes_train_in_every_mode(tmp_path, monkeypatch, place):
    axes = ["--device", place, "--processes", "1", "2", "--batch", "2", "--bucket-mb", "1", "--dtypes", "fp32"]
    rows = run_here(monkeypatch, data_parallel.main, tmp_path, *FLAGS, *axes, "--steps", "2", "--warmup-steps", "1")
    assert [(row["parallel"], row["status"]) for row in rows] == [(mode, "ok") for mode in MODES]
    for name in ("first_loss", "last_loss"):
        losses = [float(row[name]) for row in rows[1:]]
        assert max(losses) - min(losses) < 1e-3
    assert all((row["after_step_held_mib"] != "") == (place == "cuda") for row in rows if "after_step_held_mib" in row)
    text = (tmp_path / "tables.md").read_text()
    assert "## Memory by stage, MiB" in text
    assert "one of them is wrong" not in text
