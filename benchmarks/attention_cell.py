"""Measures one cell of the attention benchmark: one problem, every provider, every pass, interleaved in rounds."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from benchmarks.attention_contender import Contender, Tensors, relative_difference
from benchmarks.attention_guards import SeriesHistory, would_not_fit
from benchmarks.attention_presets import Problem
from benchmarks.attention_provider import Provider
from cs336_systems.profiling.flops import Pass
from cs336_systems.profiling.memory import MemoryReading, release_memory, without_frames
from cs336_systems.profiling.sweep import OK, Outcome, Status, outcome_of
from cs336_systems.profiling.timing import (
    RoundTimes,
    TimingMethod,
    call_milliseconds,
    interleave,
    measure_ms,
    synchronize,
)


@dataclass(frozen=True)
class CellSettings:
    """How a cell is measured, which is the same for all cells of a sweep."""

    device: torch.device
    passes: tuple[Pass, ...]
    method: TimingMethod
    max_seconds: float
    seed: int


@dataclass(frozen=True)
class Measurement:
    """What came of one provider and pass; `probe_ms` is a single call, timed before the rounds."""

    outcome: Outcome = OK
    times: RoundTimes | None = None
    memory: MemoryReading | None = None
    probe_ms: float | None = None


class Difference(NamedTuple):
    """How far a pass's results are from another provider's, relative in the Frobenius norm, and whose those are.

    The results are the output of the forward pass, or the gradients of the others, of which the farthest counts.
    """

    value: float
    provider: str


@dataclass
class CellResult:
    """What came of a cell."""

    measurements: dict[tuple[str, Pass], Measurement] = field(default_factory=dict)
    differences: dict[tuple[str, Pass], Difference] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    device_lost: bool = False


class DeviceLostError(RuntimeError):
    """The device answers no more: every later call in this process would fail too."""


class CellRun:
    """One cell under way. `measure()` never raises for what a provider does; an interruption passes through.

    `on_step` is told who is about to do what. `condemned` gives the reason, if there is one, why a provider must not be
    tried because it would end the process.
    """

    def __init__(
        self,
        problem: Problem,
        settings: CellSettings,
        history: SeriesHistory,
        on_step: Callable[[str, str], None],
        condemned: Callable[[str], str | None] = lambda name: None,
    ) -> None:
        self._problem = problem
        self._settings = settings
        self._history = history
        self._on_step = on_step
        self._condemned = condemned
        self._result = CellResult()
        self._contenders: dict[str, Contender] = {}
        self._expected: dict[bool, tuple[str, tuple[torch.Tensor, ...]]] = {}

    def measure(self, providers: Sequence[Provider]) -> CellResult:
        """Measure every provider. What it cannot do is an outcome of the result."""
        result = self._result
        try:
            tensors = self._make_tensors(providers)
            if tensors is not None:
                for provider in providers:
                    self._prepare(provider, tensors)
                for which in self._settings.passes:
                    self._measure_pass(which)
        except DeviceLostError as error:
            result.device_lost = True
            for provider in providers:
                for which in self._settings.passes:
                    measurement = result.measurements.get((provider.name, which), Measurement())
                    if measurement.outcome.status is Status.OK and measurement.times is None:
                        lost = Outcome(Status.SKIPPED, str(error))
                        result.measurements[provider.name, which] = Measurement(lost)
        return result

    def _make_tensors(self, providers: Sequence[Provider]) -> Tensors | None:
        failure: Exception | None = None
        try:
            return Tensors.random(self._problem, self._settings.device, self._settings.seed)
        except Exception as error:
            failure = without_frames(error)
        release_memory(self._settings.device)
        outcome = outcome_of(failure)
        for provider in providers:
            for which in self._settings.passes:
                self._result.measurements[provider.name, which] = Measurement(outcome)
        return None

    def _prepare(self, provider: Provider, tensors: Tensors) -> None:
        """Everything that is not timed: guards, first calls, compilation, memory, the comparison with the baseline."""
        passes = [which for which in self._settings.passes if self._may_run(provider, which)]
        if not passes:
            return
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            failed = self._attempt(provider, passes, functools.partial(self._first_forward, provider, tensors), caught)
            for which in passes:
                if not failed:
                    self._attempt(provider, [which], functools.partial(self._first_pass, provider, which), caught)
        self._result.warnings += [text for text in _texts(caught) if text not in self._result.warnings]
        if not any(self._is_running(provider.name, which) for which in passes):
            self._contenders.pop(provider.name, None)

    def _may_run(self, provider: Provider, which: Pass) -> bool:
        problem, settings = self._problem, self._settings
        refusal = provider.refusal(problem, which)
        outcome = Outcome(Status.UNSUPPORTED, refusal) if refusal else None
        if outcome is None and (fatal := self._condemned(provider.name)):
            outcome = Outcome(Status.ERROR, fatal)
        outcome = outcome or self._history.verdict(problem, provider.name, which, settings.max_seconds)
        outcome = outcome or (would_not_fit(problem, which, settings.device) if provider.quadratic else None)
        self._result.measurements[provider.name, which] = Measurement(outcome or OK)
        return outcome is None

    def _first_forward(self, provider: Provider, tensors: Tensors) -> None:
        self._on_step(provider.name, "first call")
        device = self._settings.device
        laid_out = tensors.laid_out(provider.layout, head_axis=self._problem.heads > 0)
        contender = Contender(provider, self._problem, laid_out, device)
        output = contender.output()
        synchronize(device)
        self._contenders[provider.name] = contender
        if "forward" in self._settings.passes:
            self._compare(provider.name, ["forward"], (output,))

    def _first_pass(self, provider: Provider, which: Pass) -> None:
        self._on_step(provider.name, f"first {which}")
        contender, settings = self._contenders[provider.name], self._settings
        if which != "forward" and (provider.name, which) not in self._result.differences:
            self._compare(provider.name, [w for w in settings.passes if w != "forward"], contender.gradients())
        with contender.ready(which) as run:
            run()
            probe_ms = call_milliseconds(run, settings.device)
        memory = contender.memory(which)
        outcome = OK
        if probe_ms > settings.max_seconds * 1e3:
            limit = f"more than the {settings.max_seconds:g} s allowed"
            outcome = Outcome(Status.SKIPPED, f"one call takes {probe_ms * 1e-3:.1f} s, {limit}")
        self._result.measurements[provider.name, which] = Measurement(outcome, memory=memory, probe_ms=probe_ms)

    def _compare(self, name: str, passes: Sequence[Pass], results: tuple[torch.Tensor, ...]) -> None:
        """Note how far the results are from those of the first provider that had any: the baseline, where it did."""
        theirs, expected = self._expected.setdefault("forward" in passes, (name, results))
        difference = Difference(relative_difference(results, expected), theirs)
        for which in passes:
            self._result.differences[name, which] = difference

    def _attempt(
        self,
        provider: Provider,
        passes: Sequence[Pass],
        action: Callable[[], None],
        caught: Sequence[warnings.WarningMessage],
    ) -> bool:
        """Run an action of a provider; True when it failed, which is then the outcome of the passes."""
        failure: Exception | None = None
        try:
            action()
        except Exception as error:
            failure = without_frames(error)
        if failure is None:
            return False
        self._fail(provider, passes, failure, _texts(caught))
        return True

    def _fail(self, provider: Provider, passes: Sequence[Pass], failure: Exception, texts: Sequence[str]) -> None:
        outcome = outcome_of(failure, refusals=provider.refusals)
        if outcome.status is Status.ERROR and any(phrase in str(failure) for phrase in provider.refusal_phrases):
            # torch says in warnings why each of its kernels was passed over.
            spoken = texts if provider.warns_why else ()
            reasons = [text for text in spoken if "not used because" not in text and "runtime disabled" not in text]
            outcome = Outcome(Status.UNSUPPORTED, "; ".join(reasons) or str(failure).partition("\n")[0])
        for which in passes:
            key = (provider.name, which)
            self._result.measurements[key] = replace(self._result.measurements[key], outcome=outcome, times=None)
        release_memory_of_failure(self._settings.device, provider.name)

    def _is_running(self, name: str, which: Pass) -> bool:
        measurement = self._result.measurements.get((name, which))
        return name in self._contenders and measurement is not None and measurement.outcome.status is Status.OK

    def _measure_pass(self, which: Pass) -> None:
        settings = self._settings

        def measurement(contender: Contender) -> Callable[[], float]:
            def measure() -> float:
                with contender.ready(which) as run:
                    return measure_ms(run, device=settings.device, method=settings.method)

            return measure

        def on_error(name: str, failure: Exception) -> None:
            self._fail(self._contenders[name].provider, [which], failure, [])

        times = interleave(
            {name: measurement(c) for name, c in self._contenders.items() if self._is_running(name, which)},
            method=settings.method,
            on_error=on_error,
            on_measurement=lambda name, index: self._on_step(
                name, f"{which}, round {index + 1}/{settings.method.rounds}"
            ),
        )
        for name, rounds in times.items():
            self._result.measurements[name, which] = replace(self._result.measurements[name, which], times=rounds)


def release_memory_of_failure(device: torch.device, name: str) -> None:
    """Clean up after a failed call. Raises DeviceLostError when the device no longer answers."""
    try:
        synchronize(device)
        release_memory(device)
    except RuntimeError as error:
        raise DeviceLostError(f"the device no longer answered after {name} failed: {error}") from error


def _texts(caught: Sequence[warnings.WarningMessage]) -> list[str]:
    """What warnings say to a user, each once, without the place in torch's sources."""
    spoken = [w for w in caught if issubclass(w.category, (UserWarning, RuntimeWarning))]
    texts = (str(w.message).partition(" (Triggered internally")[0].strip() for w in spoken)
    return list(dict.fromkeys(texts))
