"""Progress of a sweep: one line that is rewritten on a terminal, one line for each finished cell elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO


def readable_seconds(seconds: float) -> str:
    """A duration for people: `8 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class Progress:
    """Tells how far a sweep of `total` cells is, on `stream` (default: standard error)."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total = total
        self._finished = 0
        self._stream = sys.stderr if stream is None else stream
        self._rewrites = self._stream.isatty()
        self._start = time.monotonic()
        self._cell = ""

    def start_cell(self, name: str) -> None:
        """A new cell begins."""
        self._cell = name
        self.step("")

    def step(self, what: str) -> None:
        """What is being done in the cell; shown on a terminal only."""
        if self._rewrites:
            self._rewrite(f"[{self._finished + 1}/{self._total}] {self._cell}  {what}  {self._elapsed()}")

    def finish_cell(self, summary: str) -> None:
        """The cell is done."""
        self._finished += 1
        self.note(f"[{self._finished}/{self._total}] {self._cell}: {summary}  ({self._elapsed()})")

    def keep_cell(self) -> None:
        """A cell is left as it is, because an earlier run finished it."""
        self._finished += 1

    def reach(self, finished: int) -> None:
        """So many cells are done, by a count that is kept elsewhere."""
        self._finished = finished

    def note(self, text: str) -> None:
        """A line that stays."""
        if self._rewrites:
            self._rewrite("")
        print(text, file=self._stream, flush=True)

    def _elapsed(self) -> str:
        return readable_seconds(time.monotonic() - self._start)

    def _rewrite(self, text: str) -> None:
        # One column less than there are: a full line would move the cursor to the next one.
        width = max(20, shutil.get_terminal_size().columns) - 1
        print("\r" + text[:width].ljust(width), end="\r", file=self._stream, flush=True)
