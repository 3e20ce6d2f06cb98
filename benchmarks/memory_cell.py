"""One configuration whose memory is measured, in this process: its passes, and what they allocate."""

from __future__ import annotations

import importlib.util
import pickle
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.suite import columns_here
from benchmarks.training_cell import TrainingStep, make_batch, make_step
from benchmarks.training_models import FLASH, NAIVE, SDPA, attn_of, config_of, make_model, why_not
from cs336_systems.profiling.allocations import Allocation, History, read_history
from cs336_systems.profiling.categories import Kind, bytes_at, category_of, kinds, largest_by_category, largest_first
from cs336_systems.profiling.recording import EXPLAINED, AllocationRecorder, Recording
from cs336_systems.profiling.saved import activation_bytes, by_operation, saved_tensors
from cs336_systems.profiling.sweep import Row, Status
from cs336_systems.profiling.timeline import draw_timeline, timeline_of
from cs336_systems.profiling.timeline_html import timeline_page
from cs336_systems.profiling.timing import consecutive_ms
from cs336_systems.profiling.usage import BACKWARD, FORWARD, OPTIMIZER, PassMemory, cuda_memory_of, tracked_memory_of
from cs336_systems.training.estimate import MemoryEstimate, estimate_memory
from cs336_systems.transformer import TransformerConfig, swiglu

FORWARD_ONLY, TRAINED, STEP = "forward", "forward+backward", "step"
MODES = (FORWARD_ONLY, TRAINED, STEP)
FLOAT32, MIXED = "float32", "mixed"
DTYPES = (FLOAT32, MIXED)
"""Of products: the parameters' float32, or bfloat16 by autocast."""
MODELS = (NAIVE, SDPA, FLASH)
"""Those of `training_models` that run eagerly: under a recording nothing is compiled."""
LARGEST = 10
"""How many kinds of allocations are listed."""
PICTURES, SNAPSHOTS = "timelines", "snapshots"
"""Folders."""


@dataclass(frozen=True)
class Cell:
    """What runs: a model's sizes, its batch, which passes in which dtype, and how many blocks are recomputed together.

    ``sizes`` are attributes of `TransformerConfig` that are others than the preset's, with vocab_size and
    context_length; ``every`` is the model's checkpoint_every.
    """

    preset: str
    suite: str
    sizes: tuple[tuple[str, int], ...]
    batch: int
    model: str
    mode: str
    dtype: str
    every: int | None = None

    @property
    def key(self) -> str:
        """The cell in words, which no other has."""
        others = ", ".join(f"{name} {size}" for name, size in self.sizes if name != "context_length")
        kept = "" if self.every is None else f", recomputed by {self.every}"
        sizes = f"{self.preset} ({self.suite}, {others}), {self.batch} × {self.context}"
        return f"{sizes}, {self.model}, {self.mode}, {self.dtype}{kept}"

    @property
    def slug(self) -> str:
        """The key as the name of a file."""
        return re.sub(r"[^a-z0-9.]+", "-", self.key.lower().replace("×", "x")).strip("-")

    @property
    def context(self) -> int:
        """Tokens of a sequence."""
        return dict(self.sizes)["context_length"]

    @property
    def config(self) -> TransformerConfig:
        """The model's sizes, and its attention."""
        return config_of(self.preset, self.suite, attn_of(self.model), **dict(self.sizes))

    def estimate(self, device_type: str) -> MemoryEstimate:
        """What the trainer estimates for a step. CUDA's kernels of norm and SwiGLU keep less than other devices'."""
        return estimate_memory(
            self.config,
            self.batch,
            autocast=self.dtype == MIXED,
            recompute_every=self.every,
            fused_norm=device_type == "cuda",
            fused_ffn=swiglu.has_kernels(device_type),
        )


@dataclass(frozen=True)
class Conditions:
    """How cells are measured, the same for all; pictures and snapshots go to ``folder``."""

    device: torch.device
    steps: int
    tf32: bool
    seed: int
    folder: Path
    snapshots: bool


def prepared(cell: Cell, device: torch.device, seed: int) -> tuple[TrainingStep, tuple[Tensor, Tensor]]:
    """The step of a cell, of which nothing has run yet, and its tokens and targets."""
    torch.manual_seed(seed)
    config = cell.config
    model: Any = make_model(cell.model, config, device)
    model.checkpoint_every = cell.every
    tokens, targets = make_batch(config, cell.batch, device, seed)

    def forward() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=cell.dtype == MIXED):
            loss: Tensor = model(tokens, targets=targets, count=float(targets.numel()))
        return loss

    return make_step(forward, model), (tokens, targets)


def one_pass(step: TrainingStep, mode: str, phase: Callable[[str], object] = lambda name: None) -> None:
    """Run what the mode says once; ``phase`` is told what begins. Without an update, gradients are left."""
    phase(FORWARD)
    with torch.set_grad_enabled(mode != FORWARD_ONLY):
        loss = step.forward()
    if mode == FORWARD_ONLY:
        return
    phase(BACKWARD)
    step.backward(loss)
    del loss
    if mode == STEP:
        phase(OPTIMIZER)
        step.update()


def recorded(step: TrainingStep, mode: str, device: torch.device) -> Recording:
    """A recording of a pass; of a whole step two, in the first of which the optimizer allocates its state."""
    with AllocationRecorder(step.model, device, step.optimizer) as recorder:
        for _ in range(2 if mode == STEP else 1):
            one_pass(step, mode, recorder.phase)
    step.optimizer.zero_grad()
    return recorder.recording


def usage_of(step: TrainingStep, mode: str, history: History, device: torch.device) -> PassMemory:
    """Memory of a pass like the recorded ones: on CUDA of one more, that nothing watches."""
    if device.type != "cuda":
        return tracked_memory_of(history)
    backward = None if mode == FORWARD_ONLY else step.backward
    try:
        return cuda_memory_of(step.forward, backward, step.update if mode == STEP else None, device)
    finally:
        step.optimizer.zero_grad()


def described(allocation: Allocation, module: str | None = None, times: int = 1) -> Row:
    """An allocation as columns, or so many of a kind."""
    origin = allocation.origin
    return {
        "category": category_of(allocation),
        "phase": allocation.phase,
        "bytes": allocation.bytes,
        "times": times,
        "module": module if module is not None else origin.module if origin else "",
        "operation": origin.operation if origin else "",
        "place": origin.place if origin else "",
    }


def largest_kinds(history: History) -> list[Kind]:
    """The largest allocations, those of a kind as one."""
    return kinds(largest_first(history.allocations))[:LARGEST]


def allocation_columns(history: History) -> Row:
    """The columns of a row that say what was allocated."""
    event, peak = history.peak()
    return {
        "recorded_peak_bytes": peak,
        "at_peak": bytes_at(history, event),
        "largest_of_category": [described(each) for each in largest_by_category(history).values()],
        "largest": [described(kind.first, kind.module, kind.times) for kind in largest_kinds(history)],
    }


def saved_columns(step: TrainingStep, inputs: tuple[Tensor, Tensor], cell: Cell, device: torch.device) -> Row:
    """The columns of a row that say what autograd keeps: of all, of one block, and of each operation in it."""
    config = cell.config
    saved = saved_tensors(step.forward, step.model, inputs)
    # The first block keeps what the others do; the second shows that its input is another's output.
    block = f"layers.{min(1, config.num_layers - 1)}"
    estimate = cell.estimate(device.type)
    return {
        "saved_bytes": activation_bytes(saved),
        "parameter_copies_bytes": sum(each.bytes for each in saved if each.of_parameter),
        "block_bytes": activation_bytes(saved, block) if cell.every is None else None,
        "block_estimate_bytes": estimate.blocks // config.num_layers if cell.every is None else None,
        "operations": [asdict(each) for each in by_operation(saved, block)] if cell.every is None else [],
    }


def analytic_columns(cell: Cell, device: torch.device) -> Row:
    """The columns of a row that follow from sizes alone."""
    config = cell.config
    keeps = cell.mode != FORWARD_ONLY and config.attn == "naive"
    layers = min(cell.every or config.num_layers, config.num_layers) if keeps else 0
    quadratic = cell.batch * config.num_heads * cell.context**2 * (2 if cell.dtype == MIXED else 4)
    return {
        "parameters": config.parameters(),
        "num_layers": config.num_layers,
        "residual_bytes": cell.batch * cell.context * config.d_model * 4,
        "quadratic_bytes": quadratic,
        "quadratic_kept_bytes": quadratic * layers,
        "estimate_bytes": cell.estimate(device.type).total if cell.mode == STEP else None,
    }


def keep_pictures(cell: Cell, recording: Recording, history: History, conditions: Conditions) -> None:
    """Write the timeline as a page, as a picture where matplotlib is there, and the snapshot."""
    folder = conditions.folder / PICTURES
    folder.mkdir(parents=True, exist_ok=True)
    timeline = timeline_of(history)
    notes = [EXPLAINED[recording.method], "Time is counted in allocations and frees."]
    page = timeline_page(timeline, largest_kinds(history), title=cell.key, notes=notes)
    (folder / f"{cell.slug}.html").write_text(page, encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is not None:
        draw_timeline(folder / f"{cell.slug}.png", timeline, title=cell.key)
    if conditions.snapshots:
        raw = conditions.folder / SNAPSHOTS
        raw.mkdir(parents=True, exist_ok=True)
        with (raw / f"{cell.slug}.pickle").open("wb") as file:
            pickle.dump(recording.snapshot, file)


def measured(cell: Cell, conditions: Conditions) -> Row:
    """The columns of a cell that can be measured."""
    device = conditions.device
    step, inputs = prepared(cell, device, conditions.seed)
    # What libraries allocate once and keep is there before the recording; the optimizer's state is not yet.
    one_pass(step, FORWARD_ONLY if cell.mode == FORWARD_ONLY else TRAINED)
    step.optimizer.zero_grad()
    recording = recorded(step, cell.mode, device)
    history = read_history(recording)
    usage = usage_of(step, cell.mode, history, device)

    def whole_pass() -> None:
        one_pass(step, cell.mode)
        step.optimizer.zero_grad()

    times = consecutive_ms(whole_pass, conditions.steps, device=device)
    found = {
        "status": Status.OK.value,
        "reason": "",
        **{name: value for name, value in asdict(usage).items() if name != "method"},
        "memory_method": usage.method,
        "recording_method": recording.method,
        "median_ms": times.median,
        "min_ms": times.minimum,
        **allocation_columns(history),
    }
    keep_pictures(cell, recording, history, conditions)
    if cell.mode != FORWARD_ONLY:
        found |= saved_columns(step, inputs, cell, device)
    return found


def measure_cell(job: tuple[Cell, Conditions]) -> Row:
    """The columns of a cell's row, for a process of its own; what cannot be measured is a status."""
    cell, conditions = job
    refusal = partial(why_not, cell.model, cell.config, conditions.device)
    measure = partial(measured, cell, conditions)
    return columns_here(measure, device=conditions.device, tf32=conditions.tf32, refusal=refusal)
