"""The command-line flags of all benchmarks. Each is defined once, here; a program names those that it has.

    parser = flags.make_parser(__doc__, "--lengths 1024 4096 --head-dims 64 --dtypes bf16 --batch --no-tf32")
    options = flags.parse(parser, arguments)

Flags that take several values take them separated by spaces or commas. Flags of one program alone are added to the
parser with ``add_argument``.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from cs336_systems.devices import choose_device
from cs336_systems.profiling.flops import PASSES as PASSES

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
MASKS = ("causal", "full")


def count(text: str, least: int = 0) -> int:
    """A whole number of at least ``least``. Raises argparse.ArgumentTypeError for anything else."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}; got {text!r}")
    return int(text)


def positive(text: str) -> int:
    """A whole number of at least 1. Raises argparse.ArgumentTypeError for anything else."""
    return count(text, 1)


def seconds(text: str) -> float:
    """A positive number of seconds. Raises argparse.ArgumentTypeError for anything else."""
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds; got {text!r}")
    return value


def milliseconds(text: str) -> float:
    """A number of milliseconds, 0 or more. Raises argparse.ArgumentTypeError for anything else."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of milliseconds, 0 or more; got {text!r}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def dtype(text: str) -> str:
    """The name of a dtype, with aliases resolved. Raises argparse.ArgumentTypeError for an unknown one."""
    return one_of(*DTYPES)(DTYPE_ALIASES.get(text, text))


def one_of(*names: str) -> Callable[[str], str]:
    """A converter that accepts the names. It raises argparse.ArgumentTypeError for any other."""

    def convert(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(names)}; got {text!r}")
        return text

    return convert


def pattern(text: str) -> re.Pattern[str]:
    """A compiled regular expression. Raises argparse.ArgumentTypeError for text that is none."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"expected a regular expression, but {error}; got {text!r}") from None


def folder(text: str) -> Path:
    """A folder that exists. Raises argparse.ArgumentTypeError otherwise."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder that exists; got {text!r}")
    return Path(text)


# Several values: the type of one, its metavar, and the help.
_SEVERAL: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "lengths": (positive, "N", "sequence lengths"),
    "head_dims": (positive, "D", "head dimensions"),
    "dtypes": (dtype, "TYPE", f"{', '.join(DTYPES)}, or {', '.join(DTYPE_ALIASES)}"),
    "masks": (one_of(*MASKS), "MASK", f"of {', '.join(MASKS)}"),
    "passes": (one_of(*PASSES), "PASS", f"of {', '.join(PASSES)}; both is one after the other"),
    "providers": (str, "NAME", "implementations to measure"),
    "features": (str, "NAME", "masks and score changes"),
    "kernels": (str, "NAME", "kernels to tune"),
    "models": (str, "NAME", "model sizes"),
    "modes": (str, "MODE", "what of a model is measured"),
    "batches": (positive, "B", "batch sizes, in sequences"),
    "batching": (str, "HOW", "how sequences make a batch"),
    "compile": (str, "HOW", "what torch.compile compiles"),
    "warmup_steps": (count, "N", "steps before those that are timed"),
}
# One value.
_SINGLE: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "preset": (str, "NAME", "a named set of defaults for the other flags"),
    "suite": (str, "NAME", "the year of the course that model sizes belong to"),
    "batch": (positive, "B", "sequences in a batch"),
    "tokens": (positive, "N", "tokens in a batch: batch = tokens / length"),
    "channels": (positive, "N", "channels of a query: heads = channels / head dimension"),
    "heads": (count, "H", "query heads; 0: tensors without a head axis"),
    "kv_heads": (positive, "H", "key and value heads (default: as many as query heads)"),
    "v_head_dim": (positive, "D", "head dimension of v (default: as that of q and k)"),
    "layers": (positive, "N", "layers of a model"),
    "steps": (positive, "N", "timed steps"),
    "most_steps": (
        positive,
        "N",
        "at most this many steps, until the median is known within 2 %% (default: five times --steps on a GPU)",
    ),
    "rounds": (positive, "N", "rounds, in each of which every provider is measured once"),
    "most_rounds": (
        positive,
        "N",
        "at most this many rounds, until every median is known within 2 %% (default: 25 on a GPU)",
    ),
    "warmup": (milliseconds, "MS", "milliseconds of calls before each measurement"),
    "rep": (milliseconds, "MS", "milliseconds of timed calls in each measurement"),
    "max_seconds": (seconds, "S", "skip what takes longer than this in a single call"),
    "jobs": (count, "N", "processes that compile at the same time"),
    "peers": (folder, "FOLDER", "where other libraries were installed with `pip install --target FOLDER`"),
}
_SWITCHES = {"tf32": "let float32 products use TF32"}


def make_parser(description: str | None, usual: str, *, timeout: float = 600.0) -> argparse.ArgumentParser:
    """A parser with the flags of a program, and with those of every program.

    Args:
        description: the program's docstring, shown by --help.
        usual: a command line with all flags of the program, whose values are the defaults; None without a value.
        timeout: the default of --timeout.

    Raises:
        KeyError: there is no such flag.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, *words in (part.split() for part in usual.split("--")[1:]):
        name, default = flag.replace("-", "_"), None
        if name.removeprefix("no_") in _SWITCHES:
            how: dict[str, Any] = {
                "action": argparse.BooleanOptionalAction,
                "help": _SWITCHES[name.removeprefix("no_")],
            }
            parser.add_argument(f"--{flag.removeprefix('no-')}", default=name in _SWITCHES, **how)
            continue
        convert, metavar, text = (_SEVERAL if name in _SEVERAL else _SINGLE)[name]
        if words:
            values = [convert(word) for word in words]
            text += f" (default: {' '.join(map(str, values))})"
            default = values if name in _SEVERAL else values[0]
        how = several(convert) if name in _SEVERAL else {"type": convert}
        parser.add_argument(f"--{flag}", default=default, metavar=metavar, help=text, **how)
    _add_run_flags(parser, timeout)
    return parser


def several(convert: Callable[[str], Any]) -> dict[str, Any]:
    """Arguments of ``add_argument`` for a flag of several values, which spaces or commas separate."""
    return {"nargs": "+", "action": functools.partial(_Several, convert)}


class _Several(argparse.Action):
    """Values separated by spaces or commas, as one list without repetitions."""

    def __init__(self, convert: Callable[[str], Any], option_strings: Sequence[str], dest: str, **how: Any) -> None:
        super().__init__(option_strings, dest, **how)
        self._convert = convert

    def __call__(
        self, parser: argparse.ArgumentParser, options: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        try:
            found = list(dict.fromkeys(self._convert(word) for text in values for word in text.split(",") if word))
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        if not found:
            parser.error(f"{option} must have at least one value")
        setattr(options, self.dest, found)


def _add_run_flags(parser: argparse.ArgumentParser, timeout: float) -> None:
    add = parser.add_argument_group("every benchmark").add_argument
    add("--device", default="auto", help="cuda, cuda:1, mps or cpu (default: a GPU if there is one)")
    add("--seed", type=count, default=0, metavar="N", help="seed of random inputs (default: %(default)s)")
    add("--timeout", type=seconds, default=timeout, metavar="S", help="seconds for one case (default: %(default)g)")
    add("--out", type=Path, metavar="FOLDER", help="folder of the results (default: results/PROGRAM/DEVICE-DATE)")
    add(
        "--visits",
        type=positive,
        default=1,
        metavar="N",
        help="how many times all cases are measured (default: %(default)s)",
    )
    add("--resume", action="store_true", help="continue in --out FOLDER: skip the cases that have rows there")
    add("--filter", type=pattern, metavar="REGEX", help="only cases whose name, as --dry-run lists it, matches")
    add("--dry-run", action="store_true", help="list the cases and measure nothing")
    add("--plots", action=argparse.BooleanOptionalAction, default=True, help="draw plots (default: yes)")
    add("--redraw", type=folder, metavar="FOLDER", help="draw the plots of this folder's results.csv again, then stop")
    add("--commit", metavar="HASH", help="the commit to record if the checkout is not a git repository")


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options: several values as one list without repetitions, and ``device`` as a torch.device.

    Ends the program with a message and status 2 if the arguments are invalid.
    """
    options = parser.parse_args(arguments)
    try:
        options.device = choose_device(options.device)
    except ValueError as error:
        parser.error(f"--{error}")
    if options.resume and options.out is None:
        parser.error("--resume needs the folder to continue in: --out FOLDER")
    return options


def restrict(parser: argparse.ArgumentParser, options: argparse.Namespace, **known: Collection[Any]) -> None:
    """End the program with a message if a flag has a value that is not among the known ones.

    Flags that the program does not have, or that were not given, are passed over.
    """
    for name, values in known.items():
        given = getattr(options, name, None)
        each = given if isinstance(given, list) else [] if given is None else [given]
        if unknown := [str(value) for value in each if value not in values]:
            flag = name.replace("_", "-")
            parser.error(f"--{flag} must be of {', '.join(map(str, values))}; got {', '.join(unknown)}")


def wants_gpu(arguments: Sequence[str] | None = None) -> bool:
    """Whether --device names a CUDA GPU, or is auto and there is one: defaults of other flags may depend on it.

    Arguments are as argparse takes them: None means those of the command line.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", default="auto")
    device: str = parser.parse_known_args(arguments)[0].device
    return torch.cuda.is_available() if device == "auto" else device.startswith("cuda")
