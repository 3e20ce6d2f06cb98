"""What a measuring function uses: its context, and a comparison of several providers at one case."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from benchmarks.isolation import step
from benchmarks.results import Outcome, Row, Status, error, outcome_of
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

        comparison = Comparison(context)
        calls = {name: comparison.attempt(name, "first call", functools.partial(prepare, name)) for name in names}
        comparison.interleave({name: functools.partial(time_ms, call) for name, call in calls.items() if call}, method)
        return [{"provider": name, **comparison.columns(name, baseline="naive")} for name in names]

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

        Raises:
            DeviceLostError: the device does not respond any more after the failure.
        """
        if provider in self._context.excluded:
            self.outcomes[provider] = error(self._context.excluded[provider])
        if self.outcomes.setdefault(provider, Outcome()).status is not Status.OK:
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
            {name: call for name, call in measurements.items() if self.outcomes[name].status is Status.OK},
            method=method,
            on_error=lambda provider, exception: self._fail(provider, outcome_of(exception)),
            on_measurement=lambda provider, index: step(f"round {index + 1}/{method.rounds}", provider),
        )

    def columns(self, provider: str, baseline: str | None = None) -> Row:
        """The provider's status, reason and times; with ``baseline`` also `speedup`, the median ratio within rounds."""
        times = self.times.get(provider)
        row = self.outcomes[provider].columns | time_columns(times)
        if baseline is not None:
            other = self.times.get(baseline)
            row["speedup"] = times.speedup_over(other) if times and other else None
        return row

    def _fail(self, provider: str, outcome: Outcome) -> None:
        self.outcomes[provider] = outcome
        try:
            synchronize(self._device)
            release_memory(self._device)
        except RuntimeError as exception:
            raise DeviceLostError(f"{outcome.reason}; then the device did not respond: {exception}") from exception


def time_columns(times: RoundTimes | None) -> Row:
    """The columns of a time: statistics over its rounds, and the time of each; all None without one."""
    names = ("rounds", "median_ms", "min_ms", "max_ms", "mean_ms", "std_ms", "round_ms")
    if times is None:
        return dict.fromkeys(names)
    each = times.milliseconds
    values = (len(each), times.median, times.minimum, times.maximum, times.mean, times.standard_deviation, [*each])
    return dict(zip(names, values, strict=True))


def ran_out_of_memory(columns: Row, rows: Sequence[Row], *grows: str) -> Outcome | None:
    """The outcome `skipped` if a smaller case of the same series ran out of memory; otherwise None.

    A series has the same ``columns`` except those named by ``grows``, which are not larger in the smaller case.
    """
    for row in rows:
        same = all(row[name] == value for name, value in columns.items() if name not in grows)
        if same and row["status"] == Status.OUT_OF_MEMORY.value and all(row[n] <= columns[n] for n in grows):
            at = ", ".join(f"{name} {row[name]}" for name in grows)
            return Outcome(Status.SKIPPED, f"memory ran out at {at} of the same series")
    return None
