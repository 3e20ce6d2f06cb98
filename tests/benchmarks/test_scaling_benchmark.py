"""The benchmark of several GPUs: groups of processes that always end, figures that compare, and a search."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import time
from pathlib import Path

import pytest
import torch

from benchmarks import scaling, scaling_cell, scaling_groups
from benchmarks.scaling import cells_of, impossible, look_for_longest
from benchmarks.scaling_cell import FAILURE, LONGEST, RESULT, STEP, STRONG, WEAK, Cell, Job, allocate_averages, together
from benchmarks.scaling_groups import command_of, log_of, run_group
from benchmarks.scaling_report import longest_lines, row_of, step_line, warnings_of, with_efficiency
from benchmarks.scaling_search import Found, first_length, search
from benchmarks.training_cell import Measured
from cs336_systems.parallel import Layout
from cs336_systems.profiling.memory import GIB
from cs336_systems.profiling.timing import RoundTimes

CELL = Cell(STEP, "tiny", "2025", 64, STRONG, "ddp", 2, context=32, batch=2, compile=False)
ALONE = dataclasses.replace(CELL, mode="none", processes=1)
TRIED = dataclasses.replace(ALONE, what=LONGEST, batch=1)
TINY = ("--preset", "tiny", "--vocab-size", "64", "--no-compile", "--steps", "2", "--warmup", "1", "--limit", "200")
ON_GPUS = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.multi_gpu])


def job_of(cell, device="cpu", limit=200.0):
    return Job(cell, device, warmup=1, steps=2, tf32=False, seed=0, patience=limit, folder="")


def measured_row(cell, **columns):
    """A row as if it had been measured."""
    measured = {"status": "ok", "reason": "", "median_ms": 10.0, "first_loss": 4.0}
    return row_of(cell, measured | columns, True, "NVIDIA H200")


class TestOptions:
    def test_every_mode_is_measured_on_several_and_none_on_one(self):
        options = scaling.parse(["--preset", "small", "--context", "64", "--batch", "2"])
        cells = cells_of(options)
        assert [(cell.mode, cell.processes) for cell in cells] == [
            ("none", 1),
            *((mode, 2) for mode in ("ddp", "fsdp", "context", "fsdp+context")),
            *((mode, 4) for mode in ("ddp", "fsdp", "context", "fsdp+context")),
        ]
        assert {(cell.scale, cell.what, cell.compile) for cell in cells} == {(WEAK, STEP, True)}
        assert len({cell.key for cell in cells}) == len(cells)

    def test_the_longest_of_one_sequence(self):
        cells = cells_of(scaling.parse(["--longest", "--processes", "1", "4", "--context", "256", "--device", "cpu"]))
        assert [(cell.mode, cell.processes) for cell in cells] == [("none", 1), ("context", 4), ("fsdp+context", 4)]
        assert {(cell.batch, cell.scale, cell.compile, cell.context) for cell in cells} == {(1, STRONG, False, 256)}

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--longest", "--parallel", "ddp"], r"--parallel must be of context, fsdp\+context with --longest"),
            (["--longest", "--scale", "weak"], "--scale must not be given with --longest"),
            (["--longest", "--context", "64", "128"], "--context must be one length with --longest"),
            (["--parallel", "none"], "invalid choice: 'none'"),
            (["--preset", "huge"], "--preset must be one of"),
        ],
    )
    def test_what_cannot_be_together_is_refused(self, capsys, arguments, message):
        with pytest.raises(SystemExit):
            scaling.parse(arguments)
        assert re.search(message, " ".join(capsys.readouterr().err.split()))


class TestCells:
    @pytest.mark.parametrize(
        ("scale", "mode", "length", "sequences"),
        [
            (WEAK, "ddp", 32, 8),
            (WEAK, "fsdp", 32, 8),
            (WEAK, "context", 128, 2),
            (WEAK, "fsdp+context", 128, 2),
            (STRONG, "ddp", 32, 2),
            (STRONG, "context", 32, 2),
        ],
    )
    def test_work_grows_in_sequences_or_in_their_length(self, scale, mode, length, sequences):
        cell = dataclasses.replace(CELL, scale=scale, mode=mode, processes=4)
        assert (cell.length, cell.sequences, cell.config.context_length) == (length, sequences, length)

    def test_what_cannot_be_divided(self, monkeypatch):
        assert impossible(CELL, "cpu") is None
        three = dataclasses.replace(CELL, processes=3)
        assert "2 sequences cannot be divided among 3" in str(impossible(three, "cpu"))
        short = dataclasses.replace(CELL, mode="context", context=3)
        assert "2 processes cannot share 3 tokens" in str(impossible(short, "cpu"))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        assert str(impossible(CELL, "cuda")) == "unsupported: this machine has 1 GPUs"

    def test_a_job_is_the_same_after_its_way_to_a_process(self):
        job = job_of(dataclasses.replace(CELL, recompute_every=1))
        assert Job.from_json(job.as_json()) == job
        assert command_of(job)[-1] == job.as_json()
        assert "--nproc-per-node" in command_of(job)
        assert "torch.distributed.run" not in command_of(job_of(ALONE))

    def test_the_figures_of_a_group(self):
        one = Measured(RoundTimes((1.0, 5.0)), 10.0, 100, 0.5, 2.0, 1.0)
        other = Measured(RoundTimes((3.0, 2.0)), 30.0, 50, 0.7, 4.0, 3.0)
        assert together([one, other]) == Measured(RoundTimes((3.0, 5.0)), 30.0, 100, 0.7, 3.0, 2.0)
        unknown = dataclasses.replace(one, first_ms=None, peak_bytes=None)
        assert together([unknown]) == unknown

    def test_the_optimizer_has_its_averages_before_the_first_step(self):
        step, untouched = (scaling_cell.prepared_step(job_of(TRIED), Layout(torch.device("cpu"))) for _ in range(2))
        allocate_averages(step)
        assert all("exp_avg_sq" in step.optimizer.state[parameter] for parameter in step.model.parameters())
        assert all(parameter.grad is None for parameter in step.model.parameters())
        assert {group["lr"] for group in step.optimizer.param_groups} == {untouched.optimizer.param_groups[0]["lr"]}
        pairs = zip(step.model.parameters(), untouched.model.parameters(), strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


class TestSearch:
    @pytest.mark.parametrize(
        ("limit", "first", "bisections", "found"),
        [
            (1000, 256, 0, Found(512, 1024)),
            (1000, 4096, 0, Found(512, 1024)),
            (1000, 512, 2, Found(896, 1024)),
            (640, 512, 2, Found(640, 768)),
            (64, 64, 0, Found(64, 128)),
            (10, 256, 3, Found(None, 64)),
            (10**9, 512, 1, Found(4096, None)),
        ],
    )
    def test_it_finds_the_longest(self, limit, first, bisections, found):
        tried = []

        def fits(length):
            tried.append(length)
            return length <= limit

        assert search(fits, first, most=4096, bisections=bisections) == found
        assert len(tried) == len(set(tried)) <= 7

    def test_it_begins_where_the_estimate_ends(self):
        tight = first_length(TRIED, GIB // 8, most=2**20)
        assert 32 < tight < first_length(TRIED, GIB, most=2**20) < 2**20
        shared = dataclasses.replace(TRIED, mode="context", processes=4)
        assert first_length(shared, GIB, most=2**20) > first_length(TRIED, GIB, most=2**20)
        assert first_length(TRIED, None, most=2**20) == 32
        assert first_length(TRIED, 2**60, most=100) == 64

    def test_another_failure_than_memorys_ends_it(self):
        said = []

        class Rows:
            progress = type("Progress", (), {"note": staticmethod(said.append)})

            def of(self, cell):
                if cell.context > 64:
                    return {"status": "error", "reason": "no"}
                return {"status": "ok"}

        options = scaling.parse(["--longest", "--most", "256"])
        look_for_longest(TRIED, options, Rows(), None)
        assert said == ["tiny, none on 1: the search ends with error at 128: no"]


class TestFigures:
    def test_efficiency_is_of_n_times_one(self):
        rows = with_efficiency(
            [
                measured_row(ALONE, median_ms=10.0),
                measured_row(CELL, median_ms=8.0),
                measured_row(dataclasses.replace(CELL, mode="fsdp"), status="oom", median_ms=None),
                measured_row(dataclasses.replace(CELL, preset="small"), median_ms=1.0),
            ]
        )
        assert [row["efficiency"] for row in rows] == [1.0, pytest.approx(10 / 8 / 2), None, None]
        assert step_line(rows[1])[6:8] == ["62.5 %", "62.5 %"]
        assert step_line(rows[2])[3] == "oom"

    def test_longer_sequences_take_more_work_a_token(self):
        weak = dataclasses.replace(CELL, scale=WEAK, mode="context")
        alone = dataclasses.replace(weak, mode="none", processes=1)
        one, two = with_efficiency([measured_row(alone), measured_row(weak)])
        assert two["tokens_per_second"] == 2 * one["tokens_per_second"]
        assert two["efficiency"] == 1.0
        more = (two["flops_per_token"] - one["flops_per_token"]) / one["flops_per_token"]
        assert two["flops_per_token"] - one["flops_per_token"] == 12 * 4 * 128 * 32
        assert two["work_efficiency"] == pytest.approx(1 + more)
        assert two["mfu"] == pytest.approx(one["mfu"] * (1 + more))

    def test_the_same_sequences_have_the_same_loss(self):
        rows = [measured_row(ALONE), measured_row(CELL, first_loss=4.01)]
        assert warnings_of(rows) == []
        (text,) = warnings_of([*rows, measured_row(dataclasses.replace(CELL, mode="fsdp"), first_loss=4.5)])
        assert text.startswith("tiny, 2 × 32, fsdp on 2: the first loss is 4.5000, and 4.0000 on one process")

    def test_the_longest_that_fits(self):
        def tried(processes, context, **columns):
            mode = "none" if processes == 1 else "context"
            return measured_row(dataclasses.replace(TRIED, mode=mode, processes=processes, context=context), **columns)

        full = {"status": "oom", "median_ms": None}
        rows = [
            tried(1, 64, peak_bytes=GIB, peak_bytes_of_each=[GIB]),
            tried(1, 128, **full),
            tried(1, 256, **full),
            tried(2, 64),
            tried(2, 160, median_ms=500.0, peak_bytes=3 * GIB, peak_bytes_of_each=[3 * GIB, GIB]),
            tried(4, 64, **full),
        ]
        assert rows[0]["tokens_per_second"] is None
        assert rows[4]["peak_gib_of_each"] == [3.0, 1.0]
        assert longest_lines(rows) == [
            ["tiny, none", "1", "64", "1.00", "1.00", "0.0100", "128 (oom)"],
            ["tiny, context", "2", "160", "2.50", "3.00", "0.500", "–"],
            ["tiny, context", "4", "–", "–", "–", "–", "64 (oom)"],
        ]


class TestGroups:
    @pytest.mark.parametrize("place", ["cpu", ON_GPUS])
    def test_the_work_of_one_is_shared(self, tmp_path, place):
        modes = ("ddp", "fsdp", "context", "fsdp+context")
        arguments = ("--context", "32", "--batch", "2", "--processes", "1", "2", "--scale", "strong", "--device", place)
        assert scaling.main([*TINY, *arguments, "--parallel", *modes, "--output", str(tmp_path)]) == 0
        with (tmp_path / "results.csv").open() as file:
            rows = [*csv.DictReader(file)]
        assert [(row["mode"], row["status"], row["reason"]) for row in rows] == [
            (mode, "ok", "") for mode in ("none", *modes)
        ]
        losses = [float(row["first_loss"]) for row in rows]
        assert max(losses) - min(losses) < 0.01
        assert all(float(row["last_loss"]) < float(row["first_loss"]) for row in rows)
        assert [float(row["tokens_per_second"]) for row in rows] == [
            pytest.approx(64e3 / float(row["median_ms"])) for row in rows
        ]
        tables = (tmp_path / "tables.md").read_text()
        assert "| tiny, 2 × 32, fsdp+context |" in tables
        assert "## Warnings" not in tables
        if place == "cuda":
            assert all(float(row["peak_gib"]) > 0 for row in rows)

    @pytest.mark.parametrize("place", ["cpu", ON_GPUS])
    def test_the_longest_is_looked_for_and_gone_on_with(self, tmp_path, place):
        arguments = [*TINY, "--longest", "--context", "64", "--processes", "2", "--parallel", "context"]
        arguments += ["--recompute-every", "1", "--loss-chunk", "16", "--device", place, "--output", str(tmp_path)]
        assert scaling.main([*arguments, "--most", "64"]) == 0
        journal = (tmp_path / "journal.jsonl").read_text()
        assert len(journal.splitlines()) == 1
        assert scaling.main([*arguments, "--most", "128", "--resume"]) == 0
        assert (tmp_path / "journal.jsonl").read_text().startswith(journal)
        with (tmp_path / "results.csv").open() as file:
            assert {row["length"]: row["status"] for row in csv.DictReader(file)}["128"] == "ok"
        assert "| tiny, context, recompute every 1, loss chunk 16 |" in (tmp_path / "tables.md").read_text()

    def test_memory_that_runs_out_in_one_process_ends_all(self, tmp_path):
        program = tmp_path / "program.py"
        program.write_text(FULL)
        begin = time.monotonic()
        row = run_group(job_of(CELL), 200, tmp_path / "log.txt", [str(program)])
        assert (row["status"], row["reason"]) == ("oom", "CUDA out of memory"), (tmp_path / "log.txt").read_text()
        assert time.monotonic() - begin < 100

    @pytest.mark.slow
    def test_a_group_that_hangs_is_ended(self, tmp_path):
        program = tmp_path / "program.py"
        program.write_text(HANGING.format(folder=str(tmp_path)))
        row = run_group(job_of(CELL, limit=30.0), 30, tmp_path / "log.txt", [str(program)])
        assert (row["status"], row["reason"]) == ("error", "took longer than 30 s")
        pids = [int(path.name) for path in (tmp_path / "pids").iterdir()]
        assert pids
        assert not any(alive(pid) for pid in pids)

    def test_processes_that_say_nothing_have_their_last_lines_as_reason(self, tmp_path):
        program = tmp_path / "program.py"
        program.write_text("raise SystemExit('the moon is in the wrong house')")
        log = log_of(ALONE, tmp_path)
        row = run_group(job_of(ALONE), 200, log, [str(program)])
        assert row == {"status": "error", "reason": "ended with status 1: the moon is in the wrong house"}
        assert log.name == "step-tiny-2025-64-tokens-not-compiled-strong-2-x-32-none-on-1.txt"

    def test_what_processes_said(self, tmp_path):
        assert scaling_groups._said(tmp_path, 2) is None
        for rank, status in enumerate(("error", "oom")):
            (tmp_path / FAILURE.format(rank)).write_text(json.dumps({"status": status, "reason": ""}))
        assert scaling_groups._said(tmp_path, 2) == {"status": "oom", "reason": ""}
        (tmp_path / RESULT).write_text(json.dumps({"status": "ok"}))
        assert scaling_groups._said(tmp_path, 2) == {"status": "ok"}

    def test_an_error_of_a_process_is_its_rows(self, tmp_path):
        wrong = dataclasses.replace(ALONE, preset="small", suite="1999")
        row = run_group(job_of(wrong), 200, tmp_path / "log.txt")
        assert row["status"] == "error"
        assert "ValueError: suite must be one of '2025', '2026'; got '1999'" in row["reason"]


def alive(pid):
    """Whether a process is there, and no zombie."""
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


FULL = """
import sys
import torch
from benchmarks import scaling_cell

measure = scaling_cell.measure

def full(job, layout):
    if layout.rank == 1:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return measure(job, layout)

scaling_cell.measure = full
scaling_cell.main(sys.argv[1:])
"""
HANGING = """
import os, pathlib, sys, time
from benchmarks import scaling_cell

pids = pathlib.Path("{folder}") / "pids"

def hanging(job, layout):
    pids.mkdir(exist_ok=True)
    (pids / str(os.getpid())).touch()
    if layout.rank == 1:
        time.sleep(600)
    layout.barrier()

scaling_cell.measure = hanging
scaling_cell.main(sys.argv[1:])
"""
