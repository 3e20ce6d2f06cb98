"""The benchmark of all-reduces: sizes and processes, sums that are checked, bandwidths, and what it refuses."""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import replace

import pandas as pd
import pytest
import torch
import torch.distributed as dist

from benchmarks import all_reduce
from benchmarks.parts import all_reduce_process
from benchmarks.parts.all_reduce_process import AllReduceCase, bandwidth_columns, check_sums, make_ready, values
from cs336_systems.parallel import Layout
from cs336_systems.profiling import RoundTimes

from ..course.conftest import group_of_one
from .small_models import CPU, context, run_here

__all__ = ["group_of_one"]

CASE = AllReduceCase("gloo", 2, 1.0, 5)
ON_GPUS = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.multi_gpu])


def gpus(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_every_size_with_every_number_of_processes():
    cases = all_reduce.parse(["--device", "cpu"]).cases
    assert [(case.processes, case.megabytes) for case in cases] == [(n, mb) for n in (2, 4, 6) for mb in (1, 10, 100)]
    assert {(case.backend, case.warmup_steps) for case in cases} == {("gloo", 5)}
    assert (CASE.elements, CASE.bytes, replace(CASE, megabytes=1e-9).elements) == (250_000, 10**6, 1)


@pytest.mark.parametrize(("count", "processes"), [(1, [2]), (2, [2]), (4, [2, 4]), (8, [2, 4, 6, 8])])
def test_as_many_processes_as_gpus(monkeypatch, count, processes):
    gpus(monkeypatch, count)
    cases = all_reduce.parse(["--device", "cuda"]).cases
    assert [*dict.fromkeys(case.processes for case in cases)] == processes
    assert {case.backend for case in cases} == {"nccl"}
    assert [case.megabytes for case in cases][:4] == [1, 10, 100, 1000]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "1"], "--processes must be at least 2, since one process has nothing to reduce; got 1"),
        (["--megabytes", "0"], "--megabytes: expected a positive number of megabytes; got '0'"),
        (["--megabytes", "many"], "expected a positive number of megabytes; got 'many'"),
        (
            ["--device", "cuda", "--processes", "2", "3"],
            "--processes must be at most the number of GPUs: 3 processes need 3 GPUs, one each; this machine has 2",
        ),
        (["--device", "cuda:1"], "--device must be cuda or cpu; got cuda:1"),
    ],
)
def test_invalid_options_end_the_program(monkeypatch, capsys, arguments, message):
    gpus(monkeypatch, 2)
    with pytest.raises(SystemExit):
        all_reduce.parse(["--device", "cpu", *arguments])
    assert message in " ".join(capsys.readouterr().err.split())


def test_one_gpu_is_not_enough(monkeypatch):
    gpus(monkeypatch, 1)
    row = all_reduce.measure(replace(CASE, backend="nccl"), context(device=torch.device("cuda")))
    reason = "2 processes need 2 GPUs, one each; this machine has 1"
    assert row == {"bytes": 10**6, "status": "unsupported", "reason": reason}


def test_a_tensor_that_does_not_fit_is_not_tried(monkeypatch):
    monkeypatch.setattr(all_reduce, "available_bytes", lambda: 2**20)
    row = all_reduce.measure(CASE, context())
    assert (row["status"], row["reason"]) == ("skipped", "2 processes need 0.0 GiB; 0.0 are available")


def test_bandwidths_are_those_of_nccl_tests():
    times = RoundTimes((1.0, 2.0, 4.0))
    row = bandwidth_columns(8 * 10**6, 4, times)
    assert row["algorithm_gb_s"] == pytest.approx(4.0)
    assert (row["algorithm_gb_s_low"], row["algorithm_gb_s_high"]) == pytest.approx((2.0, 8.0))
    assert row["bus_gb_s"] == pytest.approx(6.0)


def test_values_do_not_grow_and_wrong_sums_are_found(monkeypatch):
    tensor = values(2**20 + 5, CPU, seed=0)
    assert torch.equal(tensor[-5:], tensor[:5])
    ends = tensor[:7].clone(), tensor[-7:].clone()
    tensor *= 1 + 2 + 3
    check_sums(tensor, ends, 3)
    with pytest.raises(RuntimeError, match="must return the sum over all processes; it differs by"):
        check_sums(tensor, ends, 2)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    make_ready(tensor, Layout(CPU, size=3))()
    torch.testing.assert_close(tensor[:7], 2 * ends[0])


def taken(layout):
    """The columns of a group's all-reduces."""
    options = Namespace(steps=3, most_steps=3, seed=0)
    case = replace(CASE, processes=layout.size, megabytes=0.01)
    return all_reduce_process.measure(case, options, layout) | {"bytes": 1}


def test_a_group_of_one(group_of_one):
    row = taken(group_of_one)
    assert (len(row["steps_ms"]), row["dtype"], row["bus_gb_s"]) == (3, "float32", 0.0)
    assert row["algorithm_gb_s"] > 0


def row_of(case, milliseconds=None, **figures):
    row = {"status": "ok", "reason": "", **figures}
    if milliseconds is not None:
        times = RoundTimes((milliseconds,))
        row |= {**all_reduce_process.step_columns(times), **bandwidth_columns(case.bytes, case.processes, times)}
    return {"case": case.name, **case.columns, **row}


def test_tables_and_plots(tmp_path):
    larger = replace(CASE, megabytes=100.0)
    rows = [row_of(CASE, 1.0), row_of(larger, 50.0), row_of(replace(CASE, processes=4), status="error", reason="no")]
    frame = pd.DataFrame(rows)
    text = re.sub(" +", " ", all_reduce.tables(frame))
    assert "| gloo | 2 | 100 | 50.0 |" in text
    assert "| gloo | 4 | 1 | error |" in text
    assert "## Bus bandwidth, GB/s" in text
    assert "| backend | megabytes | processes 2 |" in text
    all_reduce.plots(frame, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"time.png", "bus-bandwidth.png"}
    assert "| gloo | 4 | 1 | error |" in re.sub(" +", " ", all_reduce.tables(frame[2:]))
    all_reduce.plots(frame[2:], tmp_path / "none")


@pytest.mark.parametrize("place", ["cpu", ON_GPUS])
def test_two_processes_reduce(tmp_path, monkeypatch, place):
    arguments = ["--device", place, "--processes", "2", "--megabytes", "0.001", "1", "--steps", "3", "--commit", "abc"]
    rows = run_here(monkeypatch, all_reduce.main, tmp_path, *arguments)
    assert [(row["megabytes"], row["bytes"], row["status"]) for row in rows] == [
        ("0.001", "1000", "ok"),
        ("1.0", "1000000", "ok"),
    ]
    assert all(float(row["bus_gb_s"]) == float(row["algorithm_gb_s"]) > 0 for row in rows)
    assert all(len(row["steps_ms"].split(";")) >= 3 for row in rows)
    assert "## Bus bandwidth" in (tmp_path / "tables.md").read_text()
