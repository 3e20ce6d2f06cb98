"""The time of each phase of a model's step: forward, backward, and AdamW's update.

    python benchmarks/transformer.py                                             # a first look, GPU or not
    python benchmarks/transformer.py --models small medium --lengths 512 1024 --dtypes fp32 bf16
    python benchmarks/transformer.py --models small --modes step --warmup-steps 0 1 2 5 --compile none whole
    python benchmarks/transformer.py --models 4-256-256-4-8 8-512-768-12-12 --compile none whole
    python benchmarks/transformer.py --models tiny --d-model 512 --d-ff 2048 --num-heads 8 --log-steps

docs/measuring/steps.md says what is measured, how, and what the columns mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch import Tensor

from benchmarks import flags, harness, models
from benchmarks.harness import Context, Row
from benchmarks.models import FORWARD, NOT_COMPILED, STEP, ModelCase
from benchmarks.results import mebibytes
from benchmarks.steps import finite_loss, make_step, step_columns
from benchmarks.transformer_tables import PREFIXES, plots, tables
from cs336_systems.profiling.environment import device_name
from cs336_systems.profiling.flops import device_peak, implausible_rate, teraflops_per_second
from cs336_systems.profiling.steps import StepTimes, time_model
from cs336_systems.profiling.torch_names import compiler_counters

_HOST_BOUND = 0.95


def make_parser(arguments: Sequence[str] | None = None) -> argparse.ArgumentParser:
    gpu = flags.wants_gpu(arguments)
    parser = models.make_parser(
        __doc__,
        models=["small" if gpu else "tiny"],
        lengths=[128, 256, 512, 1024] if gpu else [32, 64],
        batches=[4],
        providers=["auto"],
        dtypes=["float32", "bfloat16"],
        compile=[NOT_COMPILED],
        modes=[FORWARD, STEP],
        warmup_steps=[5 if gpu else 1],
        steps=10,
        tf32=False,
    )
    parser.add_argument("--log-steps", action="store_true", help="print the time of every step")
    return parser


def measure(case: ModelCase, context: Context) -> Row:
    """The time of each phase of a case, with its rates, memory, compilation and losses."""
    options = context.options
    skipped = models.smaller_out_of_memory(case, context.rows)
    if skipped is not None:
        return skipped.columns
    step, _ = make_step(case, options.device, options.seed)
    losses: list[Tensor] = []

    def forward() -> Tensor:
        loss = step.forward()
        losses.append(loss.detach())
        return loss

    update = step.update if case.mode == STEP else None
    how: dict[str, Any] = {"device": options.device, "steps": options.steps, "warmup": case.warmup_steps}
    times = time_model(forward, step.model, mode=case.mode, update=update, **how)
    row = time_columns(times) | compilation_columns(case, times)
    row |= {name: finite_loss(losses[index], case.dtype) for name, index in (("first_loss", 0), ("last_loss", -1))}
    return row | rates_of(case, row, device_name(options.device))


def time_columns(times: StepTimes) -> Row:
    """The times of the step and its phases, the host's least time of a step, and the allocator's figures."""
    row = step_columns(times.step) | {"host_ms": min(times.host_ms)}
    for phase, rounds in times.phases.items():
        row |= step_columns(rounds, PREFIXES[phase])
    memory = times.memory
    sizes = {"allocated_mib": memory.allocated_bytes, "reserved_mib": memory.reserved_bytes}
    return row | mebibytes(**sizes, peak_mib=memory.peak_bytes)


def compilation_columns(case: ModelCase, times: StepTimes) -> Row:
    """The first step and the other warm-up steps, and the number of graphs that torch found in its cache and compiled.

    ``compile_s`` is how much longer the first step took than a later one: compilation, and what is loaded once.
    """
    found, compile_s = compiler_counters(), max(0.0, times.first_ms - times.step.median) * 1e-3
    return {
        "warmup_ms": list(times.warmup_ms),
        "first_step": "warm-up" if case.warmup_steps else "timed",
        "first_step_ms": times.first_ms,
        "compile_s": compile_s if case.warmup_steps else None,
        "graphs_from_cache": found["fxgraph_cache_hit"],
        "graphs_compiled": found["fxgraph_cache_miss"] + found["fxgraph_cache_bypass"],
    }


def rates_of(case: ModelCase, row: Row, device: str) -> Row:
    """Tokens per second, MFU, the rate of each phase in TFLOP/s, and warnings.

    A rate is implausible if it is above the device's peak even without the pairs that the causal mask hides, which
    some kernels do not compute.
    """
    forward, causal = (models.step_flops(case.config, case.tokens, FORWARD, every_pair=p) for p in (True, False))
    passes = {"forward": 1.0, "backward": 2.0, "step": 1.0 if case.mode == FORWARD else 3.0}
    rates, warnings = dict.fromkeys(f"{name}_tflops" for name in passes), []
    for name, count in passes.items():
        if median := row.get(f"{PREFIXES[name]}median_ms"):
            rates[f"{name}_tflops"] = teraflops_per_second(count * forward, median)
            least = teraflops_per_second(count * causal, median)
            implausible = implausible_rate(least, device, case.dtype, tf32=case.tf32)
            warnings += [f"{name}: {implausible}"] if implausible else []
    if row["last_loss"] is None:
        warnings.append("the last loss is not finite: gradients are not scaled")
    if row["peak_mib"] is not None and row["host_ms"] >= _HOST_BOUND * row["median_ms"]:
        warnings.append("host-bound: the device waits for the host")
    known = device_peak(device)
    peak = None if known is None else known.rate(case.dtype, tf32=case.tf32)
    columns = models.rate_columns(case.config, case.tokens, case.mode, row["median_ms"], peak)
    return {**columns, **rates, "warning": "; ".join(warnings)}


def step_lines(row: Row) -> list[str]:
    """A line for every step of a row: the whole step for warm-up steps, every phase for timed ones."""
    lines = [f"  warm-up step {number}: {time:.3f} ms" for number, time in enumerate(row.get("warmup_ms", ()), 1)]
    columns = {name: row[f"{prefix}steps_ms"] for name, prefix in PREFIXES.items() if f"{prefix}steps_ms" in row}
    for index, times in enumerate(zip(*columns.values(), strict=True), 1):
        phases = ", ".join(f"{name} {time:.3f} ms" for name, time in zip(columns, times, strict=True))
        lines.append(f"  step {index}: {phases}")
    return lines


def drive(sweep: harness.Sweep[ModelCase], cases: Sequence[ModelCase]) -> None:
    """Measure the cases in order; with --log-steps, print the time of every step."""
    for case in cases:
        for row in sweep.rows(case):
            if sweep.options.log_steps:
                print("\n".join([case.name, *step_lines(row)]), flush=True)


PROGRAM = harness.Program(
    name="transformer",
    title="Time of a model's phases",
    measure=measure,
    tables=tables,
    plots=plots,
    settings=("suite", "steps", "seed"),
    notes=(
        "{steps} consecutive steps after the warm-up; the phases of a step are measured within that step",
        "forward: the loss, under no_grad in mode forward; optimizer: gradient clipping, fused AdamW, gradients freed",
        "parameters are float32; bfloat16 and float16 are autocast, without loss scaling for float16",
        "with 0 warm-up steps the first step, which compiles and loads code, is one of the timed steps",
        "TFLOP/s and MFU count the model's matrix products and all query-key pairs, as FlopCounterMode does, and twice "
        "as much for the backward; MFU is the share of the device's peak for the dtype",
        "memory: allocated after the last step, reserved from the driver, and the peak of the timed steps",
    ),
    memory=models.least_memory,
    packages=("transformers",),
)


def main(arguments: Sequence[str] | None = None) -> int:
    return models.run_models(PROGRAM, make_parser(arguments), arguments, drive)


if __name__ == "__main__":
    sys.exit(main())
