"""Communication that computation hides, from traces with kernels on two streams."""

from __future__ import annotations

import json

import pytest

from cs336_systems.profiling.overlap import Overlap, read_overlap

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def written(folder, *kernels):
    """A trace with kernels (name, begin, duration) in microseconds, an operator, and a copy."""
    path = folder / "trace.json"
    events = [{"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur} for name, ts, dur in kernels]
    events.append({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9000})
    events.append({"ph": "M", "name": "process_name"})
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_what_computation_hides(tmp_path):
    path = written(tmp_path, ("gemm", 1000, 2000), ("gemm", 2500, 1500), (ALL_REDUCE, 3000, 3000), ("adamw", 7000, 500))
    found = read_overlap(path)
    assert found == Overlap(communication=((2.0, 5.0),), computation=((0.0, 3.0), (6.0, 6.5)))
    assert [found.communication_ms, found.hidden_ms] == pytest.approx([3.0, 1.0])


def test_without_communication(tmp_path):
    found = read_overlap(written(tmp_path, ("gemm", 0, 2000)))
    assert (found.communication_ms, found.hidden_ms) == (0.0, 0.0)


def test_a_trace_without_kernels_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must be a Chrome trace with kernels of a GPU"):
        read_overlap(written(tmp_path))
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match="must be a Chrome trace with kernels of a GPU"):
        read_overlap(tmp_path / "list.json")
