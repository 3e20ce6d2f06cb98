"""A sweep that survives: statuses instead of crashes, and finished cells that outlast an interruption.

A sweep is a sequence of cells, each with a key. When a cell is finished its rows are appended to a journal, one line
for each cell; a sweep started again in the same folder reads the journal and measures only what is missing.
"""

from __future__ import annotations

import csv
import io
import json
import os
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from cs336_systems.files import write_text
from cs336_systems.profiling.memory import is_out_of_memory

Row = dict[str, Any]
"""One line of a result: plain JSON values by column."""

JOURNAL = "journal.jsonl"
CONFIGURATION = "configuration.json"
UNDER_WAY = "under-way.json"
EARLIER = "earlier"
"""The folder, in a sweep's, of the rows that were there before it."""

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
    """A status with its reason; the reason is empty when all is well."""

    status: Status
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.status.value}: {self.reason}" if self.reason else self.status.value


OK = Outcome(Status.OK)


def outcome_of(error: Exception, *, refusals: tuple[type[Exception], ...] = (NotImplementedError,)) -> Outcome:
    """The outcome that an exception stands for: memory ran out, the call was refused, or something went wrong.

    `refusals` are the exception types by which the measured code says that it cannot do what was asked. What went wrong
    is followed by the file and line that raised it, where the exception still has its traceback.
    """
    text = " ".join(str(error).split()) or "no message"
    shortened = text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 1] + "…"
    if is_out_of_memory(error):
        return Outcome(Status.OUT_OF_MEMORY, shortened)
    if isinstance(error, refusals):
        return Outcome(Status.UNSUPPORTED, shortened)
    return Outcome(Status.ERROR, f"{type(error).__name__}: {shortened}{_place_of(error)}")


def _place_of(error: Exception) -> str:
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return ""
    frame, line = frames[-1]
    return f" ({os.path.basename(frame.f_code.co_filename)}:{line})"


class ConfigurationMismatchError(ValueError):
    """A results folder holds a sweep of another configuration than the one asked for."""


class RowStore:
    """The rows of one sweep in one folder. Open it with `RowStore.open`, append a cell's rows when all are measured."""

    def __init__(self, folder: Path, cells: dict[str, list[Row]]) -> None:
        self.folder = folder
        self._cells = cells

    @classmethod
    def open(cls, folder: Path, configuration: Mapping[str, Any]) -> RowStore:
        """Start a sweep in `folder`, or continue the one that is there.

        Raises ConfigurationMismatchError, naming every difference, when the folder's sweep has another configuration.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / CONFIGURATION
        wanted = json.loads(json.dumps(configuration))
        if path.exists():
            _require_same(folder, read_configuration(folder), wanted)
        elif (folder / JOURNAL).exists():
            raise ConfigurationMismatchError(f"{folder} has a {JOURNAL} but no {CONFIGURATION}: choose another folder")
        else:
            path.write_text(json.dumps(wanted, indent=2) + "\n")
        return cls(folder, _read_journal(folder / JOURNAL))

    @classmethod
    def begin(cls, folder: Path, configuration: Mapping[str, Any]) -> RowStore:
        """Start a sweep in `folder`.

        The rows of one that is there already go to the folder `EARLIER` in it, in place of those that are there: a
        sweep of hours is not lost when it is forgotten to ask for it. That folder can be opened as any other.
        """
        (folder / UNDER_WAY).unlink(missing_ok=True)
        if (folder / JOURNAL).exists():
            (folder / EARLIER).mkdir(exist_ok=True)
            for name in (CONFIGURATION, JOURNAL):
                (folder / EARLIER / name).unlink(missing_ok=True)
                if (folder / name).exists():
                    (folder / name).rename(folder / EARLIER / name)
        (folder / CONFIGURATION).unlink(missing_ok=True)
        return cls.open(folder, configuration)

    @property
    def rows(self) -> list[Row]:
        """All rows, in the order in which their cells were finished."""
        return [row for rows in self._cells.values() for row in rows]

    def is_finished(self, cell: str) -> bool:
        """Whether the cell's rows are stored."""
        return cell in self._cells

    def rows_of(self, cell: str) -> list[Row]:
        """The rows of one finished cell. Raises KeyError when it is not finished."""
        return self._cells[cell]

    def append(self, cell: str, rows: Sequence[Row]) -> None:
        """Store the rows of a finished cell, on disk when it returns. Raises ValueError when they are already there."""
        if cell in self._cells:
            raise ValueError(f"cell must not be stored already; got {cell!r} again")
        line = json.dumps({"cell": cell, "rows": list(rows)}, allow_nan=False)
        with (self.folder / JOURNAL).open("a", encoding="utf-8") as journal:
            journal.write(line + "\n")
            journal.flush()
            os.fsync(journal.fileno())
        self._cells[cell] = list(rows)


class DeathLog:
    """Remembers in a folder what was under way when a process ended without having a chance to say so.

    What ends a process (a segmentation fault, an abort in a library) cannot be caught in it. So what is begun is noted
    in a file, and a note that is still there when the folder is opened again counts as one death.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / UNDER_WAY
        self._deaths: dict[str, int] = {}
        if self._path.exists():
            stored = json.loads(self._path.read_text() or "{}")
            self._deaths = stored.get("deaths", {})
            dead = stored.get("under_way")
            if dead is not None:
                self._deaths[dead] = self._deaths.get(dead, 0) + 1
        self._note(None)

    def begin(self, what: str) -> None:
        """Note what is about to be done, in place of what was noted before."""
        self._note(what)

    def end(self) -> None:
        """Nothing is under way any more; a process that ends from here on has not died of it."""
        self._note(None)

    def deaths(self, what: str) -> int:
        """How many processes ended while this was under way."""
        return self._deaths.get(what, 0)

    def _note(self, what: str | None) -> None:
        if what is None and not self._deaths:
            self._path.unlink(missing_ok=True)
            return
        write_text(self._path, json.dumps({"under_way": what, "deaths": self._deaths}))


def read_configuration(folder: Path) -> dict[str, Any]:
    """The configuration of the sweep in `folder`. Raises FileNotFoundError when there is none."""
    path = folder / CONFIGURATION
    if not path.exists():
        raise FileNotFoundError(f"{folder} holds no sweep to resume: it has no {CONFIGURATION}")
    return dict(json.loads(path.read_text()))


def _require_same(folder: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    missing = "nothing"
    differences = [
        f"{name} was {stored.get(name, missing)!r} and is now {wanted.get(name, missing)!r}"
        for name in sorted({*stored, *wanted})
        if stored.get(name, missing) != wanted.get(name, missing)
    ]
    if differences:
        raise ConfigurationMismatchError(
            f"{folder} holds a sweep with another configuration: {'; '.join(differences)}. "
            "Choose another folder, or ask for the stored configuration"
        )


def _read_journal(path: Path) -> dict[str, list[Row]]:
    """The cells of a journal. A last line that was cut off while it was written is removed from the file."""
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    whole, newline, _ = text.rpartition("\n")
    if whole + newline != text:
        path.write_text(whole + newline, encoding="utf-8")
    cells: dict[str, list[Row]] = {}
    for line in whole.split("\n") if whole else ():
        entry = json.loads(line)
        cells[entry["cell"]] = entry["rows"]
    return cells


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Write rows as CSV in the given columns, in one step.

    None becomes an empty field, a list its items joined by semicolons.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_csv_field(row.get(column)) for column in columns])
    write_text(path, text.getvalue())


def _csv_field(value: object) -> object:
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        return ";".join(str(item) for item in value)
    return value
