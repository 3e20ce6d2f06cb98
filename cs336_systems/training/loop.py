"""The loop: batches, updates, and what happens between them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..profiling import device_peak
from ..profiling.environment import device_name
from ..transformer import generate
from . import checkpoint
from .data import gather, validation_starts
from .metrics import Line, Metrics, Row, memory_bytes, open_loggers
from .optimizer import adamw, clip, learning_rate, set_learning_rate
from .prepare import CHECKPOINTS, Prepared, build_model


class NotFiniteError(ArithmeticError):
    """The loss or the gradient is infinite or no number: the parameters are of no use from there on."""


@dataclass(frozen=True)
class Ending:
    """How training ended: at which step, and by which signal, if by one."""

    step: int
    signal: int | None


class StopRequest:
    """Ctrl-C and SIGTERM, noted, so that the step under way can end; a second one interrupts at once."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Until the block ends. Python lets only the main thread listen; elsewhere signals do what they did."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number


class Trainer:
    """A run: its model and optimizer, and where it is.

    Args:
        prepared: what it needs.
        folder: where it writes; made by whoever starts the run.
        resume: the checkpoint to go on from; None to begin.

    Raises:
        ValueError: the checkpoint is of other data or another model.
    """

    def __init__(self, prepared: Prepared, folder: Path, resume: Path | None = None) -> None:
        config = prepared.config
        self.prepared, self.config, self.folder, self.device = prepared, config, folder, prepared.device
        self.step = 0
        self.model = build_model(prepared)
        self.optimizer = adamw(
            self.model,
            learning_rate=config.learning_rate,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
        )
        if resume is not None:
            progress = checkpoint.read_progress(resume)
            if progress.data != prepared.data:
                raise ValueError(f"data must be the text that the run in {folder} began with; its tokens have changed")
            checkpoint.load(resume, self.model, self.optimizer)
            self.step = progress.step
        self._first = self.step + 1
        self.windows = prepared.windows()
        # Samples and validations, of other shapes, take the model as it is, and compile nothing.
        self._forward: Callable[..., Tensor] = torch.compile(self.model) if config.compile else self.model
        self._rate = Rate(prepared)
        self._pending: list[tuple[int, float, Tensor, Tensor]] = []
        self._stop = StopRequest()
        loggers = open_loggers(config.log_to, folder, self.step, dataclasses.asdict(config))
        self._metrics = Metrics(folder, self.step, loggers)
        self._line = Line(config.steps)

    def run(self) -> Ending:
        """Train until the last step, or until a signal asks to stop; there is a checkpoint of where it ends.

        Raises:
            NotFiniteError: the loss or the gradient is no finite number. Nothing is written of the step.
        """
        with self._stop.listening(), contextlib.closing(self._metrics), contextlib.ExitStack() as at_the_end:
            at_the_end.callback(self._line.end)
            self._rate.begin()
            while self.step < self.config.steps and self._stop.signal is None:
                loss, norm, rate = self.update()
                self._pending.append((self.step, rate, loss, norm))
                self._between()
            if self._stop.signal is not None:
                self._flush()
                self._checkpoint()
        return Ending(self.step, self._stop.signal)

    def update(self) -> tuple[Tensor, Tensor, float]:
        """One optimizer step: the mean loss of its sequences, the gradient's norm, both on the device, and the rate."""
        config = self.config
        parts = config.batch_size // config.micro_batch
        mean = torch.zeros((), device=self.device)
        for part in range(parts):
            batch = self.windows.batch(self.step, config.batch_size, config.micro_batch, part)
            tokens, targets = (half.to(self.device, non_blocking=True) for half in batch)
            with self._autocast():
                # Parts have as many targets each, so that the mean of their means is that of all.
                loss = self._forward(tokens, targets=targets, chunk=config.loss_chunk) / parts
            loss.backward()
            mean += loss.detach()
        rate = learning_rate(
            self.step + 1,
            highest=config.learning_rate,
            lowest=config.lowest_rate,
            warmup=config.warmup_steps,
            steps=config.steps,
        )
        set_learning_rate(self.optimizer, rate)
        norm = clip(self.model.parameters(), config.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return mean, norm, rate

    @torch.no_grad()
    def validate(self) -> float:
        """The mean loss of the sequences to validate on."""
        tokens = self.prepared.validation
        if tokens is None:
            raise ValueError("validation must be tokens; this run has none")
        length = self.prepared.model.context_length
        starts = validation_starts(tokens, length, self.config.eval_sequences)
        total = torch.zeros((), device=self.device)
        for first in range(0, len(starts), self.config.micro_batch):
            inputs, targets = gather(tokens, starts[first : first + self.config.micro_batch], length)
            with self._autocast():
                loss = self.model(inputs.to(self.device), targets=targets.to(self.device), chunk=self.config.loss_chunk)
            total += loss * len(inputs)
        return float(total) / len(starts)

    def sample(self) -> str:
        """Text of the model's own, with the prompt, the same for the same parameters."""
        prompt, end = self.prepared.prompt(), self.prepared.tokenizer.end_of_document
        room = self.prepared.model.context_length - len(prompt) + 1
        with self._autocast():
            (tokens,) = generate(
                self.model,
                [prompt],
                min(self.config.sample_tokens, room),
                temperature=self.config.temperature,
                top_p=self.config.top_p,
                seed=self.config.seed,
                stop_tokens=(end,),
            )
        ended = tokens[:-1] if tokens[-1] == end else tokens
        return self.config.sample_prompt + self.prepared.tokenizer.decode(ended)

    def _between(self) -> None:
        """What is due after a step."""
        config, last = self.config, self.step == self.config.steps
        validates = self.prepared.validation is not None and self._due(config.eval_every, last)
        samples, saves = self._due(config.sample_every, last), self._due(config.checkpoint_every, last)
        # The first step, which warms up and may compile, is none of the later ones' time.
        if validates or samples or saves or self._due(config.log_every, last) or self.step == self._first:
            self._flush()
        if validates:
            loss = self.validate()
            self._metrics.log([{"kind": "validation", "step": self.step, "loss": loss}])
            self._line.note(f"step {self.step}: loss {loss:.3f} on the text to validate on")
        if samples:
            text = self.sample()
            self._metrics.log([{"kind": "sample", "step": self.step, "text": text}])
            self._line.note(f"step {self.step}, a sample:\n{text}\n")
        if saves:
            self._checkpoint()
        if validates or samples or saves:
            self._rate.begin()  # their time is none of training's

    def _due(self, every: int, last: bool) -> bool:
        return every > 0 and (last or self.step % every == 0)

    def _flush(self) -> None:
        """Write the rows of the steps since the last time. The device is waited for here alone."""
        if not self._pending:
            return
        steps, rates, losses, norms = zip(*self._pending, strict=True)
        self._pending = []
        numbers = torch.stack([torch.stack(losses), torch.stack(norms).float()]).tolist()
        measured = self._rate.end(len(steps))
        rows: list[Row] = []
        for step, rate, loss, norm in zip(steps, rates, *numbers, strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self._metrics.log(rows)
                raise NotFiniteError(
                    f"the loss of step {step} is {loss} and the norm of its gradient {norm}: training cannot go on. "
                    "A lower --learning-rate, a longer --warmup-steps or a smaller --grad-clip may help"
                )
            row = {"kind": "train", "step": step, "loss": loss, "learning_rate": rate, "grad_norm": norm}
            rows.append(row | measured)
        self._metrics.log(rows)
        self._line.show(rows[-1])

    def _checkpoint(self) -> None:
        """Write one of what `_flush` found finite."""
        progress = checkpoint.Progress(step=self.step, data=self.prepared.data)
        checkpoint.save(self.folder / CHECKPOINTS, self.model, self.optimizer, progress, keep=self.config.keep)
        if self.config.plot:
            self._metrics.plot(self.folder.name)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.prepared.autocast)


class Rate:
    """Tokens in a second, and the part of the device's peak rate that this is, where the peak is known."""

    def __init__(self, prepared: Prepared) -> None:
        self._device = prepared.device
        self._tokens_of_a_step = prepared.config.batch_size * prepared.model.context_length
        self._flops_of_a_token = prepared.model.training_flops_per_token()
        peak = device_peak(device_name(prepared.device)) if prepared.device.type == "cuda" else None
        dtype = "bfloat16" if prepared.autocast else "float32"
        tf32 = torch.get_float32_matmul_precision() != "highest"
        self._peak = None if peak is None else peak.of(dtype, tf32=tf32)
        self._since = time.perf_counter()

    def begin(self) -> None:
        """Steps begin now."""
        self._since = time.perf_counter()

    def end(self, steps: int) -> dict[str, Any]:
        """What was measured of the steps since the beginning, or since the last end: columns of their rows."""
        now = time.perf_counter()
        tokens_per_second = steps * self._tokens_of_a_step / (now - self._since)
        self._since = now
        rate = tokens_per_second * self._flops_of_a_token
        return {
            "tokens_per_second": tokens_per_second,
            "mfu": None if self._peak is None else rate / (self._peak * 1e12),
            "memory_bytes": memory_bytes(self._device),
        }
