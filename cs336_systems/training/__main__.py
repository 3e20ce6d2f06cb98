"""`python -m cs336_systems.training`: see `--help`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

import torch

from ..devices import choose_device, fastest_threads
from ..parallel import Layout, start
from ..transformer import Transformer
from .checkpoint import CHECKPOINTS, CONFIG, newest
from .config import VOCAB_MULTIPLE, TrainingConfig, build_parser
from .data import prepare
from .loop import Trainer

FAILED, UNUSABLE, SIGNALLED = 1, 2, 128
"""Exit codes; as in shells, the number of a signal is added to the last one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the command line says; returns the exit code."""
    given = vars(build_parser().parse_args(arguments))
    resume = given.pop("resume", None)
    with contextlib.ExitStack() as stack:
        try:
            config = TrainingConfig(**given) if resume is None else TrainingConfig.load(resume / CONFIG).resumed(given)
            device = choose_device(config.device)
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            config = with_threads(config, device)
            layout = stack.enter_context(start(config.parallel, device, config.context_size))
            trainer = begin(config, resume, layout)
        except (ValueError, TypeError, OSError) as error:
            say(f"error: {error}")
            return UNUSABLE
        try:
            stopped = trainer.run(stack.enter_context(stop_signals(layout)))
        except (FloatingPointError, OSError) as error:
            if layout.is_main:
                say(f"error: {error}; the checkpoints in {trainer.folder / CHECKPOINTS} are intact")
            return FAILED
        except torch.OutOfMemoryError as error:
            say(f"error: {error}\n--micro-batch-size 1, --recompute-every 1 and --loss-chunk 4096 take less memory")
            return FAILED
        except KeyboardInterrupt:
            say(f"interrupted within a step; --resume {trainer.folder} continues from the last checkpoint")
            return SIGNALLED + signal.SIGINT
        if layout.is_main and stopped:
            say(f"{signal.Signals(stopped).name} at step {trainer.step}; --resume {trainer.folder} continues")
        elif layout.is_main:
            say(f"done; the model is in {trainer.folder}")
        return SIGNALLED + stopped if stopped else 0


def with_threads(config: TrainingConfig, device: torch.device) -> TrainingConfig:
    """Set the number of threads on a CPU, and record a measured one: a resumed run takes it too, and rounds alike."""
    if device.type != "cpu":
        return config
    if config.threads is None and "OMP_NUM_THREADS" not in os.environ and config.parallel == "none":
        sizes = dataclasses.replace(config.model(VOCAB_MULTIPLE), num_layers=1)
        model = Transformer(sizes)
        tokens = torch.zeros(config.micro_batch(1), sizes.context_length, dtype=torch.long)
        config = dataclasses.replace(config, threads=fastest_threads(lambda: model(tokens).sum().backward()))
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    return config


def begin(config: TrainingConfig, resume: Path | None, layout: Layout) -> Trainer:
    """The run at its start, or at its newest checkpoint. Raises ValueError or OSError for unusable options."""
    folder = resume or Path(config.out or f"runs/{config.preset}-{datetime.now():%Y-%m-%d-%H%M%S}")
    folder = layout.all_gather(folder)[0]  # each process has its own clock

    def first_process() -> Path | None:
        if resume is not None:
            return newest(folder / CHECKPOINTS)
        prepare(config, folder)
        return None

    path = layout.all_gather(layout.raise_together(lambda: first_process() if layout.is_main else None))[0]
    trainer = Trainer(config, folder, layout, path)
    if trainer.step >= config.steps:
        raise ValueError(f"steps must be more than the {trainer.step} that {folder} has; got {config.steps}")
    if layout.is_main:
        held_out = 0 if trainer.validation is None else len(trainer.validation)
        dtype = "bfloat16 autocast" if trainer.autocast else "float32"
        say(f"data: {len(trainer.train):,} tokens for training, {held_out:,} for validation")
        say(f"model: {trainer.sizes.parameters():,} parameters, context length {trainer.sizes.context_length:,}")
        place = layout.device.type if layout.device.type != "cpu" else f"cpu, threads: {torch.get_num_threads()}"
        say(f"in {folder}, from step {trainer.step}; processes: {layout.size}, device: {place}, {dtype}")
    return trainer


@contextlib.contextmanager
def stop_signals(layout: Layout) -> Iterator[Callable[[], int]]:
    """Record SIGINT and SIGTERM within the block; yields a function that returns the first one, or 0.

    A second one interrupts a single process. Several processes receive more than one, from the terminal and torchrun.
    """
    received: list[int] = []

    def handler(number: int, _: object) -> None:
        received.append(number)
        if len(received) > 1 and not layout.is_distributed:
            raise KeyboardInterrupt

    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received[0] if received else 0
    finally:
        for number, handler_before in previous.items():
            signal.signal(number, handler_before)


def say(text: str) -> None:
    """Print to standard error."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
