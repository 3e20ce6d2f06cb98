"""Traces: kernels by what launched them, operators without nested ones, and sums of their times."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from torch.profiler import profiler

from cs336_systems.profiling.module_ranges import PHASE
from cs336_systems.profiling.trace import ELSEWHERE, read_trace, record_trace, time_by

pd = pytest.importorskip("pandas")


def event(cat, name, ts, dur, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 7, "tid": tid, "args": args}


def a_range(region, path, ts, dur, tid=1):
    return event("user_annotation", f"[{region}] {path}", ts, dur, tid)


@pytest.fixture
def read(tmp_path):
    """Reads a trace of these events."""

    def read(*events, **options):
        (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [{"ph": "M"}, *events]}))
        return read_trace(tmp_path / "trace.json", **options)

    return read


def test_the_time_of_operators_is_without_nested_ones(read):
    calls = read(
        event("cpu_op", "aten::mm", 0, 7),  # inside of linear, which starts at the same time
        event("cpu_op", "aten::linear", 0, 10),
        event("cpu_op", "aten::empty", 3, 1),
        event("cpu_op", "aten::mul", 20, 4),
        event("cpu_op", "autograd::engine::evaluate_function: MulBackward0", 30, 50),
        event("cpu_op", "MulBackward0", 40, 20),
    )
    expected = {"aten::linear": 3, "aten::mm": 6, "aten::empty": 1, "aten::mul": 4, "MulBackward0": 20}
    assert dict(zip(calls.name, calls.microseconds, strict=True)) == expected
    assert {*calls.phase, *calls.region} == {ELSEWHERE}
    assert not calls.on_device.any()
    assert list(calls.kernel_class[:2]) == ["matrix products"] * 2


def test_the_innermost_region_counts_and_phases_span_all_threads(read):
    calls = read(
        a_range(PHASE, "forward", 0, 100),
        a_range("residual", "layers.0", 0, 50),
        a_range("norm", "layers.0.ln1", 10, 10),
        event("cpu_op", "add", 5, 1),
        event("cpu_op", "rsqrt", 12, 1),
        event("cpu_op", "sub", 30, 1),
        event("cpu_op", "sum", 60, 1),
        a_range(PHASE, "backward", 100, 100),
        a_range("norm", "layers.0.ln1 backward", 110, 10, tid=2),
        event("cpu_op", "mul", 112, 1, tid=2),
        event("user_annotation", "Optimizer.step#AdamW.step", 130, 10),
        event("user_annotation", "## Call CompiledFxGraph abc ##", 130, 10),
        event("cpu_op", "neg", 132, 1),
        event("cpu_op", "exp", 300, 1),
    )
    assert {call.name: (call.phase, call.region) for call in calls.itertuples()} == {
        "add": ("forward", "residual"),
        "rsqrt": ("forward", "norm"),
        "sub": ("forward", "residual"),
        "sum": ("forward", ELSEWHERE),
        "mul": ("backward", "norm"),
        "neg": ("backward", ELSEWHERE),
        "exp": (ELSEWHERE, ELSEWHERE),
    }


@pytest.mark.parametrize("launch", [15, 70], ids=["same clock", "launch seen later"])
def test_kernels_belong_where_they_were_launched(read, launch):
    calls = read(
        a_range(PHASE, "forward", 0, 100),
        a_range("mlp", "layers.0.ffn", 0, 50),
        event("cpu_op", "aten::mm", 10, 20, **{"External id": 4}),
        event("cuda_runtime", "cudaLaunchKernel", launch, 2, **{"External id": 4, "correlation": 90}),
        event("kernel", "ampere_sgemm_128x64_nn", 500, 40, 99, **{"External id": 4, "correlation": 90}),
        a_range("attention", "layers.0.attn", 60, 20),
        event("cuda_driver", "cuLaunchKernelEx", 65, 2, correlation=91),
        event("kernel", "forward_kernel", 540, 60, 99, correlation=91),
        event("gpu_memset", "Memset (Device)", 600, 1, 99, correlation=92),
        device="cuda:0",
    )
    assert [tuple(row) for row in calls.drop(columns="kernel_class").itertuples(index=False)] == [
        ("ampere_sgemm_128x64_nn", 40.0, "forward", "mlp", True),
        ("forward_kernel", 60.0, "forward", "attention", True),
        ("Memset (Device)", 1.0, ELSEWHERE, ELSEWHERE, True),
    ]


def test_other_files_and_traces_of_a_gpu_without_kernels_are_refused(read, tmp_path):
    with pytest.raises(RuntimeError, match=r"the trace must have kernels of cuda:0; torch\.profiler recorded none"):
        read(event("cpu_op", "aten::mm", 0, 1), device="cuda:0")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match="path must be a Chrome trace with traceEvents"):
        read_trace(tmp_path / "list.json")


class TestTimeBy:
    CALLS = pd.DataFrame(
        [
            *(("aten::mm", time, "forward") for time in (100.0, 200.0, 300.0, 600.0)),
            *(("aten::mm", 400.0, "backward") for _ in range(2)),
            *(("aten::_softmax", time, "forward") for time in (500.0, 1700.0)),
        ],
        columns=["name", "microseconds", "phase"],
    )

    def test_by_kernel(self):
        table = time_by(self.CALLS, "name", steps=2)
        assert list(table.index) == ["aten::_softmax", "aten::mm"]  # longest first
        softmax, product = (row._asdict() for row in table.itertuples(index=False))
        expected = {"milliseconds": 1.1, "share": 2200 / 4200, "instances": 1, "mean_us": 1100, "median_us": 1100}
        assert softmax == pytest.approx(expected | {"min_us": 500, "max_us": 1700, "std_us": 1200 / 2**0.5})
        assert (product["milliseconds"], product["instances"], product["median_us"]) == (1.0, 3.0, 350.0)

    def test_by_phase_and_kernel(self):
        table = time_by(self.CALLS, ["phase", "name"], steps=1)
        assert table.milliseconds["forward", "aten::mm"] == pytest.approx(1.2)
        assert table.milliseconds["backward", "aten::mm"] == pytest.approx(0.8)
        assert time_by(self.CALLS[:1], "name", steps=1).std_us["aten::mm"] == 0.0
        assert time_by(self.CALLS[:0], "name", steps=1).empty

    def test_steps_must_be_positive(self):
        with pytest.raises(ValueError, match="steps must be at least 1; got 0"):
            time_by(self.CALLS, "name", steps=0)


def test_a_recorded_trace_has_as_many_calls_as_steps(tmp_path, monkeypatch):
    prepare = profiler._KinetoProfile.prepare_trace

    def prepare_and_warn(self):
        warnings.warn("Warning: Profiler clears events at the end of each cycle.", stacklevel=2)
        warned.append(self)
        prepare(self)

    warned = []
    monkeypatch.setattr(profiler._KinetoProfile, "prepare_trace", prepare_and_warn)
    x = torch.randn(64, 64)
    times = record_trace(lambda: x @ x, tmp_path / "trace.json", device="cpu", steps=3)
    calls = read_trace(tmp_path / "trace.json")
    assert len(times.milliseconds) == sum(calls.name == "aten::mm") == 3
    assert (calls.microseconds >= 0).all()
    assert warned  # and ignored


@pytest.mark.gpu
def test_kernels_of_a_gpu(tmp_path):
    x = torch.randn(512, 512, device="cuda")
    # One kernel per call; a product can be two, if its reduction is split.
    record_trace(lambda: x.exp(), tmp_path / "trace.json", device="cuda", steps=3)
    calls = read_trace(tmp_path / "trace.json", device="cuda")
    assert len(calls) == 3, calls
    assert calls.name.nunique() == 1
    assert calls.on_device.all()
    assert (calls.microseconds > 0).all()
