"""`python -m cs336_systems.training`: see `--help`."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from ..devices import choose_device
from ..parallel import Layout, is_main_process, start
from ..profiling import collect_environment
from ..profiling.memory import is_out_of_memory
from .checkpoint import Checkpoint
from .estimate import DoesNotFitError, require_memory
from .loop import Trainer
from .options import Request, parse
from .prepare import CHECKPOINTS, CONFIG, Prepared, newest_checkpoint, prepare
from .stopping import Ending, NotFiniteError

IMPOSSIBLE, TOO_LARGE, NOT_FINITE, NOT_WRITTEN = 2, 3, 4, 5
SIGNALLED = 128
"""Added to a signal's number, as shells do."""

HEAD_START = 2.0
"""Seconds. torchrun ends all processes when one fails: the first, which says why, is to be done with that by then."""

T = TypeVar("T")


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; the exit code."""
    with contextlib.ExitStack() as stack:
        try:
            request = parse(arguments)
            options = request.config
            layout = stack.enter_context(start(options.parallel, choose_device(options.device), options.context_size))
        except (ValueError, TypeError, OSError) as error:
            say(f"error: {error}")
            return IMPOSSIBLE
        try:
            return train(request, layout)
        except StoppedError as stopped:
            say(f"error: {stopped}")
            return stopped.code


def train(request: Request, layout: Layout) -> int:
    """The same, as one of the processes of a layout.

    Raises:
        StoppedError: it cannot begin.
    """
    prepared = together(layout, lambda: ready(request, layout))
    if request.dry_run:
        return 0
    # Every process has a clock of its own.
    request = dataclasses.replace(request, folder=layout.gathered(request.folder)[0])
    # The first process alone reads checkpoints to their ends.
    claimed = together(layout, lambda: claim(request) if layout.is_main else None)
    checkpoint = layout.gathered(claimed)[0]
    trainer = begin(request, prepared, checkpoint)
    try:
        ending = trainer.run(lambda: record(request, prepared))
    except NotFiniteError as error:
        say(f"error: {error}. Checkpoints of {request.folder / CHECKPOINTS} are of earlier steps, and are intact")
        return NOT_FINITE
    except OSError as error:
        complain(f"{error}; the checkpoints of {request.folder / CHECKPOINTS} are intact")
        return NOT_WRITTEN
    except KeyboardInterrupt:
        again = resume_command(request.folder, layout)
        say(f"interrupted within a step; to go on from the last checkpoint:\n  {again}")
        return SIGNALLED + signal.SIGINT
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        complain(
            f"memory ran out on {prepared.device}: a smaller --micro-batch-size, --recompute-every 1 or "
            "--loss-chunk 4096 take less"
        )
        return TOO_LARGE
    return finish(ending, request.folder, layout)


class StoppedError(Exception):
    """A run cannot begin, for a reason that one process found; `code` is the exit code."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code


def together(layout: Layout, step: Callable[[], T]) -> T:
    """What a step returns; raises StoppedError in every process where it fails in one."""
    try:
        return layout.together(step)
    except DoesNotFitError as error:
        raise StoppedError(str(error), TOO_LARGE) from error
    except (ValueError, TypeError, OSError) as error:
        raise StoppedError(str(error), IMPOSSIBLE) from error


def ready(request: Request, layout: Layout) -> Prepared:
    """What the run needs, said to people; it fits into memory, or that was not asked for."""
    prepared = prepare(request.config, layout)
    if request.dry_run:
        say(options_of(prepared))
    say(describe(prepared))
    if not (request.dry_run or request.force):
        require_memory(prepared.memory(), prepared.device)
    return prepared


def claim(request: Request) -> Checkpoint | None:
    """The checkpoint that the run begins from, if it does.

    Raises:
        ValueError: a new run's folder has a run already, or a resumed one has no checkpoint or no step left.
    """
    folder = request.folder
    if not request.resume:
        if (folder / CONFIG).exists() or (folder / CHECKPOINTS).exists():
            raise ValueError(f"out must be a new folder; {folder} has a run already: --resume {folder} goes on with it")
        return None
    checkpoint = newest_checkpoint(folder)
    step = checkpoint.progress.step
    if step >= request.config.steps:
        raise ValueError(f"steps must be more than the {step} that {folder} has; got {request.config.steps}")
    return checkpoint


def begin(request: Request, prepared: Prepared, checkpoint: Checkpoint | None) -> Trainer:
    """The run, in its folder. Raises StoppedError when the checkpoint is of another model or other data."""
    folder = request.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trainer = Trainer(prepared, folder, checkpoint)
    except (ValueError, TypeError, OSError) as error:
        raise StoppedError(str(error), IMPOSSIBLE) from error
    say(f"in {folder}" if checkpoint is None else f"in {folder}, from step {trainer.step} on")
    return trainer


def record(request: Request, prepared: Prepared) -> None:
    """Write the options into the run's folder, where they take the place of those that it had."""
    if prepared.layout.is_main:
        collect_environment(prepared.device).write(request.folder / "environment.json")
        request.config.save(request.folder / CONFIG)


def options_of(prepared: Prepared) -> str:
    """A line for each option that is set."""
    given = dataclasses.asdict(prepared.config).items()
    return "\n".join(["options", *(f"  {name:18}{value!r}" for name, value in given if value not in (None, (), ""))])


def describe(prepared: Prepared) -> str:
    """Data, size and memory, for people."""
    model, config = prepared.model, prepared.config
    tokens = config.batch_size * model.context_length
    windows = prepared.windows()
    return "\n".join(
        [
            f"data: {prepared.about}",
            f"model: {model.parameters():,} parameters, {model.vocab_size:,} tokens, context {model.context_length:,}",
            f"steps: {config.steps:,} of {tokens:,} tokens, {config.steps * config.batch_size / windows.count:.1f} "
            "times through the text",
            f"on {places(prepared.layout)}, {'bfloat16 autocast' if prepared.autocast else 'float32'}; "
            f"estimated memory{'' if prepared.layout.is_alone else ' of each'}",
            prepared.memory().table(),
        ]
    )


def places(layout: Layout) -> str:
    """Where a run computes, for people."""
    if layout.is_alone:
        return str(layout.device)
    shared = f", {layout.context_size} to a sequence" if layout.context_size > 1 else ""
    return f"{layout.size} processes ({layout.mode}{shared}), the first on {layout.device}"


def finish(ending: Ending, folder: Path, layout: Layout) -> int:
    """Say how it ended, and how to go on; the exit code."""
    if ending.signal is None:
        say(f"done after {ending.step} steps; the model is in {folder}")
        return 0
    name = signal.Signals(ending.signal).name
    say(f"stopped by {name} after step {ending.step}; to go on:\n  {resume_command(folder, layout)}")
    return SIGNALLED + ending.signal


def resume_command(folder: Path, layout: Layout) -> str:
    """What goes on with the run in a folder, on one machine as this run is if there are several processes."""
    program = ["python"] if layout.is_alone else ["torchrun", "--nproc-per-node", str(layout.size)]
    return shlex.join([*program, "-m", "cs336_systems.training", "--resume", str(folder)])


def say(text: str) -> None:
    """To people, by the first process: results are in the run's folder, so nothing of this goes to standard output."""
    if is_main_process():
        print(text, file=sys.stderr, flush=True)


def complain(text: str) -> None:
    """Of one process: where there are others, torchrun ends them."""
    print(f"error: {text}", file=sys.stderr, flush=True)


def program() -> int:
    """`main`, of a process that torchrun may have started."""
    code = main()
    if code and not is_main_process():
        time.sleep(HEAD_START)
    return code


if __name__ == "__main__":
    sys.exit(program())
