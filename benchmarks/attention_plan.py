"""A sweep before it starts: who takes part in it, what it would do, and how it would measure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.attention_guards import quadratic_bytes
from benchmarks.attention_presets import Problem, SweepConfiguration
from benchmarks.attention_provider import Provider
from benchmarks.attention_providers import chosen_providers
from benchmarks.cell_filter import chosen
from cs336_systems.profiling.environment import Environment
from cs336_systems.profiling.memory import GIB
from cs336_systems.profiling.progress import readable_seconds
from cs336_systems.profiling.timing import TimingMethod


@dataclass(frozen=True)
class Plan:
    """A sweep before it starts: the configuration, the providers that are there, and why the others are not.

    The problems are those of the configuration that are to be measured now.
    """

    configuration: SweepConfiguration
    device: torch.device
    providers: tuple[Provider, ...]
    missing: dict[str, str]
    problems: tuple[Problem, ...]

    @classmethod
    def make(
        cls,
        configuration: SweepConfiguration,
        device: torch.device,
        known: Sequence[Provider],
        pattern: re.Pattern[str] | None = None,
    ) -> Plan:
        """Choose the providers, and the problems that --filter's pattern leaves.

        Raises ValueError for an unknown name, or when none of those asked for is there.
        """
        wanted = chosen_providers(known, configuration.implementations)
        missing = {provider.name: provider.missing for provider in wanted if provider.missing}
        providers = tuple(provider for provider in wanted if not provider.missing)
        if not providers:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
            raise ValueError(f"--impl must name something that can be measured here; got {reasons}")
        every = configuration.problems()
        problems = tuple(chosen(every, pattern))
        if not problems and pattern is not None:
            example = every[0].key
            raise ValueError(
                f"--filter must be found in the name of a cell, as in {example!r}; got {pattern.pattern!r}"
            )
        return cls(configuration, device, providers, missing, problems)

    @property
    def method(self) -> TimingMethod:
        """How long and how often is measured. A CPU's times scatter more, so each measurement there is longer."""
        method = TimingMethod(rounds=self.configuration.rounds)
        return method if self.device.type == "cuda" else replace(method, repetitions_ms=30.0)

    def as_dict(self, environment: Environment) -> dict[str, Any]:
        """What must be the same for two runs to belong to one sweep."""
        return {
            **self.configuration.as_dict(),
            "measured": [provider.name for provider in self.providers],
            "device": environment.device,
            "torch": environment.torch,
            "triton": environment.triton,
            "packages": environment.packages,
        }


def headline(plan: Plan) -> list[str]:
    """What the sweep is, who is measured and who is not, line by line."""
    configuration = plan.configuration
    cells, passes = len(plan.problems), ", ".join(configuration.passes)
    lines = [f"Sweep `{configuration.preset}` on {plan.device}: {cells} cells; {passes}"]
    if plan.device.type != "cuda":
        lines.append(f"No GPU is used: these are times of the {plan.device.type.upper()}, for small problems.")
    lines.append(f"measured: {', '.join(provider.name for provider in plan.providers)}")
    return lines + [f"not measured: {name} ({reason})" for name, reason in plan.missing.items()]


def dry_run(plan: Plan) -> list[str]:
    """Every cell, line by line, with the memory that may be needed and a lower bound of the time."""
    configuration, method = plan.configuration, plan.method
    problems = plan.problems
    keeps_scores = any(provider.quadratic for provider in plan.providers)
    lines = []
    for problem in problems:
        line = f"  {problem.key}, q {problem.shape}"
        if keeps_scores:
            needed = max(quadratic_bytes(problem, which) for which in configuration.passes) / GIB
            line += f", up to about {needed:.2f} GiB for those that keep the score matrix"
        lines.append(line)
    measurements = len(problems) * len(plan.providers) * len(configuration.passes) * method.rounds
    least = measurements * (method.pause_ms + method.warmup_ms + method.repetitions_ms) * 1e-3
    lines.append(f"at least {readable_seconds(least)}, compilation and longer calls not counted")
    return lines


def method_notes(plan: Plan) -> list[str]:
    """How the figures were measured, in sentences for the report."""
    method = plan.method
    clock = "the wall clock"
    if plan.device.type == "cuda":
        clock = "device events, with the L2 cache cleared before each call"
    precision = "may use TF32" if plan.configuration.tf32 else "do not use TF32 (precision `highest`)"
    return [
        f"{method.rounds} rounds, in each of which every implementation is measured once, in rotated order",
        f"one measurement: {method.pause_ms:g} ms of pause, {method.warmup_ms:g} ms of warm-up, "
        f"{method.repetitions_ms:g} ms of calls timed by {clock}",
        "times are medians over the rounds; speed-ups are medians of the ratios within a round",
        f"float32 products {precision}; inputs are normal random numbers, seed {plan.configuration.seed}",
    ]
