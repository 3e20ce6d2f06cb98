"""The rows of a benchmark: their statuses, and a folder that keeps them and never loses one.

`journal.jsonl` is the store, with one line for each case, appended and synchronised to disk when the case is measured.
`results.csv` holds the same rows and is written again after each case.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pandas as pd

from cs336_systems.files import write_text
from cs336_systems.profiling.memory import MIB, is_out_of_memory

Row = dict[str, Any]
"""One line of results.csv: JSON values by column."""

JOURNAL, SETTINGS, CSV, JSON = "journal.jsonl", "settings.json", "results.csv", "results.json"
LOCK = ".lock"
_LONGEST_REASON = 300


class Status(str, Enum):
    """How a measurement ended."""

    OK = "ok"
    OUT_OF_MEMORY = "oom"
    ERROR = "error"
    UNSUPPORTED = "unsupported"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Outcome:
    """A status and, unless it is `Status.OK`, its reason."""

    status: Status = Status.OK
    reason: str = ""

    @property
    def columns(self) -> Row:
        """The columns `status` and `reason` of a row."""
        return {"status": self.status.value, "reason": self.reason}


def error(reason: str) -> Outcome:
    """The outcome `Status.ERROR`, its reason on one line of at most 300 characters."""
    return Outcome(Status.ERROR, _shortened(reason))


def outcome_of(exception: Exception, *, refusals: tuple[type[Exception], ...] = (NotImplementedError,)) -> Outcome:
    """The outcome of a call that raised: `oom`, `unsupported` for an exception of ``refusals``, otherwise `error`.

    The reason of an error names the file and line that raised it.
    """
    text = _shortened(str(exception) or "no message")
    if is_out_of_memory(exception):
        return Outcome(Status.OUT_OF_MEMORY, text)
    if isinstance(exception, refusals):
        return Outcome(Status.UNSUPPORTED, text)
    frames = list(traceback.walk_tb(exception.__traceback__))
    where = f" ({os.path.basename(frames[-1][0].f_code.co_filename)}:{frames[-1][1]})" if frames else ""
    return Outcome(Status.ERROR, f"{type(exception).__name__}: {text}{where}")


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_REASON else line[: _LONGEST_REASON - 1] + "…"


def mebibytes(**sizes: int | None) -> Row:
    """Columns in MiB, from bytes; None stays None."""
    return {name: None if size is None else size / MIB for name, size in sizes.items()}


class RowStore:
    """The rows of one benchmark in one folder.

    Args:
        folder: created if missing.
        settings: what rows must have in common to be comparable, as JSON values by name.
        resume: continue with the rows that the folder has.

    Raises:
        ValueError: the folder has rows and ``resume`` is false, its rows have other settings, or another process
            writes into it.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, resume: bool) -> None:
        self.folder = folder
        if not resume and any((folder / name).exists() for name in (JOURNAL, CSV)):
            raise ValueError(f"{folder} has rows already: add --resume to continue, or choose another --out")
        if resume and (folder / CSV).exists() and not (folder / JOURNAL).exists():
            raise ValueError(f"{folder} has a {CSV} but no {JOURNAL} to continue: choose another --out")
        _lock(folder)
        _check_settings(folder, json.loads(json.dumps(settings, default=str)))
        self._cases = _read_journal(folder / JOURNAL)

    @property
    def rows(self) -> list[Row]:
        """All rows, in the order in which their cases were measured."""
        return [row for rows in self._cases.values() for row in rows]

    def __contains__(self, case: str) -> bool:
        """Whether the case of this name has rows."""
        return case in self._cases

    def __getitem__(self, case: str) -> list[Row]:
        """The rows of a case. Raises KeyError if it has none."""
        return self._cases[case]

    def append(self, case: str, rows: Sequence[Row]) -> None:
        """Store the rows of a case; they are on disk when this returns.

        Raises ValueError if the case has rows already, or a value is NaN, infinite, or no JSON value.
        """
        if case in self._cases:
            raise ValueError(f"case must not have rows already; got {case!r} again")
        self.replace(case, rows)

    def replace(self, case: str, rows: Sequence[Row]) -> None:
        """`append`, in place of the rows that the case may have: of two lines of a case the last one counts."""
        line = json.dumps({"case": case, "rows": list(rows)}, allow_nan=False)
        with (self.folder / JOURNAL).open("a", encoding="utf-8") as journal:
            journal.write(line + "\n")
            journal.flush()
            os.fsync(journal.fileno())
        self._cases[case] = list(rows)
        write_csv(self.folder / CSV, self.rows)


def _lock(folder: Path) -> None:
    """Let no other process write into the folder until this one ends. Raises ValueError if another does."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # on Windows, where two runs in one folder go unnoticed
        return
    # It stays open: closing any descriptor of the file would unlock it.
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        other = os.read(file, 20).decode()
        os.close(file)
        raise ValueError(f"{folder} is written by process {other}: wait for it, or stop it") from None
    os.truncate(file, 0)
    os.write(file, str(os.getpid()).encode())


def _check_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Raise ValueError if the folder has rows of other settings; store the settings if it has no rows."""
    path = folder / SETTINGS
    if not (folder / JOURNAL).exists():
        write_text(path, json.dumps(settings, indent=2) + "\n")
        return
    if not path.exists():
        raise ValueError(f"{folder} has a {JOURNAL} but no {SETTINGS}: choose another --out")
    stored, missing = json.loads(path.read_text()), "nothing"
    pairs = {name: (stored.get(name, missing), settings.get(name, missing)) for name in sorted({*stored, *settings})}
    differences = [f"{name} was {old!r} and is now {new!r}" for name, (old, new) in pairs.items() if old != new]
    if differences:
        raise ValueError(f"{folder} has rows of other settings: {'; '.join(differences)}. Choose another --out")


def _read_journal(path: Path) -> dict[str, list[Row]]:
    """The rows of each case. A last line that a crash cut off is removed from the file: its case has no rows."""
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    whole, newline, _ = text.rpartition("\n")
    if whole + newline != text:
        write_text(path, whole + newline)
    entries = [json.loads(line) for line in whole.split("\n") if line]
    return {entry["case"]: entry["rows"] for entry in entries}


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as CSV, in one step: None is an empty field, a list its items with semicolons between them."""
    joined = [
        {name: ";".join(map(str, value)) if isinstance(value, (list, tuple)) else value for name, value in row.items()}
        for row in rows
    ]
    # Objects: an integer in a column with None stays one.
    write_text(path, pd.DataFrame(joined, dtype=object).to_csv(index=False))
