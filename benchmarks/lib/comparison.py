"""What a measuring function uses: its context, and a comparison of several providers at one case."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from benchmarks.lib.isolation import step
from benchmarks.lib.results import Outcome, Row, Status, error, outcome_of
from cs336_systems.profiling.flops import implausible_rate
from cs336_systems.profiling.memory import release_memory, without_frames
from cs336_systems.profiling.timing import RoundTimes, TimingMethod, interleave, synchronize

T = TypeVar("T")


@dataclass(frozen=True)
class Context:
    """What a measuring function is given besides its case.

    Attributes:
        options: the command line.
        rows: the rows measured so far, for example to skip what ran out of memory at a shorter length.
        excluded: by provider, why it must not run: it ended the process or exceeded the time limit in this case.
    """

    options: argparse.Namespace
    rows: Sequence[Row] = ()
    excluded: Mapping[str, str] = field(default_factory=dict)


class DeviceLostError(RuntimeError):
    """The device does not respond any more: every later call in this process would fail too."""


class Comparison:
    """Measures several providers at one case, interleaved in rounds; what one of them cannot do is its outcome alone.

    docs/benchmarking.md has an example.

    Attributes:
        outcomes: by provider, how it ended, once it was attempted.
        times: by provider, milliseconds of each round.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._device: torch.device = context.options.device
        self.outcomes: dict[str, Outcome] = {}
        self.times: dict[str, RoundTimes] = {}

    def attempt(
        self,
        provider: str,
        what: str,
        action: Callable[[], T],
        classify: Callable[[Exception], Outcome] = outcome_of,
    ) -> T | None:
        """The result of ``action()``, or None if it raised, or the provider is excluded or failed before.

        Raises DeviceLostError if the device does not respond any more after the failure.
        """
        if provider in self._context.excluded:
            self.outcomes[provider] = error(self._context.excluded[provider])
        self.outcomes.setdefault(provider, Outcome())
        if not self.succeeded(provider):
            return None
        step(what, provider)
        try:
            return action()
        except Exception as exception:
            outcome = classify(exception)
            without_frames(exception)  # they keep tensors of the failed call alive
        self._fail(provider, outcome)
        return None

    def interleave(self, measurements: Mapping[str, Callable[[], float]], method: TimingMethod) -> None:
        """Call every provider's measurement, which returns milliseconds, once a round in rotated order."""
        self.times |= interleave(
            {name: call for name, call in measurements.items() if self.succeeded(name)},
            method=method,
            on_error=lambda provider, exception: self._fail(provider, outcome_of(exception)),
            on_measurement=lambda provider, index: step(f"round {index + 1}/{method.rounds}", provider),
        )

    def succeeded(self, provider: str) -> bool:
        """Whether every attempt and round of the provider so far was without a failure."""
        return self.outcomes.get(provider, Outcome()).status is Status.OK

    def columns(self, provider: str) -> Row:
        """The provider's status, reason and times."""
        return self.outcomes[provider].columns | time_columns(self.times.get(provider))

    def speedup_columns(self, name: str, provider: str, baseline: str) -> Row:
        """How many times faster than the baseline, and the interval of that, as ``name``, ``name_low``, ``name_high``.

        It is the median of the ratios within rounds, and its 95 % confidence interval; None if either has no time.
        """
        times, other = self.times.get(provider), self.times.get(baseline)
        found = (times.speedup_over(other), *times.speedup_interval(other)) if times and other else (None,) * 3
        return dict(zip((name, f"{name}_low", f"{name}_high"), found, strict=True))

    def skip_if_slow(self, provider: str, milliseconds: float, max_seconds: float) -> bool:
        """Make the provider's outcome `skipped` if one call takes too long; whether it is."""
        slow = milliseconds > max_seconds * 1e3
        if slow:
            reason = f"one call takes {milliseconds * 1e-3:.2f} s, more than the {max_seconds:g} s allowed"
            self.outcomes[provider] = Outcome(Status.SKIPPED, reason)
        return slow

    def _fail(self, provider: str, outcome: Outcome) -> None:
        """Free the memory of a failed call. Raises DeviceLostError if the device does not respond any more."""
        self.outcomes[provider] = outcome
        try:
            synchronize(self._device)
            release_memory(self._device)
        except RuntimeError as exception:
            text = f"the device does not respond after {provider} failed: {outcome.reason}: {exception}"
            raise DeviceLostError(text) from exception


# Relative differences between two right answers, with a margin: a few roundings of the dtype.
_PLAUSIBLE_DIFFERENCE = {"bfloat16": 4e-2, "float16": 5e-3, "float32": 1e-4, "tf32": 5e-3}
_MORE_IN_GRADIENTS = 2.0
_PLAUSIBLE_SPREAD = 2.0
_MOST_ROUNDS = 25


def plausible_difference(dtype: str, *, gradients: bool, tf32: bool = False) -> float:
    """The largest `relative_difference` between right answers; with ``tf32``, float32 products may use TF32."""
    allowed = _PLAUSIBLE_DIFFERENCE["tf32" if tf32 and dtype == "float32" else dtype]
    return allowed * (_MORE_IN_GRADIENTS if gradients else 1.0)


def relative_difference(tensors: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest ‖tensor − expected‖ / ‖expected‖, computed in float32; infinite if a tensor has a NaN."""
    ratios = []
    for tensor, right in zip(tensors, expected, strict=True):
        norm = right.float().norm().clamp_min(torch.finfo(torch.float32).tiny)
        ratio = float((tensor.float() - right.float()).norm() / norm)
        ratios.append(math.inf if math.isnan(ratio) else ratio)
    return max(ratios)


def time_columns(times: RoundTimes | None) -> Row:
    """The columns of a time: statistics over its rounds, and the time of each; all None without one.

    `low_ms` and `high_ms` are the 95 % confidence interval of the median; `precise` says whether it is narrow.
    """
    if times is None:
        return dict.fromkeys(time_columns(RoundTimes((0.0,))))
    (low, high), each = times.interval, times.milliseconds
    return {
        "rounds": len(each),
        "median_ms": times.median,
        "low_ms": low,
        "high_ms": high,
        "precise": times.is_precise,
        "min_ms": times.minimum,
        "max_ms": times.maximum,
        "mean_ms": times.mean,
        "std_ms": times.standard_deviation,
        "round_ms": [*each],
    }


def timing_method(options: argparse.Namespace) -> TimingMethod:
    """How measurements are made, from --rounds, --most-rounds, --warmup and --rep."""
    most = getattr(options, "most_rounds", 1) or (_MOST_ROUNDS if options.device.type == "cuda" else 1)
    lengths = {"warmup_ms": options.warmup, "repetitions_ms": options.rep}
    return TimingMethod(options.rounds, **lengths, most_rounds=max(options.rounds, most))


def ran_out_of_memory(columns: Row, rows: Sequence[Row], *grows: str) -> Outcome | None:
    """The outcome `skipped` if a smaller case of the same series ran out of memory; otherwise None.

    A series has the same ``columns`` except those named by ``grows``, which are not larger in the smaller case.
    """
    series = {name: value for name, value in columns.items() if name not in grows}.items()
    for row in rows:
        exhausted = row["status"] == Status.OUT_OF_MEMORY.value and row.items() >= series
        if exhausted and all(row[name] <= columns[name] for name in grows):
            at = ", ".join(f"{name} {row[name]}" for name in grows)
            return Outcome(Status.SKIPPED, f"memory ran out at {at} of the same series")
    return None


def doubts(row: Row, device: str) -> list[str]:
    """Why a row's time may mislead: a rate above the device's peak, or scattered rounds.

    Of the row are read: `median_ms`, `min_ms`, `max_ms`, `tflops`, `dtype` and `tf32`.
    """
    if row["median_ms"] is None:
        return []
    found = [implausible_rate(row["tflops"], device, row["dtype"], tf32=row["tf32"]) or ""]
    spread = row["max_ms"] / row["min_ms"]
    if spread > _PLAUSIBLE_SPREAD:
        found.append(f"the slowest round took {spread:.1f} times the fastest: something else may have run")
    return [text for text in found if text]
