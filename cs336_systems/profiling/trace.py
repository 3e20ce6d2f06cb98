"""What ran in a function: torch.profiler's trace, read as a list of work, each with its pass and its region.

    times = record_trace(step, path, device="cuda", steps=3)
    for work in read_trace(path):
        print(work.name, work.microseconds, work.of_pass, work.region)

On a GPU a piece of work is a kernel, a copy or a fill, and its time that on the device; where it belongs follows from
the operator that launched it, and from the ranges (`cs336_systems.profiling.regions`) in which that ran. Where a trace
has no kernels it is an operator on the host, and its time what it took without the operators that it called. The file
is Chrome's format: https://ui.perfetto.dev shows it.
"""

from __future__ import annotations

import bisect
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from cs336_systems.profiling.regions import PASS, region_of_label
from cs336_systems.profiling.timing import RoundTimes, consecutive_ms

ELSEWHERE = "elsewhere"
"""The region of what ran in no range, and the pass of what ran in none."""

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_OPERATOR, _RANGE = "cpu_op", "user_annotation"
_ENGINE = "autograd::engine::"
"""What autograd does around its nodes, which includes the hooks that make ranges: no operator of the model."""

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Work:
    """A kernel, or an operator on the host.

    Attributes:
        name: as the trace has it.
        microseconds: on the device, or on the host without the operators that it called.
        of_pass: "forward", "backward", "optimizer", or whatever `Regions.during` was given; ELSEWHERE outside.
        region: the innermost range; ELSEWHERE outside.
        on_device: whether it is a kernel.
    """

    name: str
    microseconds: float
    of_pass: str
    region: str
    on_device: bool


def record_trace(
    function: Callable[[], object], path: Path, *, device: torch.device | str, steps: int = 1
) -> RoundTimes:
    """Profile so many calls, and write their trace to ``path``; the time of each, as `consecutive_ms` has it.

    One call before them starts the profiler and is not in the trace. What `function` compiles has to be compiled
    already. The times are those of profiled calls: they are there to be held against unprofiled ones.
    """
    activities = [ProfilerActivity.CPU]
    if torch.device(device).type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=1, repeat=1))
    with ExitStack() as running:
        with warnings.catch_warnings():
            # Torch 2.11 says it of every profiler; here no cycle has events that a later one could clear. The way out
            # that it offers, acc_events, reads every event into Python at the end, which nothing here asks for.
            warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
            running.enter_context(profiler)
        function()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        profiler.step()
        times = consecutive_ms(function, steps, device=device)
    profiler.export_chrome_trace(str(path))
    return times


def read_trace(path: Path) -> list[Work]:
    """The work in a trace that `record_trace` or torch.profiler wrote.

    Raises:
        ValueError: the file is no trace.
    """
    with path.open(encoding="utf-8") as file:
        trace = json.load(file)
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise ValueError(f"path must be a trace in Chrome's format, with traceEvents; got {path}")
    return work_of([event for event in events if event.get("ph") == "X"])


def require_kernels(work: Iterable[Work], device: torch.device | str) -> None:
    """Raise RuntimeError when work of a GPU has no kernels: operators in their place would be another measurement."""
    if torch.device(device).type == "cuda" and not any(one.on_device for one in work):
        raise RuntimeError(
            f"the trace must have kernels of {device}; torch.profiler recorded none: another profiler may be there, "
            "such as nsys, or the driver may keep its counters from users"
        )


def work_of(events: Iterable[Event]) -> list[Work]:
    """The work among the complete events of a trace, in the order in which it began on the host."""
    by_kind: dict[str, list[Event]] = {}
    for event in events:
        by_kind.setdefault(event.get("cat", ""), []).append(event)
    ranges = [event for event in by_kind.get(_RANGE, []) if region_of_label(event["name"]) is not None]
    passes = _Passes(event for event in ranges if region_of_label(event["name"]) == PASS)
    ranges = [event for event in ranges if region_of_label(event["name"]) != PASS]
    operators = by_kind.get(_OPERATOR, [])
    kernels = [event for kind in _ON_DEVICE for event in by_kind.get(kind, [])]
    if not kernels:
        return [
            Work(event["name"], own, passes.at(event["ts"]), region, False)
            for event, own, region in _nested(ranges, operators)
            if not event["name"].startswith(_ENGINE)
        ]
    launches = [event for kind in _LAUNCHES for event in by_kind.get(kind, [])]
    placed = list(_nested(ranges, [*operators, *launches]))
    by_operator = {_argument(e, "External id"): (e["ts"], where) for e, _, where in placed if e["cat"] == _OPERATOR}
    by_launch = {_argument(e, "correlation"): (e["ts"], where) for e, _, where in placed if e["cat"] in _LAUNCHES}
    found = []
    for kernel in kernels:
        # The operator is known by its number; a launch outside of operators, as of a Triton kernel, by its time.
        start, region = by_operator.get(
            _argument(kernel, "External id"), by_launch.get(_argument(kernel, "correlation"), (None, ELSEWHERE))
        )
        of_pass = ELSEWHERE if start is None else passes.at(start)
        found.append(Work(kernel["name"], float(kernel["dur"]), of_pass, region, True))
    return found


def _argument(event: Event, name: str) -> object:
    # A key that no event has where the number is missing or 0, which stands for none.
    return event.get("args", {}).get(name) or object()


class _Passes:
    """The passes of a trace, which follow one another, by time."""

    def __init__(self, ranges: Iterable[Event]) -> None:
        self._spans = sorted((e["ts"], e["ts"] + e["dur"], e["name"].partition("] ")[2]) for e in ranges)
        self._starts = [start for start, _, _ in self._spans]

    def at(self, time: float) -> str:
        """The pass at a time: on any thread, since a backward pass runs on others while its caller waits."""
        index = bisect.bisect_right(self._starts, time) - 1
        return self._spans[index][2] if index >= 0 and time <= self._spans[index][1] else ELSEWHERE


def _nested(ranges: Iterable[Event], operators: Iterable[Event]) -> Iterator[tuple[Event, float, str]]:
    """Each operator with its own microseconds and the region that it began in, thread by thread."""
    threads: dict[tuple[object, object], list[Event]] = {}
    for event in (*ranges, *operators):
        threads.setdefault((event.get("pid"), event.get("tid")), []).append(event)
    for events in threads.values():
        # Of two that begin together the longer one is around the other; sorting keeps ranges before operators.
        events.sort(key=lambda event: (event["ts"], -event["dur"]))
        yield from _nested_of_thread(events)


def _nested_of_thread(events: Iterable[Event]) -> Iterator[tuple[Event, float, str]]:
    regions: list[tuple[float, str]] = []
    running: list[tuple[float, int]] = []
    found: list[tuple[Event, str]] = []
    own: list[float] = []
    for event in events:
        start, end = event["ts"], event["ts"] + event["dur"]
        while regions and regions[-1][0] <= start:
            regions.pop()
        while running and running[-1][0] <= start:
            running.pop()
        if event["cat"] == _RANGE:
            regions.append((end, region_of_label(event["name"]) or ELSEWHERE))
            continue
        if running:
            own[running[-1][1]] -= event["dur"]
        running.append((end, len(found)))
        found.append((event, regions[-1][1] if regions else ELSEWHERE))
        own.append(float(event["dur"]))
    for (event, region), microseconds in zip(found, own, strict=True):
        yield event, max(0.0, microseconds), region
