"""What a run says and writes of itself, from the process that speaks for all."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..profiling import device_peak
from ..profiling.environment import device_name
from ..profiling.sweep import Row
from .metrics import Line, Metrics, memory_bytes, open_loggers
from .prepare import Prepared
from .stopping import NotFiniteError


class Rate:
    """Tokens in a second of all processes, and the part of their devices' peak rate that this is, where it is known."""

    def __init__(self, prepared: Prepared) -> None:
        self._device = prepared.device
        self._processes = prepared.layout.size
        self._tokens_of_a_step = prepared.config.batch_size * prepared.model.context_length
        self._flops_of_a_token = prepared.model.training_flops_per_token()
        peak = device_peak(device_name(prepared.device)) if prepared.device.type == "cuda" else None
        dtype = "bfloat16" if prepared.autocast else "float32"
        tf32 = torch.get_float32_matmul_precision() != "highest"
        self._peak = None if peak is None else peak.rate(dtype, tf32=tf32)
        self._since = time.perf_counter()

    def begin(self) -> None:
        """Steps begin now."""
        self._since = time.perf_counter()

    def end(self, steps: int) -> dict[str, Any]:
        """What was measured of the steps since the beginning, or since the last end: columns of their rows."""
        now = time.perf_counter()
        tokens_per_second = steps * self._tokens_of_a_step / (now - self._since)
        self._since = now
        rate = tokens_per_second * self._flops_of_a_token / self._processes
        return {
            "tokens_per_second": tokens_per_second,
            "mfu": None if self._peak is None else rate / (self._peak * 1e12),
            "memory_bytes": memory_bytes(self._device),
        }


class Report:
    """Rows in the run's folder and in other loggers, and lines for people; of the main process alone.

    Args:
        prepared: the run.
        folder: where it writes.
        step: where it begins; rows of later steps are taken back.
    """

    def __init__(self, prepared: Prepared, folder: Path, step: int) -> None:
        config = prepared.config
        self.rate = Rate(prepared)
        self._title = folder.name
        self._plots = config.plot
        self._metrics: Metrics | None = None
        if prepared.layout.is_main:
            loggers = open_loggers(config.log_to, folder, step, dataclasses.asdict(config))
            self._metrics = Metrics(folder, step, loggers)
            self._line = Line(config.steps)

    def steps(self, steps: Sequence[int], rates: Sequence[float], losses: list[float], norms: list[float]) -> None:
        """Rows of the steps since the last time, and a line of the last one.

        Raises:
            NotFiniteError: a loss or a norm is no finite number; the steps before it are written.
        """
        measured = self.rate.end(len(steps))
        rows: list[Row] = []
        for step, rate, loss, norm in zip(steps, rates, losses, norms, strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self._log(rows)
                raise NotFiniteError(f"the loss of step {step} is {loss} and the norm of its gradient {norm}")
            row = {"kind": "train", "step": step, "loss": loss, "learning_rate": rate, "grad_norm": norm}
            rows.append(row | measured)
        self._log(rows)
        if self._metrics is not None:
            self._line.show(rows[-1])

    def note(self, row: Row, text: str) -> None:
        """A row, and a line that says it."""
        self._log([row])
        if self._metrics is not None:
            self._line.note(text)

    def plot(self) -> None:
        """Draw the losses so far, where that is asked for."""
        if self._metrics is not None and self._plots:
            self._metrics.plot(self._title)

    def close(self) -> None:
        """No row and no line follows."""
        if self._metrics is not None:
            self._line.end()
            self._metrics.close()

    def _log(self, rows: list[Row]) -> None:
        if self._metrics is not None:
            self._metrics.log(rows)
