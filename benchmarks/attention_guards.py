"""What the attention benchmark does not try: what ran out of memory before, would not fit, or would take too long."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from benchmarks.attention_presets import Problem
from cs336_systems.profiling.flops import Pass
from cs336_systems.profiling.memory import GIB, available_bytes
from cs336_systems.profiling.sweep import Outcome, Row, Status

# Tensors of length × length alive at once in an implementation that keeps them: forward the scores, the masked scores
# and the probabilities; in training their gradients too. An estimate to be safe by, counted in float32 at least.
_QUADRATIC_TENSORS: dict[Pass, int] = {"forward": 3, "backward": 5, "both": 5}
_USABLE_SHARE = 0.8


def quadratic_bytes(problem: Problem, which: Pass) -> int:
    """Estimated bytes that an implementation takes that keeps the score matrix."""
    width = max(4, problem.torch_dtype.itemsize)
    scores = problem.batch * max(1, problem.heads) * problem.length**2 * width
    return scores * _QUADRATIC_TENSORS[which]


def would_not_fit(problem: Problem, which: Pass, device: torch.device) -> Outcome | None:
    """The outcome of a quadratic implementation that would not fit; None where it may be tried.

    On CUDA the allocator says no by itself, and nothing is harmed. A CPU's memory can be promised and not be there: the
    machine would swap, or end the process.
    """
    if device.type == "cuda":
        return None
    available = available_bytes(device)
    needed = quadratic_bytes(problem, which)
    if available is None or needed <= available * _USABLE_SHARE:
        return None
    return Outcome(Status.SKIPPED, f"would need {needed / GIB:.1f} GiB; {available / GIB:.1f} GiB are available")


class SeriesHistory:
    """What is known of shorter lengths of the same series: provider, pass, dtype, mask and head dimension."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._series: dict[tuple[str, ...], list[Row]] = {}
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """Take up the row of a finished cell."""
        key = (row["implementation"], row["pass"], row["dtype"], row["mask"], str(row["head_dim"]))
        self._series.setdefault(key, []).append(row)

    def verdict(self, problem: Problem, name: str, which: Pass, max_seconds: float) -> Outcome | None:
        """The outcome that shorter lengths already decide; None when the provider should be tried."""
        key = (name, which, problem.dtype, problem.mask, str(problem.head_dim))
        shorter = [row for row in self._series.get(key, []) if row["length"] < problem.length]
        exhausted = [row["length"] for row in shorter if row["status"] == Status.OUT_OF_MEMORY.value]
        if exhausted:
            return Outcome(Status.SKIPPED, f"memory ran out at length {min(exhausted)} of the same series")
        timed = {int(row["length"]): row for row in shorter if _milliseconds(row) > 0}
        if not timed:
            return None
        nearest = timed[max(timed)]
        growth = problem.flops(which) / _flops_of(nearest, problem, which)
        seconds = _milliseconds(nearest) * growth * 1e-3
        if seconds <= max_seconds:
            return None
        limit = f"more than the {max_seconds:g} s allowed"
        return Outcome(
            Status.SKIPPED,
            f"one call would take about {seconds:.1f} s, judging by length {nearest['length']}: {limit}",
        )


def _milliseconds(row: Row) -> float:
    """The time of a call, from the rounds or else from the probe; 0 where there was neither."""
    return float(row["median_ms"] or row["probe_ms"] or 0)


def _flops_of(row: Row, problem: Problem, which: Pass) -> float:
    batch, heads, kv_heads, length = (int(row[name]) for name in ("batch", "heads", "kv_heads", "length"))
    return replace(problem, batch=batch, heads=heads, kv_heads=kv_heads, length=length).flops(which)
