"""Where the memory of a model's step goes: forward, forward and backward, and whole steps, by dtype and category.

    python benchmarks/memory.py                                             # models × lengths × modes × dtypes
    python benchmarks/memory.py --models large --lengths 128 256 512 2048 --providers naive flash
    python benchmarks/memory.py --models medium --lengths 1024 --modes step --recompute-every 1 2 3 4 6 8 12 24
    python benchmarks/memory.py --models tiny --lengths 128 --device cpu

docs/measuring/memory.md says what is measured, how, and what the columns mean.
"""

from __future__ import annotations

import argparse
import dataclasses
import pickle
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pandas as pd
import torch
from torch import Tensor

from benchmarks.lib import flags, harness, models
from benchmarks.lib.harness import Context, Row
from benchmarks.lib.models import FORWARD, FORWARD_BACKWARD, STEP, ModelCase
from benchmarks.lib.results import mebibytes
from benchmarks.lib.steps import TrainingStep, make_step
from benchmarks.lib.tables import markdown, sections
from benchmarks.parts.memory_tables import LARGEST, PEAK, draw_timeline, plots, size_columns, tables
from cs336_systems.profiling import MemoryRecorder, activation_bytes, measure_memory, saved_tensors
from cs336_systems.profiling.memory import MIB
from cs336_systems.profiling.saved import SavedTensor
from cs336_systems.profiling.steps import time_steps

_LISTED = 10
"""How many allocations are listed; those that differ only in the layer count as one."""
_ALLOCATION = ["category", "phase", "module", "operation", "statement"]


@dataclass(frozen=True)
class MemoryCase(ModelCase):
    """A case with activation checkpointing: the blocks of each group that is recomputed; None for none."""

    recompute_every: int | None = None

    @property
    def name(self) -> str:
        """The case in one line."""
        recomputed = "" if self.recompute_every is None else f" recompute={self.recompute_every}"
        return super().name.rpartition(" warmup=")[0] + recomputed


_USUAL = "--providers naive --dtypes fp32 bf16 --modes forward forward+backward step --no-tf32"
_ON_A_GPU = "--models small medium large xl 2.7B --lengths 128 256 512 --batch 4 --steps 5"
_WITHOUT = "--models tiny --lengths 128 --batch 2 --steps 2"


def make_parser(arguments: Sequence[str] | None = None) -> argparse.ArgumentParser:
    gpu = flags.wants_gpu(arguments)
    parser = models.make_parser(__doc__, f"{_USUAL} {_ON_A_GPU if gpu else _WITHOUT}")
    add = parser.add_argument
    text = "steps at the longest length with groups of this many blocks recomputed; 0: none"
    every = [1, 2, 3, 4, 6] if gpu else [1, 2]
    add("--recompute-every", **flags.several(flags.count), default=every, metavar="K", help=f"{text} ({every})")
    add("--snapshots", action=argparse.BooleanOptionalAction, default=True, help="keep pickles for torch's viewer")
    return parser


def memory_cases(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[MemoryCase]:
    """The combinations of what the options name, and then the steps with recomputation, at the longest length."""
    cases = [MemoryCase(**vars(case)) for case in models.model_cases(parser, options)]
    longest = {case.model: case.length for case in sorted(cases, key=lambda case: case.length)}
    return cases + [
        dataclasses.replace(case, recompute_every=every)
        for case in cases
        if case.mode == STEP and case.length == longest[case.model] and case.provider != models.LLAMA
        for every in sorted({*options.recompute_every})
        if 0 < every <= case.config.num_layers
    ]


def measure(case: MemoryCase, context: Context) -> Row:
    """The memory of a case, by the allocator and from a recording; writes the files of the case."""
    options = context.options
    skipped = models.smaller_out_of_memory(case, context.rows)
    if skipped is not None:
        return skipped.columns
    device: torch.device = options.device
    step, inputs = make_step(case, device, options.seed, recompute_every=case.recompute_every)
    # Libraries allocate workspaces before the recording. The optimizer has no state yet.
    step.run(FORWARD if case.mode == FORWARD else FORWARD_BACKWARD)
    step.optimizer.zero_grad()
    with MemoryRecorder(step.model, device, step.optimizer) as recorder:

        def phase(name: str) -> AbstractContextManager[object]:
            recorder.phase(name)
            return nullcontext()

        for _ in range(2 if case.mode == STEP else 1):  # the first step allocates the optimizer's state
            step.run(case.mode, phase)
    step.optimizer.zero_grad()
    row = usage_columns(step, case.mode, recorder, device)

    def whole() -> None:
        step.run(case.mode)
        step.optimizer.zero_grad()

    times = time_steps({"step": whole}, device=device, steps=options.steps).step
    row |= {"median_ms": times.median, "min_ms": times.minimum} | size_columns(case)
    timeline, allocations = recorder.timeline(), recorder.table()
    peak = timeline.loc[timeline.sum(axis="columns").idxmax()]
    row |= {f"{PEAK}{category}": int(size) / MIB for category, size in peak.items() if size}
    largest = allocations[allocations["begin"] > 0].groupby("category").bytes.max()
    row |= {f"{LARGEST}{category}": int(size) / MIB for category, size in largest.items()}
    saved = saved_tensors(step.forward, step.model, inputs) if case.mode != FORWARD else []
    row |= saved_columns(saved, case)
    file = partial(models.file_of, options.out, case=case)
    file("details", suffix="md").write_text(details(case, allocations, saved), encoding="utf-8")
    if options.snapshots:
        file("snapshots", suffix="pickle").write_bytes(pickle.dumps(recorder.snapshot()))
    if options.plots:
        draw_timeline(file("timelines", suffix="png"), timeline, recorder.phases, case.name)
    return row


def usage_columns(step: TrainingStep, mode: str, recorder: MemoryRecorder, device: torch.device) -> Row:
    """On CUDA the allocator's figures of one more step without the recorder; elsewhere those of the recording.

    The peak is with what was allocated before the step.
    """
    if device.type == "cuda":
        backward = None if mode == FORWARD else Tensor.backward
        usage = measure_memory(step.forward, backward, step.update if mode == STEP else None, device=device)
        step.optimizer.zero_grad()
    else:
        usage = recorder.usage()
    before, peak = usage.before_bytes, usage.peak_bytes
    whole = None if before is None or peak is None else before + peak
    sizes = {"before_mib": before, "peak_mib": whole, "held_mib": usage.held_bytes}
    return mebibytes(**sizes, reserved_mib=usage.reserved_bytes) | {"memory_method": usage.method}


def saved_columns(saved: Sequence[SavedTensor], case: MemoryCase) -> Row:
    """What autograd saves of activations, of copies of parameters, and in one block."""
    if not saved:
        return {}
    copies = sum(each.bytes for each in saved if each.of_parameter)
    block = None if case.recompute_every else activation_bytes(saved, block_of(case))
    return mebibytes(saved_mib=activation_bytes(saved), parameter_copies_mib=copies, block_mib=block)


def block_of(case: MemoryCase) -> str:
    """The path of the second block, whose input is the output of another one."""
    return f"layers.{min(1, case.config.num_layers - 1)}"


def details(case: MemoryCase, allocations: pd.DataFrame, saved: Sequence[SavedTensor]) -> str:
    """Markdown: the largest allocations, and what each operation of one block saves for the backward."""
    layer = allocations["module"].str.replace(r"\blayers\.\d+", "layers.*", regex=True)
    new = allocations.assign(module=layer, MiB=allocations["bytes"] / MIB)[allocations["begin"] > 0]
    kinds = new.groupby(["MiB", *_ALLOCATION], sort=False).size().rename("count").reset_index()
    parts = {"Largest allocations": markdown(kinds.nlargest(_LISTED, "MiB"))}
    prefix = f"{block_of(case)}."
    block = [
        {"module": each.module, "statement": each.statement.source, "MiB": each.bytes / MIB}
        for each in saved
        if f"{each.module}.".startswith(prefix) and not each.of_parameter
    ]
    if block and not case.recompute_every:
        table = pd.DataFrame(block).groupby(["module", "statement"], sort=False)["MiB"].agg(["sum", "count"])
        table = table.assign(share=table["sum"] / table["sum"].sum()).rename(columns={"sum": "MiB"}).reset_index()
        parts["Saved for the backward by one block"] = markdown(table)
    return f"# {case.name}\n\n{sections(parts)}\n"


PROGRAM = harness.Program(
    name="memory",
    title="Memory",
    measure=measure,
    tables=tables,
    plots=plots,
    settings=("suite", "steps", "tf32", "seed"),
    notes=(
        "memory_method `cuda allocator`: the allocator's counters, in a step without the recorder",
        "memory_method `tracked tensors`: the storages of the tensors that operations return, without workspaces",
        "categories, timelines and the largest allocations are from a recording of the second kind on every device",
        "peak_mib is with what was allocated before; held_mib is allocated by the forward and held for the backward",
        "largest allocations and what a block saves: details/; memory over time: timelines/; all in MiB",
    ),
    memory=models.least_memory,
    preload=("matplotlib.pyplot",),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(arguments)
    options = flags.parse(parser, arguments)
    return harness.run(PROGRAM, options, memory_cases(parser, options))


if __name__ == "__main__":
    sys.exit(main())
