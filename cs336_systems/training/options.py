"""The command line and the TOML file: flags and keys, both named as the fields of `TrainingConfig`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from .config import LOGGERS, TrainingConfig, check_names, field_types
from .prepare import read_config

_PROGRAM = "python -m cs336_systems.training"

_DESCRIPTION = """\
Train a Transformer on text files: the loss falls, samples come out on the way, and a run that is interrupted, by
Ctrl-C, by SIGTERM or by a power cut, goes on from its last checkpoint as if nothing had happened.

Everything goes into the run's folder: config.json, metrics.jsonl, loss.png and checkpoints/.
"""

_EXAMPLES = """\
examples:
  python -m cs336_systems.training --data README.md docs/*.md
      a model of a million parameters, on this library's own documentation: minutes on a laptop
  python -m cs336_systems.training --data my-text --preset small --context-length 1024 --batch-size 64 \\
      --micro-batch-size 16 --learning-rate 6e-4 --steps 20000 --warmup-steps 500 --compile
      a larger one, on a GPU
  torchrun --nproc-per-node 8 -m cs336_systems.training --data my-text --preset large --parallel fsdp
      on several GPUs: docs/scaling.md
  python -m cs336_systems.training --data my-text --preset large --dry-run
      the options, the number of parameters and the memory it takes, and nothing else
  python -m cs336_systems.training --config run.toml --steps 1000
      options from a file; flags win
  python -m cs336_systems.training --resume runs/tiny-2026-01-31-120000
      go on with an interrupted run

exit codes: 0 done, 2 not possible as asked, 3 too little memory, 4 the loss is not finite, 5 a file could not be
written, 130 and 143 stopped by Ctrl-C and SIGTERM, after a checkpoint
"""


_METAVARS = {"files": "PATTERN", "tokenizer": "FILE", "tokens": "FOLDER", "out": "FOLDER", "sample_prompt": "TEXT"}


@dataclass(frozen=True)
class Request:
    """What the command line asks for.

    Attributes:
        config: the options of the run.
        folder: of the run.
        resume: whether the run is there already.
        dry_run: whether to say only what would be done.
        force: whether to go on where memory is estimated not to suffice.
    """

    config: TrainingConfig
    folder: Path
    resume: bool
    dry_run: bool
    force: bool


def build_parser() -> argparse.ArgumentParser:
    """A flag for each field of `TrainingConfig`, without a default: what is not given comes from elsewhere."""
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        usage=f"{_PROGRAM} --data PATH [PATH ...] [options]\n       {_PROGRAM} --resume FOLDER [options]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    run = parser.add_argument_group("the run")
    run.add_argument("--config", type=Path, metavar="FILE", help="a TOML file with options, named as these flags")
    run.add_argument("--resume", type=Path, metavar="FOLDER", help="go on with the run in this folder")
    run.add_argument("--dry-run", action="store_true", help="print options, size and memory, then stop")
    run.add_argument("--force", action="store_true", help="go on even if memory is estimated not to suffice")
    groups: dict[str, Any] = {}
    kinds = field_types()
    for field in dataclasses.fields(TrainingConfig):
        name = field.metadata["group"]
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        flag = "--" + field.name.replace("_", "-")
        text = field.metadata["help"].replace("%", "%%")
        if field.default not in (None, (), "", "auto"):
            text += f" (default: {str(field.default).lower() if isinstance(field.default, bool) else field.default})"
        groups[name].add_argument(flag, help=text, **_how(field.name, kinds[field.name]))
    return parser


def _how(name: str, kind: Any) -> dict[str, Any]:
    """How argparse reads a value of this type."""
    if typing.get_origin(kind) is types.UnionType:
        kind = typing.get_args(kind)[0]
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(kind) is tuple:
        return {"nargs": "+", "metavar": "NAME" if name == "log_to" else "PATH"} | (
            {"choices": LOGGERS} if name == "log_to" else {}
        )
    return {"type": kind, "metavar": _METAVARS.get(name) or {int: "N", float: "X", str: "NAME"}[kind]}


def parse(arguments: Sequence[str] | None = None) -> Request:
    """What the command line asks for.

    Raises:
        ValueError, TypeError: an option is unknown, out of range, or cannot be changed in a resumed run.
    """
    given = vars(build_parser().parse_args(arguments))
    file, resume = given.pop("config", None), given.pop("resume", None)
    how = {"dry_run": given.pop("dry_run", False), "force": given.pop("force", False)}
    options = ({} if file is None else read_toml(file)) | given
    if resume is not None:
        return Request(resumed(read_config(resume), options), resume, resume=True, **how)
    config = TrainingConfig(**options)
    folder = Path(config.out or f"runs/{config.preset}-{datetime.now():%Y-%m-%d-%H%M%S}")
    return Request(config, folder, resume=False, **how)


def resumed(config: TrainingConfig, changes: dict[str, Any]) -> TrainingConfig:
    """The options of a run that goes on with some changed.

    Raises:
        ValueError: a changed option is one that the run was begun with for good.
    """
    new = dataclasses.replace(config, **changes)
    for field in dataclasses.fields(config):
        before, after = getattr(config, field.name), getattr(new, field.name)
        if before != after and not field.metadata["on_resume"]:
            raise ValueError(f"{field.name} must stay {before!r} in a resumed run; got {after!r}")
    return new


def read_toml(path: Path) -> dict[str, Any]:
    """The options in a TOML file, by field; keys may have hyphens, as the flags do.

    Raises:
        ValueError: there is no such file, it cannot be read, it is no TOML, or a key is no option.
    """
    try:
        toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError:
        raise ValueError("--config needs Python 3.11, or the package tomli: pip install tomli") from None
    try:
        read = toml.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"--config must be a TOML file; {path} does not exist") from None
    except OSError as error:
        raise ValueError(f"--config must be a TOML file that can be read: {error}") from None
    except (toml.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--config must be a TOML file; {path} is none: {error}") from None
    values = {name.replace("-", "_"): value for name, value in read.items()}
    check_names(values, str(path))
    return values
