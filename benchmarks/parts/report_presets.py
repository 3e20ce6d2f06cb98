"""What `report.py` runs: the parts of each preset, with a GPU and without one.

A line is the program and its flags, and before them the name of the part if it is not the program's. Parts take a few
minutes each, so that a long preset can be stopped between them, and shared by several GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

_QUICK_GPU = """
precision
attention --preset quick --lengths 1024 4096 --head-dims 64
transformer --models small --lengths 512 --modes forward step --compile none whole
transformer-warmup = transformer --models small --lengths 512 --modes step --warmup-steps 0 5
breakdown --models small --lengths 512
memory --models small --lengths 512
training_step --models small --lengths 1024 --providers flash torch
generation --models small --batches 1 --lengths 512 --modes eager graph
host_overhead
leaderboard
"""
_QUICK_CPU = """
precision --dtypes fp32 bf16 --lengths 128
attention --preset course --lengths 128 256 --head-dims 32 --dtypes fp32 --rounds 3 --providers naive tiled torch-math
transformer --models tiny --lengths 64 --providers naive --modes forward step --steps 5
transformer-warmup = transformer --models tiny --lengths 64 --providers naive --modes step --steps 5 --warmup-steps 0 1
breakdown --models tiny --lengths 64 --steps 3 --warmup-steps 1
memory --models tiny --lengths 64 128 --modes forward step --recompute-every 2 --steps 1
training_step --models tiny --lengths 64 --tokens 128 --compile none --steps 3 --providers flash torch naive
generation --layers 2 --lengths 32 --steps 2
host_overhead --lengths 64 --heads 2 --calls 5 --rounds 3
leaderboard
"""
_YEAR_GPU = """
{passes}
transformer-warmup = transformer {suite} --models {models} {course} --providers naive --dtypes fp32 --modes step {cold}
transformer-compile = transformer {suite} --models {models} --lengths 256 --providers naive --compile none whole
transformer-compile-small = transformer --models {small_models} --providers naive --compile none whole
transformer-own = transformer --models 64-256-512-4-8 --providers naive flash
transformer-batch-8 = transformer {suite} --models {models} --lengths 1024 --batches 8 {gpt2} --providers naive
transformer-batch-64 = transformer --models small --lengths 512 --batches 64 --providers naive flash
transformer-batch-32 = transformer --models large --lengths 512 --batches 32 --providers naive flash
transformer-limit = transformer {suite} --models large --lengths 2048 4096 8192 --providers naive flash {few}
attention = attention --preset course {rivals} --most-rounds 9
attention-limit = attention --preset course --lengths 32768 65536 131072 --head-dims 16 128 --dtypes fp32 {fewer} {slow}
attention-wide = attention --preset course --lengths 16 32 64 128 --head-dims 256 1024 4096 16384 {plain}
attention-causal = attention --preset course-causal {causal}
{breakdowns}
{memory}
precision
training_step {suite} --models small medium large --lengths 1024 --compile blocks
all_reduce
data_parallel = data_parallel {suite} --models xl --dtypes fp32
data_parallel-bf16 = data_parallel {suite} --models xl --dtypes bf16
data_parallel-overlap = data_parallel {suite} --models xl --dtypes fp32 {overlap}
generation
host_overhead
leaderboard
"""
_YEAR_CPU = """
transformer {suite} --models small medium large --lengths 256 --providers naive --dtypes fp32 --compile none whole {few}
transformer-warmup = transformer --models tiny --lengths 64 --steps 5 --warmup-steps 0 1 2 5
transformer-compile = transformer --models 4-256-256-4-8 --compile none whole --steps 3
attention --preset course --lengths 256 1024 --head-dims 16 64 --dtypes fp32
attention-wide = attention --preset course --lengths 16 32 --head-dims 256 1024 --dtypes fp32 {plain}
breakdown {suite} --models small --lengths 128
memory {suite} --models small --lengths 128
precision
training_step
all_reduce --megabytes 1 10 100 1000
data_parallel {suite}
generation
host_overhead
leaderboard
"""
_MORE_GPU = """
transformer-2026 = transformer --suite 2026 --models xl 10B --lengths 512 1024
attention-paper = attention --preset paper
generation-attention = generation --attention
"""
_MORE_CPU = """
attention-causal = attention --preset course-causal --lengths 128 512 --head-dims 64
generation-attention = generation --attention
"""
_FLAGS = {
    "course": "--lengths 128 256 512 1024",
    "cold": "--warmup-steps 0 1 2 5 --steps 10 --most-steps 10",
    "few": "--steps 3 --most-steps 3",
    "slow": "--passes forward backward --max-seconds 10 --rounds 3 --most-rounds 3",
    "overlap": "--parallel none naive flat overlapped bucketed torch-ddp --bucket-mb 100 --overlap --steps 5",
    "gpt2": "--vocab-size 50257 --modes forward forward+backward step",
    "each_mode": "--modes forward forward+backward step",
    "rivals": "--providers naive compiled flash torch-flash torch-efficient torch-cudnn",
    "fewer": "--providers naive compiled flash torch-efficient",
    "plain": "--providers naive compiled --most-rounds 9",
    "small_models": "4-256-256-4-8 4-512-512-6-8 8-256-768-6-12 8-512-768-12-12",
}
_LONG = "--lengths 128 512 2048 8192 32768 65536 --providers naive flash sdpa --rounds 3"


def _year(year: str, models: str, memory: str, causal: str = _LONG) -> tuple[str, str]:
    """The parts of a year of the course, with a GPU and without one."""
    suite, course = f"--suite {year}", _FLAGS["course"]
    each = f"{course} --providers naive flash"
    # Where a step has no memory, forward and backward may have it.
    large, both = {models.split()[-1], "wide"}, f" {_FLAGS['each_mode']}"
    passes = [
        f"transformer-{m} = transformer {suite} --models {m} {each}{both * (m in large)}"
        for m in [*models.split(), "wide"]
    ]
    each = f"{course} --dtypes fp32 bf16 --no-tf32"
    breakdowns = [f"breakdown-{m} = breakdown {suite} --models {m} {each}" for m in models.split()]
    each = "--lengths 128 256 512"
    of_memory = [f"memory-{m} = memory {suite} --models {m} {each}" for m in memory.split()]
    values = {"suite": suite, "models": models, "causal": causal, **_FLAGS}
    lists = {"passes": passes, "breakdowns": breakdowns, "memory": of_memory}
    values |= {name: "\n".join(lines) for name, lines in lists.items()}
    return _YEAR_GPU.format(**values), _YEAR_CPU.format(**values)


_OF_2025 = ("2025", "small medium large xl 2.7B", "small large 2.7B")
PRESETS = {
    "quick": (_QUICK_GPU, _QUICK_CPU),
    "2025": _year(*_OF_2025),
    "2026": _year("2026", "small medium large xl 10B", "small xl"),
    "full": tuple(a + b for a, b in zip(_year(*_OF_2025, causal=""), (_MORE_GPU, _MORE_CPU), strict=True)),
}
"""Parts by the name of a preset, with a GPU and without one: `quick` takes a few minutes, a year has the tables of
Stanford's CS336, and `full` is 2025, the models of 2026 that it lacks, and the other sweeps of attention."""


OF_SEVERAL_PROCESSES = ("all_reduce", "data_parallel")
"""Programs that need CPUs or NVIDIA's GPUs."""


@dataclass(frozen=True)
class Part:
    """One run of a program. ``name`` is that of its folder."""

    name: str
    program: str
    arguments: tuple[str, ...]


def parts_of(preset: str, *, gpu: bool) -> list[Part]:
    """The parts of a preset."""
    parts = []
    for line in filter(None, PRESETS[preset][0 if gpu else 1].splitlines()):
        before, _, after = line.rpartition(" = ")
        program, *arguments = after.split()
        parts.append(Part(before or program, program, tuple(arguments)))
    return parts
