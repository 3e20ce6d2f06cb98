"""``--filter``: which of a sweep's cells a run measures, by their names."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import TypeVar

from benchmarks.suite_rows import HasKey

CellT = TypeVar("CellT", bound=HasKey)

HELP = "measure only cells in whose names, as --dry-run lists them, it is found"


def check_filter(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Make a pattern of --filter; end the program where it is none."""
    try:
        options.filter = None if options.filter is None else re.compile(options.filter)
    except re.error as error:
        parser.error(f"--filter must be a regular expression: {error}; got {options.filter!r}")


def chosen(cells: Sequence[CellT], pattern: re.Pattern[str] | None) -> list[CellT]:
    """The cells in whose names --filter's pattern is found; all without one."""
    return [cell for cell in cells if pattern is None or pattern.search(cell.key)]
