"""One configuration of a model's passes, measured in this process, and the columns of its row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.suite import columns_here
from benchmarks.training_cell import graph_columns, make_batch, step_of
from benchmarks.training_models import NOTHING, refusal
from cs336_systems.profiling.environment import Environment
from cs336_systems.profiling.flops import device_peak, implausible_rate, teraflops_per_second
from cs336_systems.profiling.memory import MIB
from cs336_systems.profiling.steps import BACKWARD, FORWARD, MODES, PHASES, Mode, StepTimes, time_model
from cs336_systems.profiling.sweep import Row, Status
from cs336_systems.profiling.timing import RoundTimes
from cs336_systems.transformer import Transformer, TransformerConfig

STEP = "step"
TIMED = (*PHASES, STEP)
"""What each has a time of: the phases that a mode has, and the whole step."""
TF32 = "tf32"
DTYPES = {"float32": torch.float32, TF32: torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""By the name of an arithmetic, the dtype of products: plain float32, float32 that may use TF32, and autocast."""
STATISTICS = ("mean", "std", "min", "max", "median")
SIZES = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size")
_FLOPS = {FORWARD: 1.0, BACKWARD: 2.0}
"""Of a phase, in those of a forward pass: each product has two in the backward pass. An update is none."""


@dataclass(frozen=True)
class Cell:
    """A model's passes: its sizes and attention, its batch, its arithmetic, what is compiled, and what is timed."""

    name: str
    config: TransformerConfig
    batch: int
    arithmetic: str
    compile: str
    mode: Mode
    warmup: int

    @property
    def key(self) -> str:
        """The cell in words, which no other has."""
        config = self.config
        sizes = f"{config.d_model} × {config.d_ff}, {config.num_layers} layers, {config.num_heads} heads"
        return (
            f"{self.name} ({sizes}, {config.vocab_size} tokens), {self.batch} × {config.context_length}, "
            f"attn {config.attn}, {self.arithmetic}, compile {self.compile}, {self.mode}, warm-up {self.warmup}"
        )

    @property
    def identity(self) -> Row:
        """What it is, by column."""
        sizes = {name: getattr(self.config, name) for name in SIZES}
        ways = {"attn": self.config.attn, "arithmetic": self.arithmetic, "compile": self.compile}
        work = {"batch": self.batch, "context": self.config.context_length}
        return {"model": self.name, **sizes, **work, **ways, "mode": self.mode, "warmup": self.warmup}

    @property
    def dtype(self) -> torch.dtype:
        """Of its products."""
        return DTYPES[self.arithmetic]

    @property
    def dtype_name(self) -> str:
        """Its name, without torch's."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def flops(self) -> float:
        """Of a forward pass, as torch's FlopCounterMode counts them: every pair of a query and a key."""
        return self.config.forward_flops_per_token(every_pair=True) * self.tokens

    @property
    def causal_flops(self) -> float:
        """Of a forward pass, without the pairs that the causal mask hides, which some implementations leave out."""
        return self.config.forward_flops_per_token() * self.tokens

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.config.context_length


@dataclass(frozen=True)
class Conditions:
    """How cells are measured, the same for all."""

    device: torch.device
    steps: int
    seed: int


def measure_cell(job: tuple[Cell, Conditions]) -> Row:
    """The columns of a cell's row, for a process of its own; what cannot be measured is a status."""
    cell, conditions = job

    def measure() -> Row:
        times, losses = measured(cell, conditions)
        return {"status": Status.OK.value, "reason": "", **columns_of(times), **losses, **graph_columns()}

    reason = partial(refusal, cell.config, cell.dtype, conditions.device)
    return columns_here(measure, device=conditions.device, tf32=cell.arithmetic == TF32, refusal=reason)


def measured(cell: Cell, conditions: Conditions) -> tuple[StepTimes, Row]:
    """The times of a cell's steps, and its first and last loss: None where that is no finite number.

    Gradients are not scaled, so that float16 may overflow as training with a scaler would not.

    Raises:
        FloatingPointError: the last loss is not finite, in another dtype than float16.
    """
    device = conditions.device
    torch.manual_seed(conditions.seed)
    model = Transformer(cell.config, device=device, dtype=torch.float32)
    step = step_of(model, cell.compile, make_batch(cell.config, cell.batch, device, conditions.seed), cell.dtype)
    losses: list[Tensor] = []

    def forward() -> Tensor:
        loss = step.forward()
        losses.append(loss.detach())
        return loss

    times = time_model(
        forward,
        model,
        device=device,
        mode=cell.mode,
        update=step.update if cell.mode == "step" else None,
        steps=conditions.steps,
        warmup=cell.warmup,
    )
    first, last = float(losses[0]), float(losses[-1])
    if not math.isfinite(last) and cell.dtype != torch.float16:
        raise FloatingPointError(f"the loss of the last step must be finite; got {last}")
    return times, {"first_loss": _finite(first), "last_loss": _finite(last)}


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def columns_of(times: StepTimes) -> Row:
    """The columns that say what was measured."""
    row: Row = {}
    for name, rounds in (*times.phases.items(), (STEP, times.step)):
        row |= statistics_of(name, rounds)
    memory = times.memory
    readings = (("allocated", memory.allocated_bytes), ("reserved", memory.reserved_bytes), ("peak", memory.peak_bytes))
    row |= {f"{name}_mib": None if size is None else size / MIB for name, size in readings}
    return row | {"warmup_ms": list(times.warmup_ms), "first_step_ms": times.first_ms}


def statistics_of(name: str, rounds: RoundTimes) -> Row:
    """The columns of one phase: milliseconds, the coefficient of variation, and the time in each step."""
    values = (rounds.mean, rounds.standard_deviation, rounds.minimum, rounds.maximum, rounds.median)
    row: Row = {f"{name}_{label}_ms": value for label, value in zip(STATISTICS, values, strict=True)}
    return row | {f"{name}_cv": rounds.coefficient_of_variation, f"{name}_each_ms": list(rounds.milliseconds)}


def row_of(cell: Cell, found: Row, environment: Environment, conditions: Conditions) -> Row:
    """The whole row of a cell: what it is, what was found, the rates that follow, and what it was measured in."""
    first = "warm-up" if cell.warmup else "timed"
    return {
        **cell.identity,
        "parameters": cell.config.parameters(),
        "dtype": cell.dtype_name,
        "autocast": cell.dtype != torch.float32,
        "tf32": cell.arithmetic == TF32,
        "steps": conditions.steps,
        "first_step": first,
        "compilation": first if cell.compile != NOTHING else "none",
        "seed": conditions.seed,
        **found,
        **rates_of(cell, found, environment.device),
        "torch": environment.torch,
        "triton": environment.triton,
        "cuda": environment.cuda,
    }


def rates_of(cell: Cell, row: Mapping[str, Any], device_name: str) -> Row:
    """Tokens per second, TFLOP/s of each phase, the part of the device's peak, and warnings; None without a time."""
    dtype, tf32 = cell.dtype_name, cell.arithmetic == TF32
    works = {**_FLOPS, STEP: _FLOPS[FORWARD] + (0.0 if cell.mode == MODES[0] else _FLOPS[BACKWARD])}
    rates: Row = {}
    warnings = []
    for name, work in works.items():
        median = row.get(f"{name}_median_ms")
        if not median:
            rates[f"{name}_tflops"] = None
            continue
        rates[f"{name}_tflops"] = teraflops_per_second(cell.flops * work, median)
        # What the mask hides may have been left out, so only a rate without it is proof of anything.
        least = teraflops_per_second(cell.causal_flops * work, median)
        told = implausible_rate(least, device_name, dtype, tf32=tf32)
        warnings += [] if told is None else [f"{name}: {told}"]
    if row.get("status") == Status.OK.value and row.get("last_loss") is None:
        warnings.append("the last loss is not finite: no scaler was used")
    peak = device_peak(device_name)
    limit = None if peak is None else peak.rate(dtype, tf32=tf32)
    rate, median = rates[f"{STEP}_tflops"], row.get(f"{STEP}_median_ms")
    mfu = rate / limit if rate and limit else None
    return {
        "tokens_per_second": cell.tokens / median * 1e3 if median else None,
        **rates,
        "mfu": mfu,
        "mfu_causal": None if mfu is None else mfu * cell.causal_flops / cell.flops,
        "warning": "; ".join(warnings),
    }


def log_lines(cell: Cell, row: Row) -> list[str]:
    """A line for each step of a row: those before the timed ones as a whole, of the timed ones every phase."""
    lines = [f"  warm-up step {number}: {time:.3f} ms" for number, time in enumerate(row.get("warmup_ms", ()), 1)]
    columns = {name: row[f"{name}_each_ms"] for name in TIMED if f"{name}_each_ms" in row}
    for number, times in enumerate(zip(*columns.values(), strict=True), 1):
        said = ", ".join(f"{name} {time:.3f} ms" for name, time in zip(columns, times, strict=True))
        lines.append(f"  step {number}: {said}")
    return [cell.key, *lines] if lines else []
