"""`python -m cs336_systems.training`: see `--help`."""

from __future__ import annotations

import dataclasses
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ..profiling import collect_environment
from ..profiling.memory import is_out_of_memory
from .estimate import DoesNotFitError, require_memory
from .loop import Ending, NotFiniteError, Trainer
from .options import Request, parse
from .prepare import CHECKPOINTS, CONFIG, Prepared, newest_checkpoint, prepare

IMPOSSIBLE, TOO_LARGE, NOT_FINITE = 2, 3, 4
SIGNALLED = 128
"""Added to a signal's number, as shells do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; the exit code."""
    try:
        request = parse(arguments)
        prepared = prepare(request.config)
        if request.dry_run:
            say(options_of(prepared))
        say(describe(prepared))
        if request.dry_run:
            return 0
        if not request.force:
            require_memory(prepared.memory(), prepared.device)
        trainer = begin(request, prepared)
    except DoesNotFitError as error:
        say(f"error: {error}")
        return TOO_LARGE
    except (ValueError, TypeError, OSError) as error:
        say(f"error: {error}")
        return IMPOSSIBLE
    try:
        ending = trainer.run()
    except NotFiniteError as error:
        say(f"error: {error}. Checkpoints of {request.folder / CHECKPOINTS} are of earlier steps, and are intact")
        return NOT_FINITE
    except KeyboardInterrupt:
        say(f"interrupted within a step; to go on from the last checkpoint:\n  {resume_command(request.folder)}")
        return SIGNALLED + signal.SIGINT
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        say(
            f"error: memory ran out on {prepared.device}: a smaller --micro-batch-size, --recompute-every 1 or "
            "--loss-chunk 4096 take less"
        )
        return TOO_LARGE
    return finish(ending, request.folder)


def begin(request: Request, prepared: Prepared) -> Trainer:
    """The run, in its folder.

    Raises:
        ValueError: a new run's folder has a run already, or a resumed one has no checkpoint or no step left.
    """
    folder = request.folder
    checkpoint = newest_checkpoint(folder) if request.resume else None
    if checkpoint is None and (folder / CONFIG).exists():
        raise ValueError(f"out must be a new folder; {folder} has a run already: --resume {folder} goes on with it")
    folder.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(prepared, folder, checkpoint)
    if trainer.step >= request.config.steps:
        raise ValueError(f"steps must be more than the {trainer.step} that {folder} has; got {request.config.steps}")
    request.config.save(folder / CONFIG)
    collect_environment(prepared.device).write(folder / "environment.json")
    say(f"in {folder}" if checkpoint is None else f"in {folder}, from step {trainer.step} on")
    return trainer


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
            f"on {prepared.device}, {'bfloat16 autocast' if prepared.autocast else 'float32'}; estimated memory",
            prepared.memory().table(),
        ]
    )


def finish(ending: Ending, folder: Path) -> int:
    """Say how it ended, and how to go on; the exit code."""
    if ending.signal is None:
        say(f"done after {ending.step} steps; the model is in {folder}")
        return 0
    name = signal.Signals(ending.signal).name
    say(f"stopped by {name} after step {ending.step}; to go on:\n  {resume_command(folder)}")
    return SIGNALLED + ending.signal


def resume_command(folder: Path) -> str:
    """What goes on with the run in a folder."""
    return shlex.join(["python", "-m", "cs336_systems.training", "--resume", str(folder)])


def say(text: str) -> None:
    """To people: results are in the run's folder, so nothing of this goes to standard output."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
