"""The command line of the attention benchmark: from arguments to a configuration and to what is done with it."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention_presets import DTYPE_ALIASES, DTYPES, PRESET_NOTES, PRESETS, SweepConfiguration
from benchmarks.attention_providers import all_providers
from benchmarks.cell_filter import HELP, check_filter
from cs336_systems.profiling.flops import PASSES
from cs336_systems.profiling.sweep import read_configuration

_DESCRIPTION = """\
Measure attention over lengths and head dimensions: the time of the forward pass, of the backward pass and of both, the
memory held for the backward pass and the peak, for every implementation of this library, for torch's backends, and for
other libraries where they are installed. All are measured in the same run, interleaved, and compared with `naive`.

Results go to a folder: results.csv (a row for each cell, implementation and pass), tables.md, rows.md, plots as PNG,
and environment.json. Interrupt at any time with Ctrl-C; the same command with --resume FOLDER measures what is missing.
"""

_EXAMPLES = """\
examples:
  python benchmarks/attention.py
      the default sweep: `quick` on a GPU, `cpu` without one
  python benchmarks/attention.py --preset paper --impl flash torch --output results/paper
      our flash attention against torch's kernels, in the sweep of the FlashAttention papers
  python benchmarks/attention.py --lengths 1024 4096 --dims 64 --dtype bf16 fp32 --batch 4 --heads 16 --causal
      a sweep of one's own; what is not given comes from the preset
  python benchmarks/attention.py --preset course --dry-run
      list what would be measured, and nothing else
  python benchmarks/attention.py --resume results/attention/nvidia-h200-2026-01-31-120000
      go on with an interrupted sweep
"""


@dataclass(frozen=True)
class RunOptions:
    """What is done with a configuration, and where: none of this changes what is measured."""

    device: torch.device
    folder: Path | None
    dry_run: bool
    plots: bool
    commit: str | None
    peers: Path | None = None
    redraw: Path | None = None
    filter: re.Pattern[str] | None = None


def _epilog() -> str:
    presets = [f"  {name:15}{note}" for name, note in PRESET_NOTES.items()]
    members: dict[str, list[str]] = {}
    for provider in all_providers(torch.device("cpu")):
        members.setdefault(provider.group, []).append(provider.name)
    groups = [f"  {group:15}{', '.join(names)}" for group, names in members.items()]
    return "\n".join(["presets:", *presets, "", "implementations, by group:", *groups, "", _EXAMPLES])


def build_parser() -> argparse.ArgumentParser:
    """The parser, without defaults: what is not given comes from the preset or from the folder that is resumed."""
    parser = argparse.ArgumentParser(
        prog="attention.py",
        description=_DESCRIPTION,
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what to sweep", "each replaces what the preset says")
    what.add_argument("--preset", choices=PRESETS, metavar="NAME", help="one of those below")
    what.add_argument("--lengths", nargs="+", type=_integers, metavar="N", help="sequence lengths")
    what.add_argument("--dims", nargs="+", type=_integers, metavar="D", help="head dimensions")
    what.add_argument(
        "--dtype", nargs="+", type=_dtypes, metavar="TYPE", help=f"{', '.join(DTYPES)}, or {', '.join(DTYPE_ALIASES)}"
    )
    what.add_argument("--causal", action="store_true", help="causal masks; with --full: both")
    what.add_argument("--full", action="store_true", help="no mask; with --causal: both")
    what.add_argument("--passes", nargs="+", choices=PASSES, metavar="PASS", help=f"of {', '.join(PASSES)}")
    what.add_argument(
        "--impl",
        nargs="+",
        type=_words,
        metavar="NAME",
        help="implementations or groups of those below (default: all)",
    )
    shape = parser.add_argument_group("the shape of a problem")
    shape.add_argument("--batch", type=int, metavar="B", help="sequences, in place of the preset's tokens / length")
    shape.add_argument("--heads", type=int, metavar="H", help="query heads; 0: no head axis")
    shape.add_argument("--kv-heads", type=int, metavar="H", help="key and value heads (default: as query heads)")
    how = parser.add_argument_group("how to measure")
    how.add_argument("--device", type=torch.device, help="`cuda`, `cuda:1`, `cpu` (default: a GPU where there is one)")
    how.add_argument("--rounds", type=int, metavar="N", help="rounds for the median (default: 5)")
    how.add_argument(
        "--max-seconds", type=float, metavar="S", help="skip what takes longer than this in a single call (default: 1)"
    )
    how.add_argument("--seed", type=int, help="seed of the random inputs (default: 0)")
    how.add_argument("--tf32", action="store_true", default=None, help="let float32 products use TF32")
    how.add_argument(
        "--peers",
        type=Path,
        metavar="FOLDER",
        help="where other libraries were installed with `pip install --target FOLDER`, if not into this environment",
    )
    where = parser.add_argument_group("results")
    where.add_argument("--output", type=Path, metavar="FOLDER", help="default: results/attention/<device>-<date>")
    where.add_argument("--resume", type=Path, metavar="FOLDER", help="go on with the sweep in this folder, as it was")
    where.add_argument("--filter", metavar="REGEX", help=HELP)
    where.add_argument("--dry-run", action="store_true", help="list the cells and who would be measured, then stop")
    where.add_argument("--no-plots", action="store_true", help="tables only")
    where.add_argument(
        "--redraw", type=Path, metavar="FOLDER", help="draw the plots of this folder's results.csv again, then stop"
    )
    where.add_argument("--commit", help="the commit to record where the checkout is not in a git repository")
    return parser


def parse(arguments: Sequence[str] | None = None) -> tuple[SweepConfiguration, RunOptions]:
    """What the command line asks for. Ends the program with a message for what cannot be done."""
    parser = build_parser()
    given = parser.parse_args(arguments)
    check_filter(parser, given)
    if given.resume is not None and given.output is not None and given.resume != given.output:
        parser.error("--resume and --output name different folders; --resume alone is enough")
    if given.peers is not None and not given.peers.is_dir():
        parser.error(f"--peers must be a folder; got {given.peers}")
    if given.redraw is not None and not (given.redraw / "results.csv").exists():
        parser.error(f"--redraw must be a folder with a results.csv; got {given.redraw}")
    device = given.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {device}: torch finds no CUDA device")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    try:
        configuration = _configuration(given, device)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    options = RunOptions(
        device=device,
        folder=given.resume or given.output,
        dry_run=given.dry_run,
        plots=not given.no_plots,
        commit=given.commit,
        peers=given.peers,
        redraw=given.redraw,
        filter=given.filter,
    )
    return configuration, options


def _configuration(given: argparse.Namespace, device: torch.device) -> SweepConfiguration:
    changes = _changes(given)
    if given.resume is not None:
        stored = SweepConfiguration.from_dict(read_configuration(given.resume))
        if given.preset is not None:
            changes["preset"] = given.preset
        return dataclasses.replace(stored, **changes)
    preset = given.preset or ("quick" if device.type == "cuda" else "cpu")
    return dataclasses.replace(PRESETS[preset], **changes)


def _changes(given: argparse.Namespace) -> dict[str, Any]:
    """The fields of the configuration that the command line sets."""
    changes: dict[str, Any] = {}
    for field, values in (
        ("lengths", given.lengths),
        ("dims", given.dims),
        ("dtypes", given.dtype),
        ("implementations", given.impl),
    ):
        if values is not None:
            changes[field] = tuple(dict.fromkeys(itertools.chain.from_iterable(values)))
    if given.causal or given.full:
        changes["masks"] = ("causal",) * given.causal + ("full",) * given.full
    if given.passes is not None:
        changes["passes"] = tuple(which for which in PASSES if which in given.passes)
    if given.batch is not None:
        changes.update(batch=given.batch, tokens=None)
    if given.heads is not None:
        changes.update(heads=given.heads, channels=None)
    for field in ("kv_heads", "rounds", "max_seconds", "seed", "tf32"):
        if getattr(given, field) is not None:
            changes[field] = getattr(given, field)
    return changes


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _integers(text: str) -> list[int]:
    try:
        return [int(word) for word in _words(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers, separated by spaces or commas; got {text!r}") from None


def _dtypes(text: str) -> list[str]:
    names = [DTYPE_ALIASES.get(word, word) for word in _words(text)]
    for name in names:
        if name not in DTYPES:
            known = ", ".join([*DTYPES, *DTYPE_ALIASES])
            raise argparse.ArgumentTypeError(f"expected one of {known}; got {name!r}")
    return names
