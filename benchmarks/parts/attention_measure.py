"""Measures one case of the attention benchmark: every provider and pass, in time and in memory."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.attention_providers import (
    BASELINE,
    Attend,
    Problem,
    Provider,
    add_peers,
    all_providers,
    chosen_providers,
    reference_name,
)
from benchmarks.lib.comparison import (
    Comparison,
    Context,
    doubts,
    plausible_difference,
    ran_out_of_memory,
    relative_difference,
    timing_method,
)
from benchmarks.lib.flags import DTYPES
from benchmarks.lib.host_memory import available_bytes
from benchmarks.lib.results import Outcome, Row, Status, mebibytes, outcome_of
from cs336_systems.profiling.environment import device_name
from cs336_systems.profiling.flops import Pass, teraflops_per_second
from cs336_systems.profiling.memory import GIB, measure_memory
from cs336_systems.profiling.timing import TimingMethod, call_milliseconds, host_milliseconds, measure_ms
from cs336_systems.profiling.torch_names import without_donated_buffers

_USABLE_SHARE = 0.8
_SHORT_MS = 10.0
FIRST_COLUMNS = ("held_mib", "peak_mib", "memory_method", "probe_ms", "host_ms")


class WrongResultError(ValueError):
    """An output or gradients differ from those of another provider by more than rounding."""


def random_tensors(problem: Problem, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the output, each (batch, heads, length, d or dv) with an axis of heads.

    Values are independent and normal: kernels run faster on zeros than on real data.
    """
    generator = torch.Generator(device).manual_seed(seed)
    of_q, of_kv = ((problem.batch, max(1, heads), problem.length) for heads in (problem.heads, problem.kv_heads))
    d, dv = problem.head_dim, problem.v_head_dim or problem.head_dim
    shapes = [(*of_q, d), (*of_kv, d), (*of_kv, dv), (*of_q, dv)]
    return tuple(
        torch.randn(shape, generator=generator, device=device, dtype=DTYPES[problem.dtype]) for shape in shapes
    )


class Bound:
    """A provider bound to a problem, and to `random_tensors` in its layout: contiguous, q, k and v as leaves."""

    def __init__(self, provider: Provider, problem: Problem, tensors: Sequence[Tensor], device: torch.device) -> None:
        self.provider, self._device = provider, device
        *inputs, self._output_gradient = (self._laid_out(x, problem.heads > 0) for x in tensors)
        self._inputs = [x.detach().requires_grad_() for x in inputs]
        self._attend: Attend = provider.bind(problem)

    @contextmanager
    def ready(self, which: Pass) -> Iterator[Callable[[], Any]]:
        """Do what the pass needs beforehand, and yield a function of which one call is one pass."""
        with self.provider.context():
            if which == "forward":
                with torch.no_grad():
                    yield self._forward
            elif which == "backward":
                output = self._forward()
                yield lambda: self._backward(output, retain_graph=True)
            else:
                yield lambda: self._backward(self._forward())

    def results(self, which: Pass) -> tuple[Tensor, ...]:
        """The output of the forward pass, or the gradients of q, k and v; with axes (batch, heads, length, d)."""
        with self.ready("forward" if which == "forward" else "both") as call:
            found = call()
        return tuple(map(self._in_order, (found,) if isinstance(found, Tensor) else found))

    def first(self, which: Pass) -> Row:
        """The columns that are measured before the rounds: memory, and single calls after a first one.

        `probe_ms` lasts until the device has finished. `host_ms` lasts until a short call returns while a GPU works.
        """
        device = self._device
        with self.ready(which) as call:
            call()
            probe_ms = call_milliseconds(call, device)
            short = device.type != "cpu" and probe_ms < _SHORT_MS
            host_ms = min(host_milliseconds(call, 1, device=device) for _ in range(3)) if short else None
        with self.provider.context():
            backward = None if which == "forward" else self._backward
            memory = measure_memory(self._forward, backward, device=device, inputs=self._inputs)
        columns = mebibytes(held_mib=memory.held_bytes, peak_mib=memory.peak_bytes)
        return columns | {"memory_method": memory.method or None, "probe_ms": probe_ms, "host_ms": host_ms}

    def milliseconds(self, which: Pass, method: TimingMethod) -> float:
        """One measurement of a pass."""
        with self.ready(which) as call:
            return measure_ms(call, device=self._device, method=method)

    def _laid_out(self, tensor: Tensor, head_axis: bool) -> Tensor:
        if self.provider.layout == "length first":
            return tensor.transpose(1, 2).contiguous()
        return tensor.squeeze(1) if self.provider.layout == "as given" and not head_axis else tensor

    def _in_order(self, tensor: Tensor) -> Tensor:
        if self.provider.layout == "length first":
            return tensor.transpose(1, 2)
        return tensor.unsqueeze(1) if tensor.dim() == 3 else tensor

    def _forward(self) -> Tensor:
        return self._attend(*self._inputs)

    def _backward(self, output: Tensor, retain_graph: bool = False) -> tuple[Tensor, ...]:
        # Not output.backward(), which adds to .grad: one more kernel for each input.
        return torch.autograd.grad(output, self._inputs, self._output_gradient, retain_graph=retain_graph)


class CaseRun:
    """The measurement of one case."""

    def __init__(self, problem: Problem, context: Context) -> None:
        self.problem, self.options, self._context = problem, context.options, context
        self.comparisons = {which: Comparison(context) for which in context.options.passes}
        self.first: dict[tuple[str, Pass], Row] = {}
        self.differences: dict[tuple[str, bool], tuple[float, str]] = {}
        self._expected: dict[bool, tuple[str, tuple[Tensor, ...]]] = {}
        self._bound: dict[str, Bound] = {}

    @functools.cached_property
    def _tensors(self) -> tuple[Tensor, ...]:
        return random_tensors(self.problem, self.options.device, self.options.seed)

    def measure(self, providers: Sequence[Provider]) -> list[Row]:
        """A row for each provider and pass."""
        for provider in providers:
            for which, comparison in self.comparisons.items():
                skipped = self._skipped(provider, which)
                if skipped is None:
                    self._prepare(provider, which)
                else:
                    comparison.outcomes[provider.name] = skipped
            if not any(comparison.succeeded(provider.name) for comparison in self.comparisons.values()):
                self._bound.pop(provider.name, None)
        method = timing_method(self.options)
        for which, comparison in self.comparisons.items():
            calls = {name: functools.partial(bound.milliseconds, which, method) for name, bound in self._bound.items()}
            comparison.interleave(calls, method)
        return [self._row(provider.name, which) for provider in providers for which in self.options.passes]

    def _skipped(self, provider: Provider, which: Pass) -> Outcome | None:
        refusal = provider.refusal(self.problem, which)
        if refusal:
            return Outcome(Status.UNSUPPORTED, refusal)
        outcome = series_outcome(self.problem, provider.name, which, self._context.rows, self.options.max_seconds)
        if outcome is None and provider.quadratic:
            outcome = would_not_fit(self.problem, which, self.options.device)
        return outcome

    def _prepare(self, provider: Provider, which: Pass) -> None:
        """First calls, compilation, comparison and memory: all that is not timed."""
        comparison, name = self.comparisons[which], provider.name
        with warnings.catch_warnings(record=provider.warns_why) as caught:
            if caught is not None:
                warnings.simplefilter("always")
            first = comparison.attempt(
                name,
                f"first {which}",
                lambda: self._first(provider, which),
                lambda exception: outcome_of_provider(provider, exception, caught or []),
            )
        if first is not None:
            self.first[name, which] = first
            comparison.skip_if_slow(name, first["probe_ms"], self.options.max_seconds)

    def _first(self, provider: Provider, which: Pass) -> Row:
        if provider.name not in self._bound:
            self._bound[provider.name] = Bound(provider, self.problem, self._tensors, self.options.device)
        bound = self._bound[provider.name]
        self._compare(bound, which)
        return bound.first(which)

    def _compare(self, bound: Bound, which: Pass) -> None:
        """Compare with the first provider that has results. Raises WrongResultError if they differ beyond rounding."""
        name, gradients = bound.provider.name, which != "forward"
        if (name, gradients) not in self.differences:
            results = bound.results(which)
            source, expected = self._expected.setdefault(gradients, (name, results))
            self.differences[name, gradients] = (relative_difference(results, expected), source)
        difference, source = self.differences[name, gradients]
        allowed = plausible_difference(self.problem.dtype, gradients=gradients, tf32=self.options.tf32)
        if not difference <= allowed:
            what = "gradients differ" if gradients else "output differs"
            raise WrongResultError(f"the {what} from {source}'s by {difference:.1g} of the norm")

    def _row(self, name: str, which: Pass) -> Row:
        comparison, options = self.comparisons[which], self.options
        columns = comparison.columns(name)
        median = columns["median_ms"]
        reference = reference_name(self.problem.dtype, options.device)
        first = self.first.get((name, which), dict.fromkeys(FIRST_COLUMNS))
        difference, source = self.differences.get((name, which != "forward"), (None, None))
        row: Row = {
            "preset": options.preset,
            "provider": name,
            "pass": which,
            **columns,
            "tflops": median and teraflops_per_second(self.problem.flops(which), median),
            **comparison.speedup_columns("speedup_over_naive", name, BASELINE),
            "reference": reference,
            **comparison.speedup_columns("speedup_over_reference", name, reference),
            **first,
            "host_bound": median and (first["host_ms"] or 0.0) > median,
            "difference": None if difference is None or math.isinf(difference) else difference,
            "difference_from": source,
            "tf32": options.tf32,
        }
        warnings_of_row = doubts(row | self.problem.columns, device_name(options.device))
        return row | {"warning": "; ".join(warnings_of_row)}


def measure(problem: Problem, context: Context) -> list[Row]:
    """The rows of a case: one for each provider and pass."""
    options = context.options
    add_peers(options.peers)
    providers = chosen_providers(all_providers(options.device), options.providers)
    # A compiled backward pass may otherwise overwrite its inputs, and cannot run again on the same graph.
    with without_donated_buffers():
        return CaseRun(problem, context).measure(providers)


def outcome_of_provider(
    provider: Provider, exception: Exception, caught: Sequence[warnings.WarningMessage] = ()
) -> Outcome:
    """The outcome of an exception, which may be how it refuses a call; torch gives its reasons in warnings."""
    if isinstance(exception, WrongResultError):
        return Outcome(Status.ERROR, str(exception))
    outcome = outcome_of(exception, refusals=provider.refusals)
    if outcome.status is Status.ERROR and any(phrase in str(exception) for phrase in provider.refusal_phrases):
        texts = dict.fromkeys(str(warning.message).partition(" (Triggered internally")[0].strip() for warning in caught)
        reasons = [text for text in texts if "not used because" not in text and "runtime disabled" not in text]
        return Outcome(Status.UNSUPPORTED, "; ".join(reasons) or str(exception).partition("\n")[0])
    return outcome


def would_not_fit(problem: Problem, which: Pass, device: torch.device) -> Outcome | None:
    """`skipped` if an implementation that keeps the score matrix would not fit; None where it may be tried.

    On CUDA the allocator refuses by itself. A CPU's memory can be overcommitted: the machine would swap.
    """
    available = available_bytes() if device.type == "cpu" else None
    needed = problem.quadratic_bytes(which)
    if available is None or needed <= available * _USABLE_SHARE:
        return None
    return Outcome(Status.SKIPPED, f"would need {needed / GIB:.1f} GiB; {available / GIB:.1f} GiB are available")


def series_outcome(
    problem: Problem, provider: str, which: Pass, rows: Sequence[Row], max_seconds: float
) -> Outcome | None:
    """`skipped` if shorter lengths of the series ran out of memory, or took so long that this one exceeds the limit.

    A series has the same provider, pass, dtype, mask and head dimension.
    """
    series = {name: getattr(problem, name) for name in ("dtype", "mask", "head_dim")}
    series |= {"provider": provider, "pass": which}
    shorter = [row for row in rows if row.items() >= series.items() and row["length"] < problem.length]
    timed = [row for row in shorter if row["median_ms"] or row["probe_ms"]]
    exhausted = ran_out_of_memory(series | {"length": problem.length}, shorter, "length")
    if exhausted or not timed:
        return exhausted
    nearest = max(timed, key=lambda row: int(row["length"]))
    sizes = {name: nearest[name] for name in ("batch", "heads", "kv_heads", "length")}
    growth = problem.flops(which) / replace(problem, **sizes).flops(which)
    seconds = (nearest["median_ms"] or nearest["probe_ms"]) * growth * 1e-3
    if seconds <= max_seconds:
        return None
    reason = f"one call would take about {seconds:.1f} s, estimated from length {nearest['length']}"
    return Outcome(Status.SKIPPED, f"{reason}: more than the {max_seconds:g} s allowed")
