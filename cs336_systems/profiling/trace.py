"""Device time by kernel, phase and region, from the Chrome traces of torch.profiler.

    times = record_trace(step, path, device="cuda", steps=3)
    calls = read_trace(path)  # a pandas DataFrame
    time_by(calls, "name", steps=3).head(10)
    time_by(calls, ["phase", "region"], steps=3)

Phases and regions are those of `ModuleRanges`. On a GPU a call is a kernel, a copy or a fill, in the phase and region
that launched it. In a trace without kernels, of a CPU, it is an operator. https://ui.perfetto.dev shows the trace.
"""

from __future__ import annotations

import bisect
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from .kernel_classes import class_of
from .module_ranges import PHASE, parse_label
from .steps import time_steps
from .timing import RoundTimes, synchronize

if TYPE_CHECKING:
    import pandas as pd

ELSEWHERE = "elsewhere"
"""The phase and the region of calls outside of all ranges."""

Event = Mapping[str, Any]


def record_trace(
    function: Callable[[], object], path: Path, *, device: torch.device | str, steps: int = 1
) -> RoundTimes:
    """Profile ``steps`` calls and write their Chrome trace to ``path``; returns the time of each profiled call.

    A first call warms up the profiler, and is not in the trace. ``function`` must be compiled already.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.device(device).type == "cuda" else [])]
    with warnings.catch_warnings():
        # Torch 2.11 gives it for every schedule; the events of one cycle are not cleared by another here.
        warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
        profiler = profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=1, repeat=1))
        profiler.start()
    try:
        function()
        synchronize(device)
        profiler.step()
        times = time_steps({"step": function}, device=device, steps=steps).step
    finally:
        profiler.stop()
    profiler.export_chrome_trace(str(path))
    return times


def read_trace(path: Path, *, device: torch.device | str = "cpu") -> pd.DataFrame:
    """The calls in a Chrome trace that `record_trace` or torch.profiler wrote, in the order of their launch.

    Columns: ``name``; ``kernel_class``, see `kernel_classes`; ``phase`` and ``region``, `ELSEWHERE` outside of ranges;
    ``microseconds``, on the GPU, or on the CPU without nested operators; ``on_device``, whether it ran on a GPU.

    Raises:
        ValueError: the file is no Chrome trace.
        RuntimeError: ``device`` is a GPU, and the trace has no kernels.
    """
    trace = json.loads(path.read_text(encoding="utf-8"))
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise ValueError(f"path must be a Chrome trace with traceEvents; got {path}")
    calls = frame_of([[event for event in events if event.get("ph") == "X"]])
    if torch.device(device).type == "cuda" and not calls.on_device.any():
        raise RuntimeError(
            f"the trace must have kernels of {device}; torch.profiler recorded none. Another profiler may be active, "
            "such as nsys, or the driver may restrict performance counters to administrators"
        )
    return calls


def frame_of(processes: Iterable[Sequence[Event]]) -> pd.DataFrame:
    """The DataFrame of `read_trace`, from the events of each process: ranges, operators, launches and kernels."""
    import pandas as pd

    columns = ["name", "microseconds", "phase", "region", "on_device"]
    calls = pd.DataFrame((call for events in processes for call in _calls(events)), columns=columns)
    return calls.assign(kernel_class=calls.name.map(class_of))


def time_by(calls: pd.DataFrame, columns: str | Sequence[str], *, steps: int) -> pd.DataFrame:
    """Time by one or more columns of `read_trace`, longest first.

    ``steps`` is the number of steps in the trace. Columns: ``milliseconds`` and ``instances`` per step; ``share`` of
    the time of all calls; ``mean_us``, ``median_us``, ``min_us``, ``max_us`` and ``std_us`` of single calls.

    Raises ValueError if ``steps`` is below 1.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1; got {steps}")
    groups = calls.groupby(columns if isinstance(columns, str) else list(columns)).microseconds
    table = groups.agg(["mean", "median", "min", "max", "std"]).add_suffix("_us").fillna(0.0)  # std_us of one call is 0
    total = groups.sum()
    table.insert(0, "milliseconds", total / steps * 1e-3)
    table.insert(1, "share", total / (total.sum() or 1.0))
    table.insert(2, "instances", groups.count() / steps)
    return table.sort_values("milliseconds", ascending=False, kind="stable")


def _calls(events: Sequence[Event]) -> Iterator[tuple[str, float, str, str, bool]]:
    """Name, microseconds, phase, region and whether it ran on a GPU."""

    def of(*categories: str) -> list[Event]:
        return [event for event in events if event.get("cat") in categories]

    ranges = [(event, parse_label(event["name"])) for event in of("user_annotation")]
    spans = sorted((e["ts"], e["ts"] + e["dur"], label[1]) for e, label in ranges if label and label[0] == PHASE)
    kernels = of("kernel", "gpu_memcpy", "gpu_memset")
    operators = of("cpu_op", *(("cuda_runtime", "cuda_driver") if kernels else ()))
    regions = [(event, label[0]) for event, label in ranges if label and label[0] != PHASE]

    def phase_at(time: float) -> str:
        """The phase at a time, on any thread: the caller of a backward waits for the thread that runs it."""
        index = bisect.bisect_right(spans, time, key=lambda span: span[0]) - 1
        return spans[index][2] if index >= 0 and time <= spans[index][1] else ELSEWHERE

    nested = _nested(regions, operators)
    if not kernels:
        for event, self_time, region in nested:
            if not event["name"].startswith("autograd::engine::"):
                yield event["name"], self_time, phase_at(event["ts"]), region, False
        return
    by_operator, by_launch = {}, {}
    for event, _, region in nested:
        if event["cat"] == "cpu_op":
            by_operator[_argument(event, "External id")] = event["ts"], region
        else:
            by_launch[_argument(event, "correlation")] = event["ts"], region
    for kernel in kernels:
        # A Triton kernel may be launched outside of any operator; then the time of its launch decides.
        launch = by_launch.get(_argument(kernel, "correlation"), (None, ELSEWHERE))
        start, region = by_operator.get(_argument(kernel, "External id"), launch)
        yield kernel["name"], float(kernel["dur"]), ELSEWHERE if start is None else phase_at(start), region, True


def _argument(event: Event, name: str) -> object:
    # A missing number, or 0, which means none, becomes a key that equals no other.
    return event.get("args", {}).get(name) or object()


def _nested(ranges: Iterable[tuple[Event, str]], operators: Iterable[Event]) -> Iterator[tuple[Event, float, str]]:
    """Each operator with its microseconds outside of nested operators, and the innermost region around its start."""
    threads: dict[tuple[object, object], list[tuple[Event, str | None]]] = {}
    for event, region in (*ranges, *((event, None) for event in operators)):
        threads.setdefault((event.get("pid"), event.get("tid")), []).append((event, region))
    for events in threads.values():
        # Of two that start together the longer one is the outer one; the stable sort keeps ranges before operators.
        events.sort(key=lambda item: (item[0]["ts"], -item[0]["dur"]))
        # What is open: its end, and the innermost region and operator there.
        stack: list[tuple[float, str, int | None]] = [(math.inf, ELSEWHERE, None)]
        found: list[tuple[Event, str]] = []
        self_times: list[float] = []
        for event, region in events:
            while stack[-1][0] <= event["ts"]:
                stack.pop()
            _, around, operator = stack[-1]
            end = event["ts"] + event["dur"]
            if region is not None:
                stack.append((end, region, operator))
                continue
            if operator is not None:
                self_times[operator] -= event["dur"]
            stack.append((end, around, len(found)))
            found.append((event, around))
            self_times.append(float(event["dur"]))
        for (event, around), microseconds in zip(found, self_times, strict=True):
            yield event, max(0.0, microseconds), around
