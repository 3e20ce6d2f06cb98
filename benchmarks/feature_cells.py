"""Measures cells of the features benchmark: all contenders of a case, size and pass, interleaved in the same rounds."""

from __future__ import annotations

import functools
import site
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.comparison import DeviceLostError, relative_difference
from benchmarks.comparison import release_after_failure as release_memory_of_failure
from benchmarks.feature_cases import CASES, OURS, PLAIN
from benchmarks.feature_setting import Contender, Layout, Setting, Sizes, random_tensors
from cs336_systems.kernels.torch_names import without_donated_buffers
from cs336_systems.profiling.memory import release_memory, without_frames
from cs336_systems.profiling.sweep import OK, Outcome, Status, outcome_of
from cs336_systems.profiling.timing import (
    RoundTimes,
    TimingMethod,
    call_milliseconds,
    interleave,
    measure_ms,
    synchronize,
)

PASSES = ("forward", "backward")
BESIDE = "plain"
"""Our plain causal attention of the same sizes, which is measured beside every case."""


@dataclass(frozen=True)
class Cell:
    """A case, its sizes and a pass."""

    case: str
    sizes: Sizes
    which: str

    @property
    def key(self) -> str:
        """The cell's name, which is unique in a run."""
        batch, heads, length, head_dim = self.sizes
        return f"{self.case} {self.which} batch {batch} heads {heads} length {length} d {head_dim}"


@dataclass(frozen=True)
class Conditions:
    """Where and how a run measures. It goes to other processes."""

    device: torch.device
    dtype: torch.dtype
    impl: str
    peers: Path | None = None
    rounds: int = 5
    limit: float = 120.0
    max_seconds: float = 0.5

    def setting(self, sizes: Sizes) -> Setting:
        """What contenders are made for."""
        return Setting(sizes, self.device, self.dtype, self.impl)


@dataclass(frozen=True)
class Measurement:
    """What came of one contender: seconds until its first call was done, and its times where all went well."""

    outcome: Outcome = OK
    ready_s: float | None = None
    times: RoundTimes | None = None
    difference: float | None = None


@functools.cache
def add_peers(folder: Path) -> None:
    """Find other libraries in a folder."""
    site.addsitedir(str(folder))


class Run(NamedTuple):
    """One pass of a contender: a forward that keeps nothing, or a backward on a graph that is kept."""

    call: Callable[[], tuple[Tensor, ...]]
    layout: Layout

    @classmethod
    def of(cls, contender: Contender, setting: Setting, which: str) -> Run:
        """Makes q, k and v, and for a backward its graph."""
        *tensors, gradient = map(contender.layout.arrange, random_tensors(setting))
        inputs = [tensor.detach().requires_grad_() for tensor in tensors]
        if which == "forward":

            def forward() -> tuple[Tensor, ...]:
                with torch.no_grad():
                    return (contender.attend(*inputs),)

            return cls(forward, contender.layout)
        output = contender.attend(*inputs)
        wanted = (*inputs, *contender.leaves)
        return cls(lambda: torch.autograd.grad(output, wanted, gradient, retain_graph=True), contender.layout)

    def results(self) -> tuple[Tensor, ...]:
        """The output, or the gradients of q, k and v, as (tokens, heads, d), and those of what else is learned."""
        results = self.call()
        return (*map(self.layout.restore, results[:3]), *results[3:])


def first_call(job: tuple[Cell, str, Conditions]) -> float | str:
    """Compile what one contender needs, in this process, for the caches on disk; the seconds, or why there are none.

    Raises DeviceLostError when the device no longer answers. Other failures are for the process that measures to
    judge: here memory may have run out because others run beside this.
    """
    cell, name, conditions = job
    if conditions.peers is not None:
        add_peers(conditions.peers)
    begin = time.perf_counter()
    failure: Exception | None = None
    try:
        with without_donated_buffers():
            prepared(cell, name, conditions).call()
            synchronize(conditions.device)
    except Exception as error:
        failure = without_frames(error)
    seconds = time.perf_counter() - begin
    release_memory_of_failure(conditions.device, name)
    return seconds if failure is None else str(outcome_of(failure))


def prepared(cell: Cell, name: str, conditions: Conditions) -> Run:
    """A contender of a cell. Raises NotImplementedError for what it cannot compute."""
    maker = CASES[PLAIN].makers[OURS] if name == BESIDE else CASES[cell.case].makers[name]
    if isinstance(maker, str):
        raise NotImplementedError(maker)
    setting = conditions.setting(cell.sizes)
    return Run.of(maker(setting), setting, cell.which)


@dataclass
class CellRun:
    """One cell under way. `on_step` is told what comes next; `known` has outcomes that were settled before."""

    cell: Cell
    conditions: Conditions
    on_step: Callable[[str, str], None] = lambda name, what: None
    known: Mapping[str, Outcome] = field(default_factory=dict)
    result: dict[str, Measurement] = field(default_factory=dict)
    device_lost: bool = False

    def measure(self, names: Sequence[str]) -> dict[str, Measurement]:
        """What became of each contender of this name that the case has, and of our plain attention beside them."""
        beside = [BESIDE] if self.cell.case != PLAIN else []
        wanted = [*(name for name in names if name in CASES[self.cell.case].makers), *beside]
        runs: dict[str, Callable[[], object]] = {}
        try:
            with without_donated_buffers():
                self._prepare(wanted, runs)
                self._measure(runs)
        except DeviceLostError as error:
            self.device_lost = True
            for name in wanted:
                if self.result.get(name, Measurement()).outcome is OK:
                    self.result[name] = Measurement(Outcome(Status.SKIPPED, str(error)[:300]))
        finally:
            runs.clear()
        if not self.device_lost:
            release_memory(self.conditions.device)
        return self.result

    def _prepare(self, wanted: Sequence[str], runs: dict[str, Callable[[], object]]) -> None:
        expected: list[tuple[Tensor, ...]] = []
        for name in wanted:
            outcome = self.known.get(name)
            if outcome is None:
                self.on_step(name, "first call")
                outcome = self._first(name, runs, expected)
            if outcome is not None:
                self._fail(name, outcome)
                runs.pop(name, None)

    def _first(
        self, name: str, runs: dict[str, Callable[[], object]], expected: list[tuple[Tensor, ...]]
    ) -> Outcome | None:
        """Call a contender for the first time; why it is not measured, or None."""
        failure: Exception | None = None
        conditions, device = self.conditions, self.conditions.device
        begin = time.perf_counter()
        try:
            run = prepared(self.cell, name, conditions)
            run.call()
            synchronize(device)
            ready_s = time.perf_counter() - begin
            difference = self._difference(name, run, expected)
            probe_s = call_milliseconds(run.call, device) * 1e-3
        except Exception as error:
            failure = without_frames(error)
        if failure is not None:
            return outcome_of(failure)
        runs[name] = run.call
        self.result[name] = Measurement(ready_s=ready_s, difference=difference)
        if ready_s > conditions.limit:
            limit = f"more than the {conditions.limit:g} s allowed"
            return Outcome(Status.SKIPPED, f"its first call took {ready_s:.0f} s, {limit}")
        if probe_s > conditions.max_seconds:
            limit = f"more than the {conditions.max_seconds:g} s allowed"
            return Outcome(Status.SKIPPED, f"one call takes {probe_s:.2f} s, {limit}")
        return None

    def _difference(self, name: str, run: Run, expected: list[tuple[Tensor, ...]]) -> float | None:
        """How far q's, k's and v's gradients, or the output, are from ours; None for ours, and without ours."""
        if name == BESIDE or CASES[self.cell.case].random:
            return None
        results = run.results()[:3]
        if name == OURS:
            expected.append(results)
        return relative_difference(results, expected[0]) if expected and name != OURS else None

    def _fail(self, name: str, outcome: Outcome) -> None:
        self.result[name] = replace(self.result.get(name, Measurement()), outcome=outcome, times=None)
        if outcome.status in (Status.ERROR, Status.OUT_OF_MEMORY):
            release_memory_of_failure(self.conditions.device, name)

    def _measure(self, runs: dict[str, Callable[[], object]]) -> None:
        conditions = self.conditions
        method = TimingMethod(rounds=conditions.rounds)

        def measurement(run: Callable[[], object]) -> Callable[[], float]:
            return lambda: measure_ms(run, device=conditions.device, method=method)

        times = interleave(
            {name: measurement(run) for name, run in runs.items()},
            method=method,
            on_error=lambda name, error: self._fail(name, outcome_of(error)),
            on_measurement=lambda name, index: self.on_step(name, f"round {index + 1}"),
        )
        for name, rounds in times.items():
            self.result[name] = replace(self.result[name], times=rounds)
