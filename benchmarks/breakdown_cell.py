"""One configuration of the breakdown, measured in this process: its time, and then where it goes."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.suite import columns_here
from benchmarks.training_cell import Cell as Work
from benchmarks.training_cell import TrainingStep, make_batch, make_step
from benchmarks.training_models import BLOCKS, WHOLE, compiled, make_model, why_not
from cs336_systems.profiling.flops import Pass, attention_parts_flops
from cs336_systems.profiling.kernel_classes import CLASSES, MATMUL
from cs336_systems.profiling.regions import OPTIMIZER, PARTS, SCORES, SOFTMAX, VALUES, Regions, region_of_module
from cs336_systems.profiling.shares import (
    KernelStatistics,
    Totals,
    class_shares,
    kernel_statistics,
    region_times,
    total_ms,
)
from cs336_systems.profiling.sweep import Row, Status
from cs336_systems.profiling.timing import consecutive_ms, synchronize
from cs336_systems.profiling.trace import read_trace, record_trace, require_kernels
from cs336_systems.transformer import TransformerConfig

FORWARD, BOTH, STEP = "forward", "forward+backward", "step"
MODES = {
    FORWARD: "the loss, under no_grad",
    BOTH: "the loss and its gradients",
    STEP: "the same, the gradients limited, and AdamW's update",
}
"""By name, what is measured."""
PASSES_OF = {
    FORWARD: ("forward",),
    BOTH: ("forward", "backward"),
    STEP: ("forward", "backward", "optimizer"),
}
FLOAT32, BFLOAT16 = "float32", "bfloat16"
DTYPES = (FLOAT32, BFLOAT16)
"""What products are computed in: as the parameters are, or by autocast."""

KERNELS, OPERATORS = "kernels on the device", "operators on the host"
_BELOW_BLOCKS = re.compile(r"(^|\.)layers\.\d+\.")


@dataclass(frozen=True)
class Cell:
    """A model with its work, what it computes in, and which passes."""

    work: Work
    dtype: str
    mode: str

    @property
    def key(self) -> str:
        """The cell in words, which no other has."""
        return f"{self.work.key}, {self.dtype}, {self.mode}"


@dataclass(frozen=True)
class Conditions:
    """How cells are measured, the same for all.

    Attributes:
        warmup, timed: steps before those that are timed, and these.
        profiled: steps in the trace.
        traces: the folder where traces are kept; None for nowhere.
        nsys: run the ranges for Nsight Systems in place of torch.profiler.
    """

    device: torch.device
    warmup: int
    timed: int
    profiled: int
    tf32: bool
    seed: int
    traces: Path | None = None
    nsys: bool = False


def prepared(cell: Cell, device: torch.device, seed: int) -> TrainingStep:
    """The parts of a cell's step, of which nothing has run and nothing is compiled yet."""
    torch.manual_seed(seed)
    work = cell.work
    model = make_model(work.model, work.config, device)
    called = compiled(model, work.compiles)
    tokens, targets = make_batch(work.config, work.batch, device, seed)

    def forward() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=cell.dtype == BFLOAT16):
            loss: Tensor = called(tokens, targets=targets, count=float(targets.numel()))
        return loss

    return make_step(forward, model)


def in_mode(step: TrainingStep, mode: str, regions: Regions | None = None) -> Callable[[], None]:
    """One call of what a mode measures, with the ranges of its passes where there are regions."""

    def during(name: str) -> AbstractContextManager[object]:
        return nullcontext() if regions is None else regions.during(name)

    def optimizer() -> AbstractContextManager[object]:
        return nullcontext() if regions is None else regions.range(OPTIMIZER)

    def call() -> None:
        with during("forward"), torch.set_grad_enabled(mode != FORWARD):
            loss = step.forward()
        if mode == FORWARD:
            return
        with during("backward"):
            step.backward(loss)
        if mode == STEP:
            with during("optimizer"), optimizer():
                step.update()
        else:
            step.optimizer.zero_grad()

    return call


def regions_of(model: nn.Module, compiles: str, *, nvtx: bool) -> Regions:
    """The ranges of a model, as far as it is not compiled."""
    if compiles == WHOLE:
        return Regions(nn.Module(), nvtx=nvtx)

    def name_of(path: str, module: nn.Module) -> str | None:
        hidden = compiles == BLOCKS and _BELOW_BLOCKS.search(path)
        return None if hidden else region_of_module(path, module)

    return Regions(model, name_of, nvtx=nvtx)


def measure_cell(job: tuple[Cell, Conditions]) -> Row:
    """The columns of a cell's row, for a process of its own; what cannot be measured is a status."""
    cell, conditions = job
    refusal = partial(why_not, cell.work.model, cell.work.config, conditions.device)

    def measure() -> Row:
        return {"status": Status.OK.value, "reason": "", **_measured(cell, conditions)}

    return columns_here(measure, device=conditions.device, tf32=conditions.tf32, refusal=refusal)


def _measured(cell: Cell, conditions: Conditions) -> Row:
    device = conditions.device
    step = prepared(cell, device, conditions.seed)
    call = in_mode(step, cell.mode)
    for _ in range(conditions.warmup):
        call()
    synchronize(device)
    times = consecutive_ms(call, conditions.timed, device=device)
    columns: Row = {
        "median_ms": times.median,
        "mean_ms": sum(times.milliseconds) / len(times.milliseconds),
        "std_ms": times.standard_deviation,
        "min_ms": times.minimum,
        "max_ms": times.maximum,
    }
    with regions_of(step.model, cell.work.compiles, nvtx=device.type == "cuda") as regions:
        call = in_mode(step, cell.mode, regions)
        if conditions.nsys:
            call()
            with torch.cuda.profiler.profile():
                for _ in range(conditions.profiled):
                    call()
                torch.cuda.synchronize(device)
            return columns
        return columns | _profiled(cell, call, conditions, times.median)


def _profiled(cell: Cell, call: Callable[[], None], conditions: Conditions, unprofiled_ms: float) -> Row:
    """What the profiler says, and how much longer a step took under it."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if conditions.traces is None else conditions.traces
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / trace_name(cell)
        times = record_trace(call, path, device=conditions.device, steps=conditions.profiled)
        work = read_trace(path)
    require_kernels(work, conditions.device)
    steps = conditions.profiled
    sums = region_times(work, steps=steps)
    kernels = kernel_statistics(work, steps=steps)
    by_pass = {name: kernel_statistics(work, steps=steps, of_pass=name) for name in PASSES_OF[cell.mode]}
    on_device = any(one.on_device for one in work)
    everything = total_ms(sums)
    return {
        "profiled_ms": times.median,
        "profiler_cost": times.median / unprofiled_ms,
        "measured": KERNELS if on_device else OPERATORS,
        "work_ms": everything,
        "busy": everything / unprofiled_ms if on_device else None,
        "instances": sum(kernel.instances for kernel in kernels),
        **columns_of_shares(sums, PASSES_OF[cell.mode]),
        **columns_of_tops(kernels, by_pass),
        **columns_of_parts(cell.work.config, cell.work.batch, cell.mode, sums),
        "kernels": [dataclasses.asdict(one) for each in (kernels, *by_pass.values()) for one in each],
        "totals": sums,
    }


def trace_name(cell: Cell) -> str:
    """The file of a cell's trace."""
    return re.sub(r"[^\w.+]+", "-", cell.key) + ".json"


def columns_of_shares(sums: Totals, passes: tuple[str, ...]) -> Row:
    """The share of each class in all that was measured, and that of matrix products in each pass."""
    found = class_shares(sums)
    columns: Row = {share_column(name): found.get(name, 0.0) for name in CLASSES}
    for name in passes:
        columns[f"{share_column(MATMUL)}_{name}"] = class_shares(sums, of_pass=name).get(MATMUL, 0.0)
    return columns


def share_column(of_class: str) -> str:
    """The column of a class."""
    return "share_" + of_class.replace(" ", "_")


def columns_of_tops(kernels: list[KernelStatistics], by_pass: dict[str, list[KernelStatistics]]) -> Row:
    """The kernel with the most time, in all and in each pass, and the first that is no matrix product."""
    columns: Row = {"top": _top(kernels), "top_no_product": _top([k for k in kernels if k.of_class != MATMUL])}
    return columns | {f"top_{name}": _top(found) for name, found in by_pass.items()}


def _top(kernels: list[KernelStatistics]) -> str | None:
    return kernels[0].name if kernels else None


def columns_of_parts(config: TransformerConfig, batch: int, mode: str, sums: Totals) -> Row:
    """Times and operations of a step's naive attention, part by part; none where it is not told apart.

    The ratios are those of softmax to both products: of their kernels' times, without what else runs beside them.
    """
    if total_ms(sums, region=SOFTMAX) == 0.0:
        return {}
    which: Pass = "forward" if mode == FORWARD else "both"
    length = config.context_length
    flops = attention_parts_flops(batch, config.num_heads, length, length, config.d_head, which=which)
    products = sum(total_ms(sums, region=region, of_class=MATMUL) for region in (SCORES, VALUES))
    columns: Row = {}
    for region in PARTS:
        name = region.rpartition(" ")[2]
        columns[f"{name}_ms"] = total_ms(sums, region=region)
        columns[f"{name}_flops"] = config.num_layers * getattr(flops, name)
    return columns | {
        "products_ms": products,
        "softmax_over_products_time": total_ms(sums, region=SOFTMAX) / products if products else None,
        "softmax_over_products_flops": flops.softmax_over_products,
    }
