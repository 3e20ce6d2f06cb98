"""The rows of a run: measured where they are not stored, then stored, and told of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from cs336_systems.files import write_text
from cs336_systems.profiling.environment import Environment
from cs336_systems.profiling.progress import Progress, readable_seconds
from cs336_systems.profiling.report import format_number
from cs336_systems.profiling.sweep import Row, RowStore, Status, write_csv


class HasKey(Protocol):
    """A cell: what a row is measured of."""

    @property
    def key(self) -> str:
        """The cell in words, which no other has."""
        ...


class Rows:
    """The rows of a run: each is measured where it is not stored, then stored, and everything written anew.

    Args:
        store: those that there are.
        measure: a cell's row, or several.
        write: writes the files for people.
        total: how many cells there will be; None where each depends on the one before.
        environment: of the run; its commit and date stand in every row.
    """

    def __init__(
        self,
        store: RowStore,
        measure: Callable[[Any], Row | list[Row]],
        write: Callable[[], None],
        total: int | None,
        environment: Environment,
    ) -> None:
        self._store, self._measure, self._write = store, measure, write
        self._stamp = {"device": environment.device, "commit": environment.commit, "date": environment.date}
        self._counted = total is not None
        self.progress = Progress(total or 0)

    def of(self, cell: HasKey) -> Row:
        """The row of a cell; of several, the first."""
        if self._store.is_finished(cell.key):
            self.progress.keep_cell()
            return self._store.rows_of(cell.key)[0]
        if self._counted:
            self.progress.start_cell(cell.key)
        begin = time.monotonic()
        measured = self._measure(cell)
        stamp = {"row_s": round(time.monotonic() - begin, 1), **self._stamp}
        rows = [row | stamp for row in (measured if isinstance(measured, list) else [measured])]
        self._store.append(cell.key, rows)
        self._write()
        if self._counted:
            self.progress.finish_cell(_summary(rows))
        else:
            self.progress.note(f"{cell.key}: {_summary(rows)}")
        return rows[0]


def write_at_once(
    folder: Path, rows: Iterable[Row], columns: Sequence[str], environment: Environment, page: str
) -> Path:
    """The files of a run that is too short to be gone on with; where its page is.

    Rows are stamped with the run's device, commit and date, after the ``columns`` that they have.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment.write(folder / "environment.json")
    stamp = {"device": environment.device, "commit": environment.commit, "date": environment.date}
    write_csv(folder / "results.csv", [row | stamp for row in rows], [*columns, *stamp])
    write_text(folder / "tables.md", page)
    return folder / "tables.md"


def _summary(rows: Sequence[Row]) -> str:
    row = rows[0]
    took = f"the row took {readable_seconds(row['row_s'])}"
    if len(rows) > 1:
        fine = sum(row["status"] == Status.OK.value for row in rows)
        return f"{fine} of {len(rows)} rows have figures, they took {readable_seconds(row['row_s'])}"
    if row["status"] != Status.OK.value:
        return f"{row['status']}, {took} ({row['reason'][:120]})"
    compiling, median = row.get("compile_s"), row.get("median_ms", row.get("step_median_ms"))
    shown = [] if median is None else [f"{format_number(median)} ms a step"]
    shown += [] if compiling is None else [f"the first step {format_number(compiling)} s more"]
    return ", ".join([*shown, took])
