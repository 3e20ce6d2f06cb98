"""The loop: batches, updates, and what happens between them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..parallel import ParallelModel
from ..transformer import generate
from ..transformer.loss import IGNORED
from . import checkpoint
from .data import gather, validation_starts
from .optimizer import adamw, learning_rate, set_learning_rate, total_norm, update
from .prepare import CHECKPOINTS, Prepared, model_maker
from .report import Report
from .stopping import SAME_WITHIN, Ending, NotFiniteError, StopRequest

__all__ = ["Ending", "NotFiniteError", "Trainer"]


class Trainer:
    """A run: its model and optimizer, and where it is.

    Args:
        prepared: what it needs.
        folder: where it writes; made by whoever starts the run.
        resume: the checkpoint to go on from; None to begin.

    Raises:
        ValueError: the checkpoint is of other data or another model.
    """

    def __init__(self, prepared: Prepared, folder: Path, resume: checkpoint.Checkpoint | None = None) -> None:
        config = prepared.config
        self.prepared, self.config, self.folder, self.layout = prepared, config, folder, prepared.layout
        self.step = 0
        torch.manual_seed(config.seed)
        self.parallel = ParallelModel(
            model_maker(prepared),
            prepared.layout,
            autocast=prepared.autocast,
            reshard=config.reshard,
            compile=config.compile,
        )
        self.model = self.parallel.model
        self.optimizer = adamw(
            self.model,
            learning_rate=config.learning_rate,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
        )
        if resume is not None:
            if resume.progress.data != prepared.data:
                raise ValueError(f"data must be the text that the run in {folder} began with; its tokens have changed")
            checkpoint.load(resume, self.model, self.optimizer, rank=self.layout.rank)
            self.step = resume.progress.step
        self._first = self.step + 1
        self._begun: Callable[[], None] = lambda: None
        self.windows = prepared.windows()
        self._pending: list[tuple[int, float, Tensor, Tensor]] = []
        self._stop = StopRequest(0.0 if self.layout.is_alone else SAME_WITHIN)
        self._report = Report(prepared, folder, self.step)

    def run(self, begun: Callable[[], None] = lambda: None) -> Ending:
        """Train until the last step, or until a signal asks to stop; there is a checkpoint of where it ends.

        Args:
            begun: is called once, when a first step has succeeded and before anything is saved.

        Raises:
            NotFiniteError: the loss, the gradient or the parameters are not finite. No checkpoint is written of them.
            OSError: a file could not be written. The checkpoints before are as they were.
        """
        stopped = 0
        self._begun = begun
        with self._stop.listening(), contextlib.closing(self._report):
            self._report.rate.begin()
            while self.step < self.config.steps and not stopped:
                loss, norm, rate = self.update()
                self._pending.append((self.step, rate, loss, norm))
                self._between()
                # A signal to any process ends all of them after this step. They agree through their processors, which
                # are ahead of the devices, so that no device waits for it.
                stopped = self.layout.highest(self._stop.signal or 0)
            if stopped:
                self._flush()
                self._checkpoint()
        return Ending(self.step, stopped or None)

    def update(self) -> tuple[Tensor, Tensor, float]:
        """One optimizer step: the loss, the norm of the gradient, and the learning rate.

        The loss is this process's; the mean over all processes is that of the sequences of the step. The norm is of the
        gradient of them all. Both are on the device.
        """
        config, layout = self.config, self.layout
        micro_batch = config.micro_batch(layout.data_size)
        parts = config.batch_size // (micro_batch * layout.data_size)
        total = torch.zeros((), device=layout.device)
        for part in range(parts):
            mine = (part, layout.data_rank, layout.data_size)
            tokens, targets = self.windows.batch(self.step, config.batch_size, micro_batch, *mine)
            with self.parallel.part(last=part == parts - 1):
                loss = self._loss(tokens, targets, config.batch_size)
                loss.backward()
            total += loss.detach()
        rate = learning_rate(
            self.step + 1,
            highest=config.learning_rate,
            lowest=config.lowest_rate,
            warmup=config.warmup_steps,
            steps=config.steps,
        )
        set_learning_rate(self.optimizer, rate)
        norm = update(self.optimizer, self.model, config.grad_clip)
        self.step += 1
        return total, norm, rate

    def validate(self) -> float:
        """The mean loss of the sequences to validate on, which the processes share as they do in training."""
        tokens = self.prepared.validation
        if tokens is None:
            raise ValueError("validation must be tokens; this run has none")
        layout, length = self.layout, self.prepared.model.context_length
        starts = validation_starts(tokens, length, self.config.eval_sequences)
        micro_batch = self.config.micro_batch(layout.data_size)
        total = torch.zeros((), device=layout.device)
        with self.parallel.evaluating():
            for first in range(0, len(starts), micro_batch * layout.data_size):
                mine = first + layout.data_rank * micro_batch
                here = starts[mine : mine + micro_batch]
                # Those whose turn has nothing left compute what does not count: shards are gathered by all together.
                inputs, targets = gather(tokens, here if len(here) else starts[:1], length)
                targets = targets if len(here) else torch.full_like(targets, IGNORED)
                total += self._loss(inputs, targets, len(starts))
        return float(self._mean(total))

    def _loss(self, tokens: Tensor, targets: Tensor, sequences: int) -> Tensor:
        """What this process adds to the mean loss of so many sequences, times the number of processes."""
        count = sequences * self.prepared.model.context_length
        with self._autocast():
            return self.parallel.loss(tokens, targets, count=count, chunk=self.config.loss_chunk)

    def _mean(self, values: Tensor) -> Tensor:
        return self.layout.total(values) / self.layout.size

    def sample(self) -> str:
        """Text of the model's own, with the prompt, the same for the same parameters."""
        prompt, end = self.prepared.prompt(), self.prepared.tokenizer.end_of_document
        room = self.prepared.model.context_length - len(prompt) + 1
        # Every process takes part, for shards are gathered by all together, and none may end before another does.
        stop_tokens = (end,) if self.layout.is_alone else ()
        with self.parallel.evaluating(whole=True), self._autocast():
            (tokens,) = generate(
                self.model,
                [prompt],
                min(self.config.sample_tokens, room),
                temperature=self.config.temperature,
                top_p=self.config.top_p,
                seed=self.config.seed,
                stop_tokens=stop_tokens,
                graph=False,  # a recorded step would keep copies of the weights beside what training needs
            )
        ended = tokens[: tokens.index(end)] if end in tokens else tokens
        return self.config.sample_prompt + self.prepared.tokenizer.decode(ended)

    def _between(self) -> None:
        """What is due after a step."""
        config, last = self.config, self.step == self.config.steps
        validates = self.prepared.validation is not None and self._due(config.eval_every, last)
        samples, saves = self._due(config.sample_every, last), self._due(config.checkpoint_every, last)
        # The first step, which warms up and may compile, is none of the later ones' time.
        if validates or samples or saves or self._due(config.log_every, last) or self.step == self._first:
            self._flush()
        if self.step == self._first:
            self._begun()
        if validates:
            loss = self.validate()
            if not math.isfinite(loss):
                raise NotFiniteError(f"the loss on the text to validate on is {loss} after step {self.step}")
            row = {"kind": "validation", "step": self.step, "loss": loss}
            self._report.note(row, f"step {self.step}: loss {loss:.3f} on the text to validate on")
        if samples:
            try:
                text = self.sample()
            except FloatingPointError as error:
                raise NotFiniteError(f"no sample can be drawn after step {self.step}, {error}") from error
            row = {"kind": "sample", "step": self.step, "text": text}
            self._report.note(row, f"step {self.step}, a sample:\n{text}\n")
        if saves:
            self._checkpoint()
        if validates or samples or saves:
            self._report.rate.begin()  # their time is none of training's

    def _due(self, every: int, last: bool) -> bool:
        return every > 0 and (last or self.step % every == 0)

    def _flush(self) -> None:
        """Write the rows of the steps since the last time. The device is waited for here alone."""
        if not self._pending:
            return
        steps, rates, losses, norms = zip(*self._pending, strict=True)
        self._pending = []
        numbers = torch.stack([self._mean(torch.stack(losses)), torch.stack(norms).float()])
        self._report.steps(steps, rates, *numbers.tolist())

    def _checkpoint(self) -> None:
        """Write one, unless the last update has made parameters that are not finite."""
        norm = float(total_norm(parameter.detach() for parameter in self.model.parameters()))
        if not math.isfinite(norm):
            raise NotFiniteError(f"the norm of the parameters is {norm} after step {self.step}")
        progress = checkpoint.Progress(step=self.step, data=self.prepared.data)
        folder, keep = self.folder / CHECKPOINTS, self.config.keep
        checkpoint.save(folder, self.model, self.optimizer, progress, keep=keep, layout=self.layout)
        self._report.plot()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.layout.device.type, torch.bfloat16, enabled=self.prepared.autocast)
