"""The training loop: batches, updates, validation, samples, checkpoints and metrics."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files import write_text
from ..parallel import Layout, ParallelModel
from ..profiling import collect_environment
from ..transformer import Transformer, generate
from ..transformer.loss import IGNORED
from . import checkpoint
from .checkpoint import CHECKPOINTS, CONFIG
from .config import TrainingConfig
from .data import EpochOrder, evaluation_starts, open_tokenizer, open_tokens, sequences
from .optimizer import adamw, global_norm, learning_rate, update

METRICS = "metrics.jsonl"

Rows = list[dict[str, Any]]


class Trainer:
    """A training run in a folder that `data.prepare` has filled.

    Args:
        config: the options.
        folder: where checkpoints and metrics are written.
        layout: the processes of the run, each of which makes a Trainer.
        resume: the checkpoint to resume from; None to begin.

    Attributes:
        step: number of updates so far.

    Raises ValueError if the options do not fit the data or the checkpoint.
    """

    def __init__(self, config: TrainingConfig, folder: Path, layout: Layout, resume: Path | None = None) -> None:
        self.config, self.folder, self.layout = config, folder, layout
        self.tokenizer = open_tokenizer(config, folder)
        self.sizes = config.model(self.tokenizer.size)
        self.micro_batch = config.micro_batch(layout.data_size)
        self.train, self.validation = open_tokens(config, folder, self.tokenizer)
        length = self.sizes.context_length
        self.order = EpochOrder(len(self.train), length, config.seed)
        if self.validation is not None:
            self.validation_starts = evaluation_starts(len(self.validation), length, config.eval_sequences)
        self.prompt = list(self.tokenizer.encode(config.sample_prompt)) or [self.tokenizer.end_of_document]
        if len(self.prompt) > length:
            raise ValueError(f"sample_prompt must be at most {length} tokens, context_length; got {len(self.prompt)}")
        self.autocast = config.dtype == "bfloat16"
        if config.dtype == "auto" and layout.device.type == "cuda":
            self.autocast = torch.cuda.get_device_capability(layout.device) >= (8, 0)  # has bfloat16 tensor cores
        torch.manual_seed(config.seed)
        self.parallel = ParallelModel(
            lambda device: Transformer(self.sizes, checkpoint_every=config.recompute_every, device=device),
            layout,
            autocast=self.autocast,
            reshard=config.reshard,
            compile=config.compile,
        )
        self.model = self.parallel.model
        betas = (config.beta1, config.beta2)
        self.optimizer = adamw(self.model, config.learning_rate, betas, config.weight_decay)
        self.step = 0 if resume is None else checkpoint.load(resume, self.model, self.optimizer)
        # Rows of later steps are written again.
        self._earlier_rows: Rows | None = [row for row in read_metrics(folder / METRICS) if row["step"] <= self.step]
        self._pending: list[tuple[int, float, Tensor, Tensor]] = []
        self._clock = time.perf_counter()

    def run(self, stop: Callable[[], int] = lambda: 0) -> int:
        """Train to the last step, or until `stop` returns the number of a signal in some process.

        Returns:
            The number of the signal, after a checkpoint; 0 at the last step.

        Raises:
            FloatingPointError: a loss, a gradient or a parameter is not finite. No checkpoint holds it.
            OSError: a file could not be written. Earlier checkpoints are unchanged.
        """
        config, first, signal = self.config, self.step + 1, 0
        while self.step < config.steps and not signal:
            self._pending.append(self.train_step())
            signal = self.layout.all_reduce_max(stop())  # between hosts: no GPU is waited for
            evaluate = not signal and self.validation is not None and self._due(config.eval_every)
            sample = not signal and self._due(config.sample_every)
            save = signal or self._due(config.checkpoint_every)
            # The first step, which warms up or compiles, is timed by itself.
            if evaluate or sample or save or self._due(config.log_every) or self.step == first:
                self._log_steps()
            if evaluate:
                loss = self._finite("the validation loss", self.evaluate())
                self._log([{"kind": "validation", "step": self.step, "loss": loss}], f"validation loss {loss:.3f}")
            if sample:
                text = self.sample()
                self._log([{"kind": "sample", "step": self.step, "text": text}], f"sample:\n{text}\n")
            if save:
                self._save()
            if evaluate or sample or save:
                self._clock = time.perf_counter()
        return signal

    def _due(self, every: int) -> bool:
        return every > 0 and (self.step == self.config.steps or self.step % every == 0)

    def train_step(self) -> tuple[int, float, Tensor, Tensor]:
        """One update: its number, its learning rate, this process's share of its loss, and the gradient's norm."""
        config, layout = self.config, self.layout
        starts = self.order.starts(self.step * config.batch_size, config.batch_size)
        micro_batches = starts.reshape(-1, layout.data_size, self.micro_batch)[:, layout.data_rank]
        total = torch.zeros((), device=layout.device)
        for number, mine in enumerate(micro_batches):
            tokens, targets = sequences(self.train, mine, self.sizes.context_length)
            with self.parallel.micro_batch(last=number == len(micro_batches) - 1):
                loss = self._loss(tokens, targets, config.batch_size)
                loss.backward()
            total += loss.detach()
        self.step += 1
        rate = learning_rate(self.step, config.learning_rate, config.lowest_rate, config.warmup_steps, config.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return self.step, rate, total, update(self.optimizer, self.model, config.grad_clip)

    def _loss(self, tokens: Tensor, targets: Tensor, sequences: int) -> Tensor:
        """This process's share of the mean loss over a number of sequences, times the number of processes."""
        count = sequences * self.sizes.context_length
        with self._autocast():
            return self.parallel.loss(tokens, targets, count=count, chunk=self.config.loss_chunk)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.layout.device.type, torch.bfloat16, enabled=self.autocast)

    def evaluate(self) -> float:
        """The mean loss of the validation sequences, divided among the processes as in training."""
        if self.validation is None:
            raise ValueError("val_fraction must be above 0 for a validation; got 0")
        layout, length, starts = self.layout, self.sizes.context_length, self.validation_starts
        total = torch.zeros((), device=layout.device)
        with self.parallel.evaluating():
            for first in range(0, len(starts), self.micro_batch * layout.data_size):
                mine = starts[first + layout.data_rank * self.micro_batch :][: self.micro_batch]
                # All processes gather shards together: one with nothing left computes a sequence that does not count.
                tokens, targets = sequences(self.validation, mine if len(mine) else starts[:1], length)
                total += self._loss(tokens, targets if len(mine) else torch.full_like(targets, IGNORED), len(starts))
        return float(layout.all_reduce(total) / layout.size)

    def sample(self) -> str:
        """The prompt and text that the model generates after it; the same text for the same parameters."""
        config, end = self.config, self.tokenizer.end_of_document
        sampling: dict[str, Any] = {"temperature": config.temperature, "top_p": config.top_p, "seed": config.seed}
        count = min(config.sample_tokens, self.sizes.context_length - len(self.prompt) + 1)
        # Several processes gather shards together, so none may stop before the others.
        stop_tokens = (end,) if not self.layout.is_distributed else ()
        with self.parallel.evaluating(whole=True), self._autocast():
            # A CUDA graph would keep copies of the weights in memory.
            (tokens,) = generate(self.model, [self.prompt], count, **sampling, stop_tokens=stop_tokens, graph=False)
        ended = tokens[: tokens.index(end)] if end in tokens else tokens
        return config.sample_prompt + self.tokenizer.decode(ended)

    def _save(self) -> None:
        self._finite("the norm of the parameters", float(global_norm(p.detach() for p in self.model.parameters())))
        folder, keep = self.folder / CHECKPOINTS, self.config.keep
        checkpoint.save(folder, self.model, self.optimizer, self.step, keep=keep, layout=self.layout)

    def _finite(self, name: str, value: float) -> float:
        if not math.isfinite(value):
            raise FloatingPointError(f"{name} is {value} at step {self.step}")
        return value

    def _log_steps(self) -> None:
        """Write a row for each step since the last call. Only here does the host wait for the device."""
        steps, rates, losses, norms = zip(*self._pending, strict=True)
        self._pending = []
        means = (self.layout.all_reduce(torch.stack(losses)) / self.layout.size).tolist()
        now = time.perf_counter()
        speed = len(steps) * self.config.batch_size * self.sizes.context_length / (now - self._clock)
        self._clock = now
        memory = torch.cuda.max_memory_allocated(self.layout.device) if self.layout.device.type == "cuda" else None
        rows: Rows = []
        for step, rate, loss, norm in zip(steps, rates, means, torch.stack(norms).tolist(), strict=True):
            if not math.isfinite(loss + norm):
                self._log(rows)
                raise FloatingPointError(f"the loss of step {step} is {loss}, the norm of its gradient {norm}")
            row = {"kind": "train", "step": step, "loss": loss, "learning_rate": rate, "grad_norm": norm}
            rows.append(row | {"tokens_per_second": speed, "memory_bytes": memory})
        self._log(rows, f"loss {means[-1]:.3f}  {speed:,.0f} tokens/s")

    def _log(self, rows: Rows, message: str = "") -> None:
        """Append rows to the metrics and print a message, in the first process."""
        if not (self.layout.is_main and rows):
            return
        path, lines = self.folder / METRICS, "".join(json.dumps(row) + "\n" for row in rows)
        if self._earlier_rows is not None:
            # A step has succeeded: these options work, and replace those that the run had before.
            write_text(path, "".join(json.dumps(row) + "\n" for row in self._earlier_rows))
            write_text(self.folder / CONFIG, json.dumps(dataclasses.asdict(self.config), indent=2) + "\n")
            collect_environment(self.layout.device).write(self.folder / "environment.json")
            self._earlier_rows = None
        with path.open("a", encoding="utf-8") as file:
            file.write(lines)
        if message:
            print(f"[{self.step}/{self.config.steps}] {message}", file=sys.stderr, flush=True)


def read_metrics(path: Path) -> Rows:
    """The rows of a metrics file, if it exists, without a cut-off last line. ValueError if another is not JSON."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise ValueError(f"{path} must have JSON on each line: {error}") from error
