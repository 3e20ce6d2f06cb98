"""Data-parallel training as the course builds it, next to torch's: time of a step, its communication, and memory.

    python benchmarks/data_parallel.py                                          # every mode, on 1 and on all GPUs
    python benchmarks/data_parallel.py --models medium --lengths 256 --parallel none naive flat overlapped
    python benchmarks/data_parallel.py --parallel bucketed --bucket-mb 1 10 100 1000
    python benchmarks/data_parallel.py --parallel flat overlapped torch-ddp --overlap
    python benchmarks/data_parallel.py --device cpu --models tiny --processes 1 2 4

Each case has a group of processes, one for each GPU: NCCL on GPUs, gloo on a CPU.
docs/measuring/data_parallel.md says what is measured, and what the columns mean.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.lib import flags, harness, models
from benchmarks.lib.harness import Context, Row
from benchmarks.lib.process_groups import require_group_device, run_group, too_few_gpus, unsupported
from benchmarks.lib.results import mebibytes
from benchmarks.lib.steps import most_steps_of
from benchmarks.parts import data_parallel_process
from benchmarks.parts.data_parallel_modes import BUCKETED, MODES, NONE, group_mode
from benchmarks.parts.data_parallel_process import DataParallelCase
from benchmarks.parts.data_parallel_tables import plots, tables
from cs336_systems.transformer import PRESETS

DTYPES = ("float32", "bfloat16")
_USUAL = "--batch 4 --warmup-steps 3 --steps 10 --most-steps --tf32"
_ON_A_GPU = "--models xl --lengths 512 --dtypes fp32 bf16"
_WITHOUT = "--models tiny --lengths 64 --dtypes fp32"


def make_parser(arguments: Sequence[str] | None = None) -> argparse.ArgumentParser:
    on_gpu = flags.wants_gpu(arguments)
    parser = models.make_parser(__doc__, f"{_USUAL} {_ON_A_GPU if on_gpu else _WITHOUT}")
    parser.epilog = "\n".join(["parallel:", *(f"  {name}: {text}" for name, text in MODES.items())])
    add = parser.add_argument
    modes = flags.several(flags.one_of(*MODES))
    add("--parallel", **modes, default=[*MODES], metavar="MODE", help="see below (default: all)")
    text = "processes of each mode; none has 1 (default: 1 and as many as there are GPUs, or 2)"
    add("--processes", **flags.several(flags.positive), metavar="N", help=text)
    sizes = [1, 10, 100, 1000] if on_gpu else [1, 10]
    text = f"MiB of gradients in a bucket of {BUCKETED} (default: {' '.join(map(str, sizes))})"
    add("--bucket-mb", **flags.several(flags.positive), default=sizes, metavar="MB", help=text)
    text = "also profile a step: how much of its communication computation hides, and timelines/ of both; on GPUs"
    add("--overlap", action="store_true", help=text)
    add("--trace", action="store_true", help="keep the traces of such steps in traces/, for https://ui.perfetto.dev")
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, with their cases. Ends the program with a message if they do not fit together."""
    parser = make_parser(arguments)
    options = flags.parse(parser, arguments)
    flags.restrict(parser, options, dtypes=DTYPES, suite=PRESETS)
    require_group_device(parser, options.device)
    for count in options.processes or ():
        if few := too_few_gpus(count, options.device):
            parser.error(f"--processes must be at most the number of GPUs: {few}")
    gpus = torch.cuda.device_count() if options.device.type == "cuda" else 2
    options.processes = options.processes or [1, max(2, gpus)]
    options.most_steps = most_steps_of(options)
    try:
        options.cases = data_parallel_cases(options)
    except ValueError as exception:
        parser.error(str(exception))
    if not options.cases:
        parser.error(f"--processes must have 1 for --parallel {NONE}, and more for others; got {options.processes}")
    return options


def data_parallel_cases(options: argparse.Namespace) -> list[DataParallelCase]:
    """The cases; of each model one process comes first, since others are compared with it.

    Raises ValueError for unknown models.
    """
    chosen = [mode for mode in MODES if mode in options.parallel]
    groups: list[dict[str, Any]] = [
        {"parallel": mode, "bucket_mb": bucket, "processes": processes}
        for processes in sorted({*options.processes})
        for mode in chosen
        for bucket in (sorted({*options.bucket_mb}) if mode == BUCKETED else [None])
        if (mode == NONE) == (processes == 1)
    ]
    axes = models.sized_models(options), options.dtypes, options.warmup_steps, groups
    return [
        DataParallelCase(model, options.suite, config, dtype=dtype, batch=batch, warmup_steps=warmup, **group)
        for (model, config, batch), dtype, warmup, group in itertools.product(*axes)
    ]


def measure(case: DataParallelCase, context: Context) -> Row:
    """The figures of a group of processes. This process does not use a GPU."""
    options = context.options
    row = mebibytes(**{f"{stage}_predicted_mib": size for stage, size in case.state_bytes.items()})
    refused = unsupported(too_few_gpus(case.processes, options.device))
    if refused is not None:
        return row | refused.columns
    return row | run_group(data_parallel_process.measure, case, case.processes, group_mode(case.parallel), options)


PROGRAM = harness.Program(
    name="data_parallel",
    title="Data parallelism",
    measure=measure,
    tables=tables,
    plots=plots,
    settings=("suite", "steps", "tf32", "seed"),
    notes=(
        "{steps} steps after the warm-up, and more until the median is precise, at most {most_steps}",
        "float32 parameters, autocast with bfloat16, fused AdamW without gradient clipping; nothing is compiled",
        "each process has a batch of its own, as large as that of one process alone",
        "times are those of the process that is slowest in a step; memory is that of the process that has most",
        "communication: what the step waits for after the backward pass; torch's modes wait within it, and have no "
        "such phase",
        "collectives: time in which they run, on rank 0 in a profiled step; hidden: the share in which others run too",
        "over one process: the step's time less that of one process; efficiency: the time of one process over it",
    ),
    memory=lambda case, options: case.state_bytes["after_step"],
    isolated=False,
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    return harness.run(PROGRAM, options, options.cases)


if __name__ == "__main__":
    sys.exit(main())
