"""The benchmark of host time."""

from __future__ import annotations

import csv

import pytest
import torch

from benchmarks import host_overhead
from cs336_systems.profiling.timing import RoundTimes

SHAPE = ["--length", "16", "--dim", "8", "--heads", "2", "--dtype", "fp32"]
SMALL = [*SHAPE, "--device", "cpu", "--calls", "2", "--rounds", "2"]


def test_the_table_has_every_implementation_that_can_do_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(host_overhead, "IMPLEMENTATIONS", ("sdpa", "naive", "imaginary"))
    assert host_overhead.main([*SMALL, "--causal", "--output", str(tmp_path), "--commit", "abc"]) == 0
    printed = capsys.readouterr().out
    for name in ("| torch ", "| sdpa ", "| naive "):
        assert name in printed
    assert "imaginary was not measured, forward: impl must be one of" in printed
    assert "Not on a GPU" in printed
    assert f"wrote {tmp_path / 'tables.md'}" in printed
    page = (tmp_path / "tables.md").read_text()
    assert "- commit: abc" in page
    assert "- q, k and v of shape (1, 2, 16, 8), float32, causal mask" in page
    assert printed[printed.index("| implementation") : printed.index("imaginary was")].strip() in page
    assert "- imaginary, backward: impl must be one of" in page
    with (tmp_path / "results.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [(row["what"], row["implementation"], row["status"]) for row in rows] == [
        (what, name, "unsupported" if name == "imaginary" else "ok")
        for what in ("forward", "recorded", "backward")
        for name in ("torch", "sdpa", "naive", "imaginary")
    ]
    for row in rows:
        assert (row["length"], row["dtype"], row["causal"], row["calls"], row["commit"]) == (
            *("16", "float32", "True", "2", "abc"),
        )
        if row["status"] == "ok":
            assert 0 < float(row["min_us"]) <= float(row["median_us"])
            assert row["implementation"] != "torch" or float(row["over_torch"]) == 1


def test_a_call_is_a_share_of_a_batch_of_calls():
    calls: list[int] = []
    milliseconds = host_overhead.host_milliseconds(lambda: calls.append(1), torch.device("cpu"), 50)
    assert len(calls) == 50
    assert 0 < milliseconds < 1


def test_ratios_are_within_rounds_and_above_one_when_slower():
    torchs, ours = RoundTimes((0.010, 0.020)), RoundTimes((0.015, 0.030))
    text = host_overhead.table({"forward": {"torch": torchs, "ours": ours}, "backward": {"torch": torchs}})
    line = [cell.strip() for cell in text.splitlines()[3].split("|")[1:-1]]
    assert line == ["ours", "22.5", "1.50 ×", "–", "–"]


def test_a_backward_pass_is_one_call_each():
    tensors = [torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3)]
    ready, refused = host_overhead.contenders(tensors, True, "backward")
    assert refused.keys() <= {"flash"}
    for name, call in ready.items():
        gradients = call()
        assert [x.shape for x in gradients] == [x.shape for x in tensors], name


def test_defaults():
    options = host_overhead.parse([])
    assert (options.length, options.dtype) == (256, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_host_time_on_a_gpu(capsys, tmp_path):
    assert host_overhead.main(["--rounds", "3", "--output", str(tmp_path)]) == 0
    assert "| flash " in capsys.readouterr().out
