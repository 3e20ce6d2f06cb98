"""Communication between GPUs that computation hides: when kernels of either run, from a trace of torch.profiler."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .kernel_classes import COMMUNICATION, class_of

Span = tuple[float, float]


@dataclass(frozen=True)
class Overlap:
    """What one GPU did in a trace.

    Attributes:
        communication: the spans, begin and end in milliseconds from the first kernel, in which collectives run, in
            order and without overlap. A collective runs from its launch on this GPU, so it may wait for another GPU.
        computation: the spans in which other kernels run, or copies.
    """

    communication: tuple[Span, ...]
    computation: tuple[Span, ...]

    @property
    def communication_ms(self) -> float:
        """Milliseconds in which collectives run."""
        return _total(self.communication)

    @property
    def hidden_ms(self) -> float:
        """Milliseconds in which collectives and computation run at the same time."""
        either = _total(_merged([*self.communication, *self.computation]))
        return self.communication_ms + _total(self.computation) - either


def read_overlap(path: Path) -> Overlap:
    """What the GPU did in a Chrome trace that `record_trace` or torch.profiler wrote for one process.

    Raises ValueError if the file is no Chrome trace, or has no kernels.
    """
    trace = json.loads(path.read_text(encoding="utf-8"))
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    kernels = [event for event in events or () if event.get("ph") == "X" and event.get("cat") in kinds]
    if not kernels:
        raise ValueError(f"path must be a Chrome trace with kernels of a GPU; got {path}")
    begin = min(event["ts"] for event in kernels)
    spans: dict[bool, list[Span]] = {True: [], False: []}
    for event in kernels:
        first = (event["ts"] - begin) * 1e-3
        spans[class_of(event["name"]) == COMMUNICATION].append((first, first + event["dur"] * 1e-3))
    return Overlap(_merged(spans[True]), _merged(spans[False]))


def _merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The spans in order, those that overlap or touch as one."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return tuple(merged)


def _total(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)
