"""The columns of the attention benchmark's results, and the rows that a measured cell becomes."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention_cell import CellResult, Difference, Measurement
from benchmarks.attention_contender import plausible_difference
from benchmarks.attention_presets import Problem, SweepConfiguration
from benchmarks.attention_provider import Provider
from benchmarks.attention_providers import BASELINE, reference_name
from cs336_systems.profiling.environment import Environment
from cs336_systems.profiling.flops import Pass, implausible_rate, teraflops_per_second
from cs336_systems.profiling.sweep import Row, Status

COLUMNS = (
    "preset",
    "implementation",
    "pass",
    "dtype",
    "mask",
    "batch",
    "heads",
    "kv_heads",
    "length",
    "head_dim",
    "status",
    "reason",
    "rounds",
    "median_ms",
    "min_ms",
    "max_ms",
    "std_ms",
    "tflops",
    "speedup_over_naive",
    "reference",
    "speedup_over_reference",
    "held_mib",
    "peak_mib",
    "memory_method",
    "difference",
    "difference_from",
    "warning",
    "probe_ms",
    "round_ms",
    "device",
    "torch",
    "triton",
    "cuda",
    "driver",
    "tf32",
    "seed",
    "commit",
    "dirty",
    "date",
)

_INTEGERS = {"batch", "heads", "kv_heads", "length", "head_dim", "rounds", "seed"}
_NUMBERS = {"median_ms", "min_ms", "max_ms", "std_ms", "tflops", "speedup_over_naive", "speedup_over_reference"} | {
    *("held_mib", "peak_mib", "difference", "probe_ms")
}
_FLAGS = {"tf32", "dirty"}
_TEXTS = {"reason", "warning"}
"""Columns in which an empty field is an empty text, and not one that is not there."""

_PLAUSIBLE_SPREAD = 2.0


class RowMaker:
    """Turns the results of a sweep's cells into rows that say everything about themselves."""

    def __init__(self, configuration: SweepConfiguration, environment: Environment, device: torch.device) -> None:
        self._configuration = configuration
        self._environment = environment
        self._device = device

    def rows(self, problem: Problem, providers: Sequence[Provider], result: CellResult) -> list[Row]:
        """One row for each provider and pass, in this order."""
        return [
            self._row(problem, provider.name, which, result)
            for provider in providers
            for which in self._configuration.passes
        ]

    def _row(self, problem: Problem, name: str, which: Pass, result: CellResult) -> Row:
        measurement = result.measurements[name, which]
        environment = self._environment
        reference = reference_name(problem, self._device)
        memory, outcome = measurement.memory, measurement.outcome
        difference = result.differences.get((name, which))
        row: Row = {
            "preset": self._configuration.preset,
            "implementation": name,
            "pass": which,
            "dtype": problem.dtype,
            "mask": problem.mask,
            "batch": problem.batch,
            "heads": problem.heads,
            "kv_heads": problem.kv_heads,
            "length": problem.length,
            "head_dim": problem.head_dim,
            "status": outcome.status.value,
            "reason": outcome.reason,
            "reference": reference,
            "speedup_over_naive": _speedup(measurement, result.measurements.get((BASELINE, which))),
            "speedup_over_reference": _speedup(measurement, result.measurements.get((reference, which))),
            "held_mib": None if memory is None else memory.held_mib,
            "peak_mib": None if memory is None else memory.peak_mib,
            "memory_method": None if memory is None else memory.method or None,
            "difference": None if difference is None else _finite(difference.value),
            "difference_from": None if difference is None else difference.provider,
            "probe_ms": measurement.probe_ms,
            "device": environment.device,
            "torch": environment.torch,
            "triton": environment.triton,
            "cuda": environment.cuda,
            "driver": environment.driver,
            "tf32": self._configuration.tf32,
            "seed": self._configuration.seed,
            "commit": environment.commit,
            "dirty": environment.dirty,
            "date": environment.date,
        }
        row.update(self._time_columns(problem, which, measurement))
        row["warning"] = "; ".join(self._warnings(problem, row, difference))
        return row

    def _time_columns(self, problem: Problem, which: Pass, measurement: Measurement) -> Row:
        times = measurement.times
        if times is None:
            return dict.fromkeys(("rounds", "median_ms", "min_ms", "max_ms", "std_ms", "tflops", "round_ms"))
        return {
            "rounds": len(times.milliseconds),
            "median_ms": times.median,
            "min_ms": times.minimum,
            "max_ms": times.maximum,
            "std_ms": times.standard_deviation,
            "tflops": teraflops_per_second(problem.flops(which), times.median),
            "round_ms": list(times.milliseconds),
        }

    def _warnings(self, problem: Problem, row: Row, difference: Difference | None) -> list[str]:
        found = []
        tf32 = self._configuration.tf32
        if row["status"] == Status.OK.value and row["tflops"] is not None:
            implausible = implausible_rate(row["tflops"], self._environment.device, problem.dtype, tf32=tf32)
            found += [implausible] if implausible else []
            spread = row["max_ms"] / row["min_ms"]
            if spread > _PLAUSIBLE_SPREAD:
                found.append(f"the slowest round took {spread:.1f} times the fastest: something else may have run")
        allowed = plausible_difference(problem.dtype, gradients=row["pass"] != "forward", tf32=tf32)
        if difference is not None and not difference.value <= allowed:
            results = "output differs" if row["pass"] == "forward" else "gradients differ"
            found.append(f"the {results} from {difference.provider}'s by {difference.value:.1g} of the norm")
        return found


def rows_from_csv(path: Path) -> list[Row]:
    """The rows that `results.csv` was written of. Raises ValueError where a field is not what its column holds."""
    with path.open(newline="", encoding="utf-8") as file:
        return [{column: _value(column, line.get(column) or "") for column in COLUMNS} for line in csv.DictReader(file)]


def _value(column: str, text: str) -> Any:
    if column in _TEXTS:
        return text
    if not text:
        return None
    if column in _INTEGERS:
        return int(text)
    if column in _NUMBERS:
        return float(text)
    if column in _FLAGS:
        return text == "True"
    return [float(item) for item in text.split(";")] if column == "round_ms" else text


def _speedup(measurement: Measurement, baseline: Measurement | None) -> float | None:
    if measurement.times is None or baseline is None or baseline.times is None:
        return None
    return measurement.times.speedup_over(baseline.times)


def _finite(value: float) -> float | None:
    """The value, or None where JSON has no number for it; the warning then says what was wrong."""
    return value if value < float("inf") else None


def summary(rows: Sequence[Row]) -> str:
    """How a cell went, in a few words: `21 ok, 3 unsupported, 1 oom`."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["status"]] = counts.get(row["status"], 0) + 1
    return ", ".join(f"{count} {status}" for status, count in counts.items())
