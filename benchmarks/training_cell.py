"""One configuration of a training step, measured in this process: its model, its batch, its step, and their figures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from benchmarks.suite import columns_here
from benchmarks.training_models import NAIVE, NOTHING, attn_of, compiled, config_of, make_model, why_not
from cs336_systems.kernels.torch_names import compiler_counters
from cs336_systems.profiling.steps import time_steps
from cs336_systems.profiling.sweep import Row, Status
from cs336_systems.profiling.timing import RoundTimes
from cs336_systems.training.config import TrainingConfig
from cs336_systems.training.optimizer import adamw, update
from cs336_systems.transformer import TransformerConfig

LEARNING_RATE = 1e-4
"""Low enough for the largest preset to begin with: the step takes as long with any."""


@dataclass(frozen=True)
class Cell:
    """What is trained: a preset's sizes, sequences of a length, and the model of `training_models.MODELS`."""

    preset: str
    suite: str
    vocab_size: int
    context: int
    batch: int
    model: str
    compile: str

    @property
    def key(self) -> str:
        """The cell in words, which no other has."""
        sizes = f"{self.preset} ({self.suite}, {self.vocab_size} tokens)"
        return f"{sizes}, {self.batch} × {self.context}, {self.model}, compile {self.compiles}"

    @property
    def compiles(self) -> str:
        """What is compiled: of the naive model nothing."""
        return NOTHING if self.model == NAIVE else self.compile

    @property
    def config(self) -> TransformerConfig:
        """The model's sizes, and its attention."""
        sizes = {"vocab_size": self.vocab_size, "context_length": self.context}
        return config_of(self.preset, self.suite, attn_of(self.model), **sizes)


@dataclass(frozen=True)
class Conditions:
    """How cells are measured, the same for all: steps before those that are timed, the timed ones, TF32, the seed."""

    device: torch.device
    warmup: int
    steps: int
    tf32: bool
    seed: int


@dataclass(frozen=True)
class TrainingStep:
    """A training step in its parts, each of which can be timed by itself; called, it does them all.

    Attributes:
        forward: the loss, with its graph.
        model: whose parameters are updated.
        optimizer: which updates them.
    """

    forward: Callable[[], Float[Tensor, ""]]
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def backward(self, loss: Float[Tensor, ""]) -> None:
        """The gradients of a loss that `forward` gave."""
        loss.backward()

    def update(self) -> None:
        """The gradients limited, AdamW's update, and no gradients left: the end of a step in the training loop."""
        update(self.optimizer, self.model, TrainingConfig.grad_clip)

    def __call__(self) -> Float[Tensor, ""]:
        """The loss, detached, before the update."""
        loss = self.forward()
        self.backward(loss)
        self.update()
        return loss.detach()


@dataclass(frozen=True)
class Measured:
    """What is measured of steps.

    Attributes:
        times: of the timed steps.
        first_ms: the first step, which compiles; None if it is among those that are timed.
        peak_bytes: the most that was allocated on the GPU during the timed steps; None on other devices.
        host_ms: the least that a timed step took the host, which may run ahead of the device.
        first_loss, last_loss: of the first step and of the last.
    """

    times: RoundTimes
    first_ms: float | None
    peak_bytes: int | None
    host_ms: float
    first_loss: float
    last_loss: float

    @property
    def compile_s(self) -> float | None:
        """Seconds that the first step took beyond a later one, for compilation, and for whatever is loaded once."""
        return None if self.first_ms is None else max(0.0, self.first_ms - self.times.median) * 1e-3


def make_batch(
    config: TransformerConfig, batch: int, device: torch.device, seed: int
) -> tuple[Int[Tensor, "batch length"], Int[Tensor, "batch length"]]:
    """Random tokens on the device, and what follows each."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (batch, config.context_length + 1), generator=generator).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def autocast(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
    """What the forward pass runs under: products in bfloat16, as the training command has them on such GPUs.

    Another dtype is that of products instead; with float32 autocast is off.
    """
    if dtype == torch.float32:
        return torch.autocast(device.type, enabled=False)
    return torch.autocast(device.type, dtype)


def make_step(forward: Callable[[], Float[Tensor, ""]], model: nn.Module) -> TrainingStep:
    """A step with the training command's AdamW, its averages not yet allocated."""
    betas = (TrainingConfig.beta1, TrainingConfig.beta2)
    optimizer = adamw(model, learning_rate=LEARNING_RATE, betas=betas, weight_decay=TrainingConfig.weight_decay)
    return TrainingStep(forward, model, optimizer)


def prepared_step(cell: Cell, device: torch.device, seed: int) -> TrainingStep:
    """The step of a cell, of which nothing has run and nothing is compiled yet."""
    torch.manual_seed(seed)
    model = make_model(cell.model, cell.config, device)
    return step_of(model, cell.compiles, make_batch(cell.config, cell.batch, device, seed))


def step_of(
    model: nn.Module,
    how: str,
    batch: tuple[Int[Tensor, "batch length"], Int[Tensor, "batch length"]],
    dtype: torch.dtype = torch.bfloat16,
) -> TrainingStep:
    """The step of a model, compiled as `training_models.COMPILE` says it, on a batch, with products in a dtype."""
    called = compiled(model, how)
    tokens, targets = batch

    def forward() -> Tensor:
        with autocast(tokens.device, dtype):
            loss: Tensor = called(tokens, targets=targets, count=float(targets.numel()))
        return loss

    return make_step(forward, model)


def measured_step(step: Callable[[], Tensor], device: torch.device, *, untimed: int, timed: int) -> Measured:
    """Run a step so many times, of which the first are not timed, and then those that are.

    Raises:
        FloatingPointError: the last loss is no finite number.
    """
    losses: list[Tensor] = []
    times = time_steps({"step": lambda: losses.append(step())}, device=device, steps=timed, warmup=untimed)
    first_loss, last_loss = float(losses[0]), float(losses[-1])
    if not math.isfinite(last_loss):
        raise FloatingPointError(f"the loss of the last step must be finite; got {last_loss}")
    first_ms = times.first_ms if untimed else None
    return Measured(times.step, first_ms, times.memory.peak_bytes, min(times.host_ms), first_loss, last_loss)


def columns_of(measured: Measured) -> Row:
    """The columns of a row that say what was measured."""
    times = measured.times
    return {
        "median_ms": times.median,
        "mean_ms": times.mean,
        "std_ms": times.standard_deviation,
        "min_ms": times.minimum,
        "step_ms": list(times.milliseconds),
        "host_ms": measured.host_ms,
        "compile_s": measured.compile_s,
        "peak_bytes": measured.peak_bytes,
        "first_loss": measured.first_loss,
        "last_loss": measured.last_loss,
    }


def measure_cell(job: tuple[Cell, Conditions]) -> Row:
    """The columns of a cell's row, for a process of its own; what cannot be measured is a status."""
    cell, conditions = job
    device = conditions.device

    def measure() -> Row:
        step = prepared_step(cell, device, conditions.seed)
        measured = measured_step(step, device, untimed=conditions.warmup, timed=conditions.steps)
        return {"status": Status.OK.value, "reason": "", **columns_of(measured), **graph_columns()}

    refusal = partial(why_not, cell.model, cell.config, device)
    return columns_here(measure, device=device, tf32=conditions.tf32, refusal=refusal)


def graph_columns() -> Row:
    """How many graphs of this process torch found compiled in its folder, and how many it compiled."""
    found = compiler_counters()
    return {
        "graphs_from_cache": found["fxgraph_cache_hit"],
        "graphs_compiled": found["fxgraph_cache_miss"] + found["fxgraph_cache_bypass"],
    }
