"""What each process of a group does that trains a model with data parallelism, for data_parallel.py."""

from __future__ import annotations

import gc
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.lib.harness import Case, Row
from benchmarks.lib.models import SIZES, file_of
from benchmarks.lib.process_groups import GroupTimes, time_together
from benchmarks.lib.results import mebibytes
from benchmarks.lib.steps import finite_loss, make_batch, step_columns
from benchmarks.lib.tables import COLOURS, new_figure
from benchmarks.parts.data_parallel_modes import AFTER_BACKWARD, Training, make_training, shares_of
from cs336_systems.parallel import Layout
from cs336_systems.profiling.memory import release_memory
from cs336_systems.profiling.overlap import Overlap, read_overlap
from cs336_systems.profiling.timing import synchronize
from cs336_systems.profiling.trace import record_trace
from cs336_systems.transformer import TransformerConfig

PHASES = ("forward", "backward", "communication", "optimizer")


@dataclass(frozen=True)
class DataParallelCase(Case):
    """A training step of one or several processes, each with sequences of its own.

    Attributes:
        parallel: how they train one model, of `data_parallel_modes.MODES`.
        bucket_mb: MiB of gradients in a bucket, for mode "bucketed".
        dtype: in which the model computes; parameters are float32.
        batch: sequences of each process.
    """

    model: str
    suite: str
    config: TransformerConfig
    parallel: str
    bucket_mb: float | None
    processes: int
    dtype: str
    batch: int
    warmup_steps: int

    @property
    def columns(self) -> Row:
        """The fields, with the sizes of the model in place of its config."""
        row = {name: value for name, value in vars(self).items() if name != "config"}
        sizes = {name: getattr(self.config, name) for name in SIZES}
        return row | {"length": self.config.context_length, **sizes, "parameters": self.config.parameters()}

    @property
    def name(self) -> str:
        """The case in one line."""
        work = f"{self.model} ({self.suite}, {self.config.vocab_size}) {self.batch}x{self.config.context_length}"
        bucket = "" if self.bucket_mb is None else f" {self.bucket_mb:g} MiB"
        return f"{work} {self.dtype} {self.parallel}{bucket} on {self.processes} warmup={self.warmup_steps}"

    @property
    def state_bytes(self) -> dict[str, int]:
        """By formula, what each process holds at each of `data_parallel_modes.STAGES`."""
        return shares_of(self.parallel).state_bytes(self.config.parameters(), self.processes)


class MemoryStages:
    """Bytes in tensors, and the most since the stage before, on CUDA; nothing elsewhere, where nobody counts."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.sizes = device, dict[str, int]()
        release_memory(device)
        self._reset()

    def note(self, stage: str) -> None:
        """A stage has come."""
        synchronize(self._device)
        if self._device.type == "cuda":
            self.sizes[f"{stage}_peak_mib"] = torch.cuda.max_memory_allocated(self._device)
            gc.collect()
            self.sizes[f"{stage}_held_mib"] = torch.cuda.memory_allocated(self._device)
        self._reset()

    def _reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)


def make_phases(
    training: Training, tokens: Tensor, targets: Tensor, losses: list[Tensor]
) -> dict[str, Callable[[], object]]:
    """The phases of a step, in order. Each loss is appended to ``losses``, without its graph."""
    graph: list[Tensor] = []

    def forward() -> None:
        graph.append(training.loss(tokens, targets))
        losses.append(graph[0].detach())

    def optimizer() -> None:
        training.optimizer.step()
        training.optimizer.zero_grad()

    phases: dict[str, Callable[[], object]] = {"forward": forward, "backward": lambda: graph.pop().backward()}
    if training.finish is not None:
        phases["communication"] = training.finish
    return phases | {"optimizer": optimizer}


def measure(case: DataParallelCase, options: Namespace, layout: Layout) -> Row:
    """The columns of the case, from what all processes measured; each process calls this.

    The first step, in which memory is read, is none of the timed ones, nor of the warm-up.
    """
    config, losses = case.config, list[Tensor]()
    whole = make_batch(config, case.batch * layout.size, layout.device, options.seed)
    tokens, targets = (half.chunk(layout.size)[layout.rank].clone() for half in whole)
    memory = MemoryStages(layout.device)
    torch.manual_seed(options.seed)
    training = make_training(case.parallel, config, layout, dtype=case.dtype, bucket_mb=case.bucket_mb)
    memory.note("init")
    phases = make_phases(training, tokens, targets, losses)
    for name in phases:
        if name != "optimizer":
            phases[name]()
    memory.note("before_step")
    training.optimizer.step()
    memory.note("after_step")
    training.optimizer.zero_grad()
    times = time_together(phases, layout, steps=options.steps, most_steps=options.most_steps, warmup=case.warmup_steps)
    overlap = overlap_columns(phases, case, options, layout) if options.overlap or options.trace else {}
    # Of a step that all cases with as much warm-up take, however many more are timed.
    ends = [finite_loss(losses[index], case.dtype) or 0.0 for index in (0, case.warmup_steps + options.steps)]
    return {
        **time_columns(times, case),
        **dict(zip(("first_loss", "last_loss"), map(_mean, zip(*layout.all_gather(ends), strict=True)), strict=True)),
        **highest(layout.all_gather(memory.sizes), times.peak_bytes_of_each),
        **overlap,
    }


def overlap_columns(
    phases: Mapping[str, Callable[[], object]], case: DataParallelCase, options: Namespace, layout: Layout
) -> Row:
    """Profile a step in each process: milliseconds of collectives, and the share in which computation runs too.

    Both are of rank 0, whose GPU is drawn in timelines/ of the results. There are none on a CPU.
    """

    def step() -> None:
        for phase in phases.values():
            phase()

    suffix = f"{layout.rank}.json"
    with tempfile.TemporaryDirectory() as temporary:
        path = file_of(options.out if options.trace else Path(temporary), "traces", case, suffix)
        record_trace(step, path, device=layout.device)
        if layout.device.type != "cuda" or not layout.is_main:
            return {}
        overlap = read_overlap(path)
    if options.plots:
        draw_overlap(file_of(options.out, "timelines", case, "png"), overlap, case.name)
    ran, hidden = overlap.communication_ms, overlap.hidden_ms
    return {"collectives_ms": ran, "share_hidden": hidden / ran if ran else None}


def draw_overlap(path: Path, overlap: Overlap, title: str) -> None:
    """Draw when a GPU computed and when collectives ran, a line each."""
    with new_figure(path, figsize=(10, 1.9)) as (_, axes):
        for line, (name, spans) in enumerate(vars(overlap).items()):
            bars = [(begin, end - begin) for begin, end in spans]
            axes.broken_barh(bars, (line - 0.4, 0.8), facecolors=COLOURS[3 * line + 2], label=name)
        axes.set_yticks(range(2), labels=[*vars(overlap)])
        axes.set_xlabel("ms")
        axes.set_title(title, fontsize=9)


def time_columns(times: GroupTimes, case: DataParallelCase) -> Row:
    """The times of the step and of its phases, the share of communication, and tokens per second of all processes."""
    row = step_columns(times.step) | {"host_bound": times.host_bound}
    for name in PHASES:
        row |= step_columns(times.phases[name], f"{name}_") if name in times.phases else {}
    waits = row["communication_median_ms"] if case.parallel in AFTER_BACKWARD else None
    tokens = case.processes * case.batch * case.config.context_length
    return row | {
        "share_communication": None if waits is None else waits / row["median_ms"],
        "tokens_per_second": 1e3 * tokens / row["median_ms"],
    }


def highest(each: Sequence[Mapping[str, int]], peaks: Sequence[int | None]) -> Row:
    """Columns in MiB, of the process that has most: at each stage of the first step, and in the timed steps."""
    sizes: dict[str, int | None] = {name: max(of_rank[name] for of_rank in each) for name in each[0]}
    sizes["peak_mib"] = max((peak for peak in peaks if peak is not None), default=None)
    return mebibytes(**sizes)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
