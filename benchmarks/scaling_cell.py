"""One process of a group that trains a model together, started by `scaling_groups`: measures a step, and says so."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.suite import allow_tf32, columns_of_failure
from benchmarks.training_cell import (
    Measured,
    TrainingStep,
    autocast,
    columns_of,
    make_batch,
    make_step,
    measured_step,
)
from benchmarks.training_models import config_of
from cs336_systems.files import write_text
from cs336_systems.parallel import Layout, ParallelModel, start
from cs336_systems.parallel.layout import NONE, WITH_CONTEXT, WITH_SHARDS
from cs336_systems.profiling.sweep import Row, Status, outcome_of
from cs336_systems.profiling.timing import RoundTimes
from cs336_systems.training.optimizer import set_learning_rate
from cs336_systems.transformer import Transformer, TransformerConfig

WEAK, STRONG = "weak", "strong"
SCALES = (WEAK, STRONG)
STEP, LONGEST = "step", "longest"
RESULT = "result.json"
FAILURE = "failure-{}.json"


@dataclass(frozen=True)
class Cell:
    """A step of some processes, or a length that is tried.

    Attributes:
        what: whether steps are timed, `STEP`, or one is tried that may not fit into memory, `LONGEST`.
        preset, suite, vocab_size: the model's sizes.
        scale: whether `context` and `batch` are the work of each process, "weak", or of all together, "strong".
        mode, processes: how many processes share the work, and how, as ``--parallel`` says it.
        context, batch: the length of a sequence, and how many a step has.
        compile: whether torch.compile is used.
        recompute_every, loss_chunk: as the training command has them.
    """

    what: str
    preset: str
    suite: str
    vocab_size: int
    scale: str
    mode: str
    processes: int
    context: int
    batch: int
    compile: bool
    recompute_every: int | None = None
    loss_chunk: int | None = None

    @property
    def key(self) -> str:
        """The cell in words, which no other has."""
        changes = {"recompute": self.recompute_every, "loss chunk": self.loss_chunk}
        others = "".join(f", {name} {value}" for name, value in changes.items() if value is not None)
        sizes = f"{self.preset} ({self.suite}, {self.vocab_size} tokens){others}"
        compiles = "compiled" if self.compile else "not compiled"
        work = f"{self.scale}, {self.batch} × {self.context}"
        return f"{self.what}, {sizes}, {compiles}, {work}, {self.mode} on {self.processes}"

    @property
    def shares_sequences(self) -> bool:
        """Whether all processes have parts of the same sequences."""
        return self.mode in WITH_CONTEXT

    @property
    def shards(self) -> int:
        """Into how many parts the model is divided."""
        return self.processes if self.mode in WITH_SHARDS else 1

    @property
    def length(self) -> int:
        """Of the sequences of a step."""
        return self.context * (self.processes if self.scale == WEAK and self.shares_sequences else 1)

    @property
    def sequences(self) -> int:
        """Of a step, over all processes."""
        return self.batch * (self.processes if self.scale == WEAK and not self.shares_sequences else 1)

    @property
    def config(self) -> TransformerConfig:
        """The model's sizes."""
        sizes = {"vocab_size": self.vocab_size, "context_length": self.length}
        return config_of(self.preset, self.suite, "auto", **sizes)


@dataclass(frozen=True)
class Job:
    """A cell, how it is measured, and the folder where its processes say what came of it.

    Attributes:
        device: "cuda" or "cpu"; which GPU each process has follows from its number.
        patience: seconds that the processes wait for one another.
    """

    cell: Cell
    device: str
    warmup: int
    steps: int
    tf32: bool
    seed: int
    patience: float
    folder: str

    def as_json(self) -> str:
        """The job as an argument of a command."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The job that `as_json` wrote."""
        values = json.loads(text)
        return cls(**values | {"cell": Cell(**values["cell"])})


def prepared_step(job: Job, layout: Layout) -> TrainingStep:
    """This process's part of the step, of which nothing has run yet.

    The tokens of a step are the same however many processes share them.
    """
    cell, config = job.cell, job.cell.config
    torch.manual_seed(job.seed)
    parallel = ParallelModel(
        lambda place: Transformer(config, checkpoint_every=cell.recompute_every, device=place, dtype=torch.float32),
        layout,
        autocast=True,
        compile=cell.compile,
    )
    whole = make_batch(config, cell.sequences, layout.device, job.seed)
    tokens, targets = (half.chunk(layout.data_size)[layout.data_rank].clone() for half in whole)

    def forward() -> Tensor:
        with autocast(layout.device):
            return parallel.loss(tokens, targets, count=float(cell.sequences * cell.length), chunk=cell.loss_chunk)

    return make_step(forward, parallel.model)


def allocate_averages(step: TrainingStep) -> None:
    """Let the optimizer have its state before the first step, which is then as high as all others.

    The update is one by gradients of 0 at a rate of 0: no parameter changes.
    """
    rate = step.optimizer.param_groups[0]["lr"]
    for parameter in step.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    set_learning_rate(step.optimizer, 0.0)
    step.optimizer.step()
    step.optimizer.zero_grad()
    set_learning_rate(step.optimizer, rate)


def measure(job: Job, layout: Layout) -> Row:
    """The columns of the cell's row, from what all processes measured; each calls this."""
    step = prepared_step(job, layout)
    if job.cell.what == LONGEST:
        # A step can take minutes there, so the first one has to tell whether it fits.
        allocate_averages(step)
        mine = measured_step(step, layout.device, untimed=0, timed=1)
    else:
        mine = measured_step(step, layout.device, untimed=job.warmup, timed=job.steps)
    each = layout.gathered(mine)
    row = {"status": Status.OK.value, "reason": "", **columns_of(together(each))}
    return row | {"peak_bytes_of_each": [one.peak_bytes for one in each]}


def together(each: Sequence[Measured]) -> Measured:
    """The group's figures: the time of the slowest in each step, the highest peak, and the mean of the losses."""
    steps = zip(*(one.times.milliseconds for one in each), strict=True)
    first_ms = [one.first_ms for one in each if one.first_ms is not None]
    peaks = [one.peak_bytes for one in each if one.peak_bytes is not None]
    return Measured(
        times=RoundTimes(tuple(max(step) for step in steps)),
        first_ms=max(first_ms, default=None),
        peak_bytes=max(peaks, default=None),
        host_ms=max(one.host_ms for one in each),
        first_loss=sum(one.first_loss for one in each) / len(each),
        last_loss=sum(one.last_loss for one in each) / len(each),
    )


def main(arguments: Sequence[str]) -> None:
    """Measure the job that the one argument says, and write what came of it.

    A process that fails says why in a file of its own and ends at once. The group is not taken down in an orderly way,
    for which the others, who wait for this one within a step, would have to be heard; torchrun ends them.
    """
    (text,) = arguments
    job = Job.from_json(text)
    folder, stack = Path(job.folder), contextlib.ExitStack()
    try:
        allow_tf32(job.tf32)
        patience = None if job.cell.mode == NONE else timedelta(seconds=job.patience)
        layout = stack.enter_context(start(job.cell.mode, torch.device(job.device), patience=patience))
        row = measure(job, layout)
        if layout.is_main:
            write_text(folder / RESULT, json.dumps(row))
    except Exception as error:
        traceback.print_exc()
        failure = columns_of_failure(outcome_of(error))
        write_text(folder / FAILURE.format(os.environ.get("RANK", "0")), json.dumps(failure))
        sys.stderr.flush()
        os._exit(1)
    stack.close()


if __name__ == "__main__":
    main(sys.argv[1:])
