"""What the benchmarks of training have in common: options for models, and for how steps are timed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.suite import positive
from benchmarks.training_models import names_of
from cs336_systems.transformer import PRESETS
from cs336_systems.transformer.presets import VOCAB_SIZE

TOKENS = 16384
"""Of a step, on one process, unless something else is asked for."""


def add_model_options(parser: argparse.ArgumentParser, presets: Sequence[str], contexts: Sequence[int]) -> None:
    """Which models, and with how much work."""
    add = parser.add_argument
    add("--preset", nargs="+", default=[*presets], metavar="NAME", help="default: %(default)s")
    add("--suite", default="2025", choices=PRESETS, help="that presets belong to (default: %(default)s)")
    add("--vocab-size", type=positive, default=VOCAB_SIZE, metavar="N", help="default: %(default)s")
    add("--context", nargs="+", type=positive, default=[*contexts], metavar="N", help="default: %(default)s")


def add_timing_options(parser: argparse.ArgumentParser) -> None:
    """How steps are timed."""
    add = parser.add_argument
    add("--steps", type=positive, default=10, metavar="N", help="that are timed (default: %(default)s)")
    add("--warmup", type=positive, default=3, metavar="N", help="before them; the first compiles (%(default)s)")
    add("--no-tf32", dest="tf32", action="store_false", help="keep products of float32 from TF32")


def check_presets(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the program where a preset is none of the suite's."""
    for name in options.preset:
        if name not in names_of(options.suite):
            known = ", ".join(names_of(options.suite))
            parser.error(f"--preset must be one of {known} with --suite {options.suite}; got {name}")


def timing_configuration(options: argparse.Namespace) -> dict[str, Any]:
    """What rows of steps must have in common to stand in one table."""
    return {"steps": options.steps, "warmup": options.warmup, "tf32": options.tf32, "seed": options.seed}
