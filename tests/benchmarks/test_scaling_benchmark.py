"""The benchmark of several GPUs: figures that compare, and a search."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace

import pandas as pd
import pytest
import torch

from benchmarks import scaling
from benchmarks.lib.models import rate_columns
from benchmarks.parts import scaling_process
from benchmarks.parts.scaling_process import LONGEST, STEP, STRONG, WEAK, ScalingCase
from benchmarks.scaling import drive, impossible, search, tables, with_efficiency, wrong_losses
from cs336_systems.parallel import Layout
from cs336_systems.profiling import RoundTimes
from cs336_systems.profiling.steps import AllocatorStats, StepTimes

from .small_models import CPU, run_here

CASE = ScalingCase(STEP, "tiny", "2025", 64, STRONG, "ddp", 2, length=32, batch=2, compile="none", warmup_steps=1)
ONE = replace(CASE, parallel="none", processes=1)
TRIED = replace(ONE, what=LONGEST, batch=1)
FLAGS = ["--models", "tiny", "--vocab-size", "64", "--steps", "2", "--warmup-steps", "1", "--timeout", "200"]
ON_GPUS = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.multi_gpu])


def row_of(case, **figures):
    """A row as if measured."""
    row = {"status": "ok", "reason": "", "median_ms": 10.0, "first_loss": 4.0, "peak_mib": 8.0, **figures}
    tokens = case.step_length * case.sequences
    if row["status"] == "ok" and case.what == STEP:
        row |= rate_columns(case.config, tokens, "step", row["median_ms"], 989.5, case.processes)
    return {"case": case.name, **case.columns, **case.work_columns, **row}


def test_every_mode_runs_on_several_processes_and_none_on_one():
    cases = scaling.parse(["--models", "small", "--lengths", "64", "--batch", "2", "--device", "cpu"]).cases
    modes = ("ddp", "fsdp", "context", "fsdp+context")
    several = [(mode, count) for count in (2, 4) for mode in modes]
    assert [(case.parallel, case.processes) for case in cases] == [("none", 1), *several]
    assert {(case.scale, case.what, case.compile, case.warmup_steps) for case in cases} == {(WEAK, STEP, "auto", 3)}
    assert len({case.name for case in cases}) == 9
    longest = scaling.parse(["--longest", "--processes", "1", "4", "--lengths", "256", "--device", "cpu"]).cases
    assert [(case.parallel, case.processes) for case in longest] == [("none", 1), ("context", 4), ("fsdp+context", 4)]
    assert {(case.batch, case.scale, case.compile, case.length) for case in longest} == {(1, STRONG, "none", 256)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--longest", "--parallel", "ddp"], "--parallel must be of context, fsdp.context; got ddp"),
        (["--longest", "--scale", "weak"], "--scale cannot be given with --longest"),
        (["--longest", "--lengths", "64", "128"], "must have one value with --longest"),
        (["--parallel", "none"], "--parallel: expected one of ddp, fsdp, context, fsdp.context; got 'none'"),
        (["--models", "huge"], "--models must be of"),
        (["--compile", "blocks"], "--compile must be of none, auto"),
    ],
)
def test_invalid_options_end_the_program(capsys, arguments, message):
    with pytest.raises(SystemExit):
        scaling.parse(["--device", "cpu", *arguments])
    assert re.search(message, " ".join(capsys.readouterr().err.split()))


@pytest.mark.parametrize(
    ("scale", "parallel", "length", "sequences"),
    [(WEAK, "ddp", 32, 8), (WEAK, "fsdp+context", 128, 2), (STRONG, "fsdp", 32, 2), (STRONG, "context", 32, 2)],
)
def test_work_grows_in_sequences_or_in_their_length(scale, parallel, length, sequences):
    case = replace(CASE, scale=scale, parallel=parallel, processes=4)
    assert (case.step_length, case.sequences, case.config.context_length) == (length, sequences, length)


def test_what_cannot_be_divided(monkeypatch):
    assert "2 sequences cannot be divided among 3" in str(impossible(replace(CASE, processes=3), CPU))
    assert "2 processes cannot share 3 tokens" in str(impossible(replace(CASE, parallel="context", length=3), CPU))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "2 processes need 2 GPUs, one each; this machine has 1" in str(impossible(CASE, torch.device("cuda")))


def test_a_dry_run_of_the_leaderboards_model_says_what_each_gpu_needs_at_least(capsys):
    sizes = ["--suite", "2026", "--models", "8B", "--vocab-size", "151936", "--lengths", "32768", "--batch", "2"]
    how = ["--scale", "strong", "--processes", "2", "--parallel", "ddp", "fsdp", "--device", "cpu", "--dry-run"]
    assert scaling.main([*sizes, *how]) == 0
    ddp, fsdp, _ = capsys.readouterr().out.splitlines()
    whole = 16 * 8_125_698_048 / 2**30
    assert ddp.endswith(f": {whole:.2f} GiB")
    assert fsdp.endswith(f": {whole / 2:.2f} GiB")


def test_figures_of_a_group():
    def times(steps, first, host, peak):
        return StepTimes({}, RoundTimes(steps), first, AllocatorStats(None, None, peak), host, 1.0)

    one, other = times((1.0, 5.0), (10.0,), (0.5, 0.6), 100), times((3.0, 2.0), (30.0,), (0.7, 0.9), 50)
    row = scaling_process.group_columns([(one, [2.0, 1.0]), (other, [4.0, 3.0])])
    assert (row["steps_ms"], row["host_ms"], row["compile_s"]) == ([3.0, 5.0], 0.7, pytest.approx(0.026))
    assert (row["first_loss"], row["last_loss"], row["peak_bytes_of_each"]) == (3.0, 2.0, [100, 50])
    assert scaling_process.group_columns([(times((1.0,), (), (1.0,), None), [1.0, 1.0])])["compile_s"] is None


def test_the_optimizer_has_its_state_before_the_only_step():
    step, untouched = (scaling_process.make_step(TRIED, Layout(CPU), seed=0) for _ in range(2))
    scaling_process.allocate_state(step)
    assert all("exp_avg_sq" in step.optimizer.state[parameter] for parameter in step.model.parameters())
    assert all(parameter.grad is None for parameter in step.model.parameters())
    assert step.optimizer.param_groups[0]["lr"] == untouched.optimizer.param_groups[0]["lr"] > 0
    assert all(map(torch.equal, step.model.parameters(), untouched.model.parameters()))


@pytest.mark.parametrize(
    ("limit", "first", "bisections", "found"),
    [
        (1000, 256, 0, (512, 1024)),
        (1000, 4096, 0, (512, 1024)),
        (1000, 512, 2, (896, 1024)),
        (640, 512, 2, (640, 768)),
        (10, 256, 3, (None, 64)),
        (10**9, 512, 1, (4096, None)),
    ],
)
def test_the_search(limit, first, bisections, found):
    tried = []
    assert search(lambda length: tried.append(length) or length <= limit, first, 4096, bisections) == found
    assert len(tried) == len(set(tried)) <= 7


def test_another_failure_than_memory_ends_the_search():
    notes = []

    def rows(case):
        return [{"status": "error", "reason": "no"} if case.length > 64 else {"status": "ok"}]

    options = scaling.parse(["--device", "cpu", "--longest", "--most", "256"])
    drive(argparse.Namespace(options=options, rows=rows, note=notes.append), [TRIED])
    assert notes == ["tiny none on 1: the search ends: error at 128: no"]


def test_efficiency_is_of_n_times_one():
    failed = row_of(replace(CASE, parallel="fsdp"), status="oom", median_ms=None, first_loss=None)
    rows = [row_of(ONE), row_of(CASE, median_ms=8.0), failed, row_of(replace(CASE, model="small"), median_ms=1.0)]
    frame = with_efficiency(pd.DataFrame(rows))
    assert [*frame["efficiency"][:2]] == [1.0, pytest.approx(10 / 8 / 2)]
    assert frame["efficiency"][2:].isna().all()
    assert "oom" in tables(pd.DataFrame(rows))
    weak = [row_of(replace(ONE, scale=WEAK)), row_of(replace(CASE, scale=WEAK, parallel="context"))]
    one, two = with_efficiency(pd.DataFrame(weak)).to_dict("records")
    # The sequences of two processes are twice as long: a token has as many more pairs.
    more = two["flops_per_token"] / one["flops_per_token"]
    assert two["flops_per_token"] - one["flops_per_token"] == 12 * 4 * 128 * 32
    assert (two["efficiency"], two["work_efficiency"]) == (1.0, pytest.approx(more))
    assert two["mfu"] == pytest.approx(one["mfu"] * more)


def test_another_first_loss_of_the_same_tokens_is_a_warning():
    rows = [row_of(ONE), row_of(CASE, first_loss=4.01), row_of(replace(CASE, parallel="fsdp"), first_loss=4.5)]
    (text,) = wrong_losses(with_efficiency(pd.DataFrame(rows)))
    assert "fsdp on 2" in text
    assert "the first loss is 4.5000, and 4.0000 on one process" in text


def test_the_longest_that_fits():
    def tried(processes, length, status="ok", **figures):
        parallel = "none" if processes == 1 else "context"
        case = replace(TRIED, parallel=parallel, processes=processes, length=length)
        return row_of(case, status=status, **figures)

    rows = [tried(1, 64), tried(1, 128, "oom"), tried(1, 256, "oom"), tried(2, 64), tried(2, 160, median_ms=500.0)]
    text = tables(pd.DataFrame([*rows, tried(4, 64, "oom")]))
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[4:]]
    assert lines == [
        ["tiny", "none", "1", "64", "1.00", "8.00", "0.0100", "128 (oom)"],
        ["tiny", "context", "2", "160", "2.50", "8.00", "0.500", "–"],
        ["tiny", "context", "4", "–", "–", "–", "–", "64 (oom)"],
    ]


@pytest.mark.parametrize("place", ["cpu", ON_GPUS])
def test_the_work_of_one_is_shared(tmp_path, place):
    modes = ("ddp", "fsdp", "context", "fsdp+context")
    axes = "--lengths 32 --batch 2 --processes 1 2 --scale strong --compile none --device"
    assert scaling.main([*FLAGS, *axes.split(), place, "--parallel", *modes, "--out", str(tmp_path)]) == 0
    rows = pd.read_csv(tmp_path / "results.csv")
    assert [*zip(rows["parallel"], rows["status"], strict=True)] == [(mode, "ok") for mode in ("none", *modes)]
    assert rows["first_loss"].max() - rows["first_loss"].min() < 0.01
    assert (rows["last_loss"] < rows["first_loss"]).all()
    assert [*rows["tokens_per_second"]] == pytest.approx([*(64e3 / rows["median_ms"])])
    assert rows["peak_mib"].notna().all() == (place == "cuda")
    assert "one of them is wrong" not in (tmp_path / "tables.md").read_text()
    axes = (
        "--longest --lengths 64 --processes 2 --parallel context --recompute-every 1 --loss-chunk 16 --most 64 --device"
    )
    assert scaling.main([*FLAGS, *axes.split(), place, "--out", str(tmp_path / "longest")]) == 0
    assert [*pd.read_csv(tmp_path / "longest/results.csv")["status"]] == ["ok"]


@pytest.mark.parametrize("what", [STEP, LONGEST])
def test_one_process_measures(what):
    row = scaling_process.measure(replace(ONE, what=what), argparse.Namespace(steps=2, seed=0), Layout(CPU))
    assert len(row["steps_ms"]) == (2 if what == STEP else 1)
    assert ("tokens_per_second" in row) == (what == STEP)
    assert row["last_loss"] <= row["first_loss"]


def test_a_run_and_a_search_that_is_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "run_group", lambda *arguments: {"median_ms": 1.0, "peak_bytes_of_each": [2**20]})
    common = [*FLAGS, "--lengths", "64", "--device", "cpu"]
    run_here(monkeypatch, scaling.main, tmp_path / "steps", *common, "--processes", "1", "--batch", "2")
    search = [*common, "--longest", "--processes", "2", "--parallel", "context", "--recompute-every", "1"]
    run_here(monkeypatch, scaling.main, tmp_path, *search, "--most", "64")
    journal = (tmp_path / "journal.jsonl").read_text()
    rows = run_here(monkeypatch, scaling.main, tmp_path, *search, "--most", "128", "--resume")
    assert (tmp_path / "journal.jsonl").read_text().startswith(journal)
    found = [(row["length"], row["status"], row["peak_mib"]) for row in rows]
    assert found == [("64", "ok", "1.0"), ("128", "ok", "1.0")]
