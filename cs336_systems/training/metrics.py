"""What a run says of itself: rows of JSON, a line of progress, a plot of the loss, and other people's dashboards."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from ..files import write_text
from ..profiling.memory import GIB
from ..profiling.plots import Axes, Panel, Series, save_panels
from ..profiling.progress import Progress, readable_seconds
from ..profiling.sweep import Row

METRICS = "metrics.jsonl"
PLOT = "loss.png"

_MOST_POINTS = 400
_PROJECT = "cs336_systems"


class Logger(Protocol):
    """Where rows go besides the file."""

    def log(self, row: Row) -> None:
        """Take one row."""
        ...

    def close(self) -> None:
        """No row follows."""
        ...


class TensorBoard:
    """Rows as scalars, and samples as text, for TensorBoard to show."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What an interrupted run wrote after its last checkpoint is not shown.
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def log(self, row: Row) -> None:
        """One scalar for each number of the row."""
        for name, value in _numbers(row).items():
            self._writer.add_scalar(f"{row['kind']}/{name}", value, row["step"])
        if "text" in row:
            self._writer.add_text("sample", row["text"], row["step"])

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()


class WeightsAndBiases:
    """Rows as a run of W&B, one for each run folder; who is logged in, and where to, is W&B's own business."""

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=_PROJECT, id=folder.resolve().name, dir=str(folder), resume="allow", config=dict(options)
        )

    def log(self, row: Row) -> None:
        """The numbers of a row, and the text of a sample."""
        values = _numbers(row) | ({"text": row["text"]} if "text" in row else {})
        self._run.log({f"{row['kind']}/{name}": value for name, value in values.items()}, step=row["step"])

    def close(self) -> None:
        """End the run there."""
        self._run.finish()


def require_loggers(names: Iterable[str]) -> None:
    """Raise ValueError for a logger whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"log_to {name} needs the package {name}, which is not installed: pip install {name}")


def open_loggers(names: Iterable[str], folder: Path, first_step: int, options: Mapping[str, Any]) -> list[Logger]:
    """The loggers of these names."""
    loggers: list[Logger] = []
    for name in names:
        loggers.append(TensorBoard(folder, first_step) if name == "tensorboard" else WeightsAndBiases(folder, options))
    return loggers


class Metrics:
    """The rows of a run, in its folder and in other loggers.

    A row has ``kind`` ("train", "validation" or "sample"), ``step``, and what was measured: see docs/training.md.

    Args:
        folder: the run's.
        step: where the run begins; rows of later steps, of an earlier process, are taken out, for they come again.
        loggers: where rows go besides.
    """

    def __init__(self, folder: Path, step: int, loggers: Iterable[Logger] = ()) -> None:
        self.path = folder / METRICS
        self._loggers = list(loggers)
        kept = [row for row in read_rows(self.path) if row["step"] <= step]
        write_text(self.path, "".join(map(_line, kept)))

    def log(self, rows: Iterable[Row]) -> None:
        """Append rows."""
        rows = list(rows)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(map(_line, rows)))
        for logger in self._loggers:
            for row in rows:
                logger.log(row)

    def close(self) -> None:
        """Close the other loggers."""
        for logger in self._loggers:
            logger.close()

    def plot(self, title: str) -> None:
        """Draw the losses so far, where matplotlib is installed."""
        if importlib.util.find_spec("matplotlib") is None:
            return
        rows = read_rows(self.path)
        lines = (_loss_line("training", rows, "train"), _loss_line("validation", rows, "validation"))
        axes = Axes("step", "loss (nats a token)", logarithmic=False, doubling=False)
        labels = {"training": 0, "validation": 1}
        save_panels(self.path.with_name(PLOT), [Panel("cross-entropy", lines)], title=title, axes=axes, labels=labels)


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; none if it does not exist. A last line that was cut off is left out.

    Raises:
        ValueError: another line is no JSON.
    """
    if not path.exists():
        return []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    try:
        return [json.loads(line) for line in whole.split(b"\n")] if whole else []
    except ValueError as error:
        raise ValueError(f"{path} must have JSON on every line: {error}") from error


class Line:
    """A line of progress that is rewritten on a terminal, and a line for each call elsewhere."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._progress = Progress(steps, sys.stderr)
        self._begun: tuple[float, int] | None = None
        self._last = ""

    def show(self, row: Row) -> None:
        """Show a row of training, and how long the rest will take."""
        done, now = row["step"], time.monotonic()
        parts = [f"loss {row['loss']:.3f}", f"{row['tokens_per_second']:,.0f} tokens/s"]
        if row["mfu"] is not None:
            parts.append(f"MFU {row['mfu']:.1%}")
        if row["memory_bytes"] is not None:
            parts.append(f"{row['memory_bytes'] / GIB:.2f} GiB")
        if self._begun is None:
            self._begun = now, done
        elif done < self._steps:
            rate = (now - self._begun[0]) / (done - self._begun[1])
            parts.append(f"{readable_seconds(rate * (self._steps - done))} left")
        text = "  ".join(parts)
        self._progress.reach(done - 1)
        self._progress.step(text)
        self._last = f"[{done}/{self._steps}] {text}"
        if not sys.stderr.isatty():
            self.note(self._last)

    def end(self) -> None:
        """Let the last line stay, so that nothing is written over it."""
        if sys.stderr.isatty() and self._last:
            self.note(self._last)

    def note(self, text: str) -> None:
        """A line that stays."""
        self._progress.note(text)


def memory_bytes(device: torch.device) -> int | None:
    """The most that was allocated on a GPU, or that the process had of the machine's memory; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    if sys.platform == "win32":
        return None
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # bytes on macOS, KiB elsewhere


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _numbers(row: Row) -> dict[str, float]:
    return {name: value for name, value in row.items() if isinstance(value, (int, float)) and name != "step"}


def _loss_line(label: str, rows: Iterable[Row], kind: str) -> Series:
    """The losses of a kind of rows; of many, averages of as many steps each."""
    points = [(row["step"], row["loss"]) for row in rows if row["kind"] == kind]
    width = -(-len(points) // _MOST_POINTS) or 1
    groups = [points[first : first + width] for first in range(0, len(points), width)]
    x, y = ([sum(point[axis] for point in group) / len(group) for group in groups] for axis in (0, 1))
    return Series(label, tuple(x), tuple(y))
