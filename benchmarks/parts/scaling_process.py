"""What each process of a group does that trains a model together, for scaling.py."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.lib.harness import Case, Row
from benchmarks.lib.models import FORWARD_BACKWARD, model_config, rate_columns
from benchmarks.lib.steps import TrainingStep, autocast, finite_loss, make_batch, step_columns
from cs336_systems.parallel import Layout, ParallelModel
from cs336_systems.parallel.layout import NONE, WITH_CONTEXT
from cs336_systems.profiling.environment import device_name
from cs336_systems.profiling.flops import device_peak
from cs336_systems.profiling.steps import StepTimes, time_steps
from cs336_systems.profiling.timing import RoundTimes
from cs336_systems.transformer import Transformer, TransformerConfig

WEAK, STRONG = SCALES = ("weak", "strong")
STEP, LONGEST = "step", "longest"
COMPILE = ("none", "auto")
"""auto: the whole model for one process, each block for several, as the training command."""


@dataclass(frozen=True)
class ScalingCase(Case):
    """A training step of several processes.

    Attributes:
        what: whether steps are timed, "step", or one is tried that may not fit into memory, "longest".
        scale: whether length and batch are the work of each process, "weak", or of all together, "strong".
        parallel: how the processes share the work, one of `cs336_systems.parallel.MODES`.
    """

    what: str
    model: str
    suite: str
    vocab_size: int
    scale: str
    parallel: str
    processes: int
    length: int
    batch: int
    compile: str
    warmup_steps: int
    recompute_every: int | None = None
    loss_chunk: int | None = None

    @property
    def name(self) -> str:
        """The case in one line."""
        changes = {"recompute": self.recompute_every, "chunk": self.loss_chunk}
        others = "".join(f" {name}={value}" for name, value in changes.items() if value is not None)
        work = f"{self.model} ({self.suite}, {self.vocab_size}) {self.batch}x{self.length} {self.scale}"
        how = f"compile={self.compile} warmup={self.warmup_steps}{others}"
        return f"{self.what} {work} {self.parallel} on {self.processes} {how}"

    @property
    def shares_sequences(self) -> bool:
        """Whether the processes have parts of the same sequences."""
        return self.parallel in WITH_CONTEXT

    @property
    def step_length(self) -> int:
        """Tokens of a sequence of the whole step."""
        return self.length * (self.processes if self.scale == WEAK and self.shares_sequences else 1)

    @property
    def sequences(self) -> int:
        """Sequences of the whole step."""
        return self.batch * (self.processes if self.scale == WEAK and not self.shares_sequences else 1)

    @property
    def config(self) -> TransformerConfig:
        """The model."""
        return model_config(self.model, self.suite, vocab_size=self.vocab_size, context_length=self.step_length)

    @property
    def work_columns(self) -> Row:
        """The work of the whole step."""
        flops = 3 * self.config.forward_flops_per_token(every_pair=True)
        sizes = {"step_length": self.step_length, "sequences": self.sequences, "parameters": self.config.parameters()}
        return sizes | {"flops_per_token": flops}


def make_step(case: ScalingCase, layout: Layout, seed: int) -> TrainingStep:
    """The step of this process. All processes together have the same tokens, whatever their number."""
    torch.manual_seed(seed)
    every, config = case.recompute_every, case.config
    parallel = ParallelModel(
        lambda device: Transformer(config, checkpoint_every=every, device=device, dtype=torch.float32),
        layout,
        autocast=True,
        compile=case.compile != "none",
    )
    whole = make_batch(config, case.sequences, layout.device, seed)
    tokens, targets = (half.chunk(layout.data_size)[layout.data_rank].clone() for half in whole)
    count = float(case.sequences * case.step_length)

    def forward() -> Tensor:
        with autocast(layout.device, "bfloat16"):
            return parallel.loss(tokens, targets, count=count, chunk=case.loss_chunk)

    return TrainingStep(forward, parallel.model)


def allocate_state(step: TrainingStep) -> None:
    """Make the optimizer allocate its state, by an update with zero gradients and a learning rate of 0."""
    for parameter in step.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    rates = [group["lr"] for group in step.optimizer.param_groups]
    for group in step.optimizer.param_groups:
        group["lr"] = 0.0
    step.optimizer.step()
    for group, rate in zip(step.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    step.optimizer.zero_grad()


def measure(case: ScalingCase, options: Namespace, layout: Layout) -> Row:
    """The columns of the case, from what all processes measured; each process calls this."""
    step = make_step(case, layout, options.seed)
    steps, warmup = (options.steps, case.warmup_steps) if case.what == STEP else (1, 0)
    if case.what == LONGEST:
        allocate_state(step)  # so that the only step needs as much memory as every later one
    losses: list[Tensor] = []

    def run() -> None:
        loss = step.forward()
        losses.append(loss.detach())
        loss.backward()
        step.update()

    times = time_steps({"step": run}, device=layout.device, steps=steps, warmup=warmup)
    ends = [finite_loss(losses[index], "bfloat16") or 0.0 for index in (0, -1)]
    each: list[tuple[StepTimes, list[float]]] = [(times, ends)] * layout.size
    if layout.mode != NONE:
        dist.all_gather_object(each, (times, ends))
    row = group_columns(each)
    if case.what == LONGEST:  # its only step loads code and allocates, so its rate means nothing
        return row
    known = device_peak(device_name(layout.device))
    peak, tokens = None if known is None else known.half, case.step_length * case.sequences
    return row | rate_columns(case.config, tokens, FORWARD_BACKWARD, row["median_ms"], peak, layout.size)


def group_columns(each: Sequence[tuple[StepTimes, Sequence[float]]]) -> Row:
    """The columns of a group: the slowest process in each step, the peak of each, and the mean losses."""
    times = [found for found, _ in each]
    slowest = RoundTimes(tuple(map(max, zip(*(found.step.milliseconds for found in times), strict=True))))
    first = max(found.first_ms for found in times)
    first_loss, last_loss = (sum(losses) / len(each) for losses in zip(*(ends for _, ends in each), strict=True))
    return {
        **step_columns(slowest),
        "host_ms": max(min(found.host_ms) for found in times),
        "compile_s": max(0.0, first - slowest.median) * 1e-3 if times[0].warmup_ms else None,
        "first_loss": first_loss,
        "last_loss": last_loss,
        "peak_bytes_of_each": [found.memory.peak_bytes for found in times],
    }
