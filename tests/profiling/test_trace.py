"""Work is read from traces: kernels by what launched them, operators without those that they call."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from torch.profiler import profiler

from cs336_systems.profiling.regions import label_of
from cs336_systems.profiling.trace import ELSEWHERE, Work, read_trace, record_trace, require_kernels, work_of


def event(cat, name, ts, dur, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 7, "tid": tid, "args": args}


def during(name, ts, dur):
    return event("user_annotation", label_of("pass", name), ts, dur)


def in_region(region, ts, dur, tid=1, **options):
    return event("user_annotation", label_of(region, "layers.0", **options), ts, dur, tid)


class TestHost:
    def test_time_of_operators_is_without_those_that_they_call(self):
        found = work_of(
            [
                event("cpu_op", "aten::linear", 0, 10),
                event("cpu_op", "aten::mm", 2, 5),
                event("cpu_op", "aten::empty", 3, 1),
                event("cpu_op", "aten::mul", 20, 4),
            ]
        )
        assert [(work.name, work.microseconds) for work in found] == [
            ("aten::linear", 5),
            ("aten::mm", 4),
            ("aten::empty", 1),
            ("aten::mul", 4),
        ]
        assert {(work.of_pass, work.region, work.on_device) for work in found} == {(ELSEWHERE, ELSEWHERE, False)}

    def test_the_innermost_range_counts_and_passes_are_told_by_time(self):
        found = work_of(
            [
                during("forward", 0, 100),
                in_region("residual", 0, 50),
                in_region("norm", 10, 10),
                event("cpu_op", "aten::add", 5, 1),
                event("cpu_op", "aten::rsqrt", 12, 1),
                event("cpu_op", "aten::sub", 30, 1),
                event("cpu_op", "aten::sum", 60, 1),
                during("backward", 100, 100),
                in_region("norm", 110, 10, tid=2, backward=True),
                event("cpu_op", "aten::mul", 112, 1, tid=2),
                event("user_annotation", "Optimizer.step#AdamW.step", 130, 10),
                event("cpu_op", "aten::neg", 132, 1),
                event("cpu_op", "aten::exp", 300, 1),
            ]
        )
        assert {work.name.removeprefix("aten::"): (work.of_pass, work.region) for work in found} == {
            "add": ("forward", "residual"),
            "rsqrt": ("forward", "norm"),
            "sub": ("forward", "residual"),
            "sum": ("forward", ELSEWHERE),
            "mul": ("backward", "norm"),
            "neg": ("backward", ELSEWHERE),
            "exp": (ELSEWHERE, ELSEWHERE),
        }

    def test_what_autograd_does_around_its_nodes_is_left_out(self):
        found = work_of(
            [
                event("cpu_op", "autograd::engine::evaluate_function: MulBackward0", 0, 50),
                event("cpu_op", "MulBackward0", 10, 20),
            ]
        )
        assert [(work.name, work.microseconds) for work in found] == [("MulBackward0", 20)]


class TestDevice:
    EVENTS = (
        during("forward", 0, 100),
        in_region("mlp", 0, 50),
        event("cpu_op", "aten::mm", 10, 20, **{"External id": 4}),
        event("cuda_runtime", "cudaLaunchKernel", 15, 2, **{"External id": 4, "correlation": 90}),
        event("kernel", "ampere_sgemm_128x64_nn", 500, 40, 99, **{"External id": 4, "correlation": 90}),
        in_region("attention", 60, 20),
        event("cuda_driver", "cuLaunchKernelEx", 65, 2, correlation=91),
        event("kernel", "forward_kernel", 540, 60, 99, correlation=91),
        event("gpu_memset", "Memset (Device)", 600, 1, 99, correlation=92),
    )

    def test_kernels_belong_where_they_were_launched(self):
        assert work_of(self.EVENTS) == [
            Work("ampere_sgemm_128x64_nn", 40.0, "forward", "mlp", True),
            Work("forward_kernel", 60.0, "forward", "attention", True),
            Work("Memset (Device)", 1.0, ELSEWHERE, ELSEWHERE, True),
        ]

    def test_the_operator_counts_where_clocks_differ(self):
        late = [dict(one, ts=70) if one["cat"] == "cuda_runtime" else one for one in self.EVENTS]
        assert work_of(late)[0].region == "mlp"


def test_a_recorded_trace_is_json_and_holds_so_many_calls(tmp_path):
    x = torch.randn(64, 64)
    times = record_trace(lambda: x @ x, tmp_path / "trace.json", device="cpu", steps=3)
    assert len(times.milliseconds) == 3
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    products = [work for work in read_trace(tmp_path / "trace.json") if work.name == "aten::mm"]
    assert len(products) == 3
    assert all(work.microseconds > 0 for work in products)


def test_a_profiler_that_speaks_of_cleared_events_is_not_heard(tmp_path, monkeypatch):
    prepare = profiler._KinetoProfile.prepare_trace

    def prepare_and_warn(self):
        warnings.warn("Warning: Profiler clears events at the end of each cycle.", stacklevel=2)
        warned.append(self)
        prepare(self)

    warned = []
    monkeypatch.setattr(profiler._KinetoProfile, "prepare_trace", prepare_and_warn)
    record_trace(lambda: None, tmp_path / "trace.json", device="cpu")
    assert warned


def test_another_file_is_refused(tmp_path):
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match="path must be a trace in Chrome's format"):
        read_trace(tmp_path / "list.json")


def test_a_gpu_without_kernels_is_an_error():
    on_host, kernel = (Work("aten::mm", 1.0, ELSEWHERE, ELSEWHERE, on_device) for on_device in (False, True))
    require_kernels([on_host], "cpu")
    require_kernels([kernel], "cuda:0")
    with pytest.raises(RuntimeError, match="the trace must have kernels of cuda:0; "):
        require_kernels([on_host], "cuda:0")


@pytest.mark.gpu
def test_kernels_of_a_gpu(tmp_path):
    x = torch.randn(512, 512, device="cuda")
    # One kernel a call; a product can be two, the second of which adds up what the first one split.
    record_trace(lambda: x.exp(), tmp_path / "trace.json", device="cuda", steps=3)
    work = read_trace(tmp_path / "trace.json")
    assert len(work) == 3, work
    assert len({one.name for one in work}) == 1
    assert all(one.on_device and one.microseconds > 0 for one in work)
