"""Search tile configurations of the portable kernels on this GPU, and print rows for `kernels/tuning.py`.

    python benchmarks/tune.py                                      # every pass and dimension, 16-bit inputs
    python benchmarks/tune.py --passes dq dkdv --dims 128 --arithmetic float32 --length 4096

Each candidate that fits the GPU is compiled (in parallel), timed once, and the best few are timed again in rotation,
since a GPU's clocks fall under load and would favour whichever came first. A row is the configuration with the least
time summed over a causal and a full mask.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
import triton
from torch import Tensor

from cs336_systems.kernels import tuning
from cs336_systems.kernels.portable import launch
from cs336_systems.kernels.tuning import Arithmetic, Pass, TileConfig

FINALISTS = 6


def candidates(name: Pass, arithmetic: Arithmetic, head_dim: int) -> Iterator[TileConfig]:
    """Configurations worth trying: tiles that a program's registers can hold, with or without a pipeline."""
    exact = arithmetic == "float32"
    tiles = (16, 32, 64, 128)
    for tile_q, tile_k, warps, stages in itertools.product(tiles, tiles, (4, 8), (1, 2, 3, 4)):
        kept = tile_k if name == "dkdv" else tile_q
        accumulated = kept * head_dim * (2 if name == "dkdv" else 1)
        per_thread = (accumulated + tile_q * tile_k) / (32 * warps)
        # Splitting float32 operands into parts takes registers of its own, and memory for the parts.
        if kept >= 32 and 16 <= per_thread <= (160 if exact else 224) and stages <= (3 if exact else 4):
            yield TileConfig(tile_q, tile_k, warps, stages)


def inputs(arithmetic: Arithmetic, tokens: int, channels: int, length: int, head_dim: int) -> tuple[Tensor, ...]:
    """Random q, k, v and output gradient of ``tokens`` rows in all, on the GPU."""
    dtype = torch.bfloat16 if arithmetic == "half" else torch.float32
    shape = (max(1, tokens // length), max(1, channels // head_dim), length, head_dim)
    return tuple(torch.randn(shape, device="cuda", dtype=dtype) for _ in range(4))


def prepared(name: Pass, tensors: tuple[Tensor, ...], causal: str) -> Callable[[], object]:
    """A closure that runs the pass once: the forward alone, or the backward with both its passes."""
    q, k, v, dout = tensors
    scale = q.shape[-1] ** -0.5
    if name == "forward":
        return lambda: launch.forward(q, k, v, causal, scale)
    out, lse = launch.forward(q, k, v, causal, scale)
    return lambda: launch.backward(q, k, v, out, lse, dout, None, causal, scale)


def compile_one(job: tuple[Pass, TileConfig, argparse.Namespace, Arithmetic, int]) -> str | None:
    """Compile a candidate into Triton's cache in a process of its own; returns why it cannot run, or None."""
    name, config, arguments, arithmetic, head_dim = job
    torch.set_float32_matmul_precision("highest")
    try:
        tensors = inputs(arithmetic, arguments.tokens, arguments.channels, arguments.length, head_dim)
        with tuning.pin(**{name: config}):
            for causal in ("bottom_right", "none"):
                prepared(name, tensors, causal)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
    return None


def measure(name: Pass, config: TileConfig, tensors: tuple[Tensor, ...]) -> tuple[float, float]:
    """Median milliseconds with a causal and with a full mask."""
    with tuning.pin(**{name: config}):
        runs = [prepared(name, tensors, causal) for causal in ("bottom_right", "none")]
        times = []
        for run in runs:
            time.sleep(0.02)
            times.append(triton.testing.do_bench(run, warmup=3, rep=10, return_mode="median"))
    return times[0], times[1]


def search(name: Pass, arithmetic: Arithmetic, head_dim: int, arguments: argparse.Namespace) -> TileConfig | None:
    """The fastest configuration of one pass, with the finalists printed."""
    configs = list(candidates(name, arithmetic, head_dim))
    jobs = [(name, config, arguments, arithmetic, head_dim) for config in configs]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(arguments.jobs, mp_context=context) as pool:
        failures = list(pool.map(compile_one, jobs))
    able = [config for config, failure in zip(configs, failures, strict=True) if failure is None]
    if not able:
        print(f"# {name} {arithmetic} {head_dim}: none of {len(configs)} candidates ran, e.g. {failures[0]}")
        return None
    torch.set_float32_matmul_precision("highest")
    tensors = inputs(arithmetic, arguments.tokens, arguments.channels, arguments.length, head_dim)
    first = {config: sum(measure(name, config, tensors)) for config in able}
    finalists = sorted(able, key=first.__getitem__)[:FINALISTS]
    rounds: dict[TileConfig, list[tuple[float, float]]] = {config: [] for config in finalists}
    for turn in range(arguments.rounds):
        for config in finalists[turn % len(finalists) :] + finalists[: turn % len(finalists)]:
            rounds[config].append(measure(name, config, tensors))
    medians = {config: [statistics.median(column) for column in zip(*rounds[config], strict=True)] for config in rounds}
    ranked = sorted(finalists, key=lambda config: sum(medians[config]))
    for config in ranked:
        causal, full = medians[config]
        print(f"# {name} {arithmetic} {head_dim}: {row(config)!s:30} causal {causal:.4f} full {full:.4f} ms")
    sys.stdout.flush()
    return ranked[0]


def row(config: TileConfig) -> tuple[object, ...]:
    """A configuration as the table writes it."""
    return dataclasses.astuple(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", nargs="+", default=["forward", "dq", "dkdv"], choices=["forward", "dq", "dkdv"])
    parser.add_argument("--arithmetic", nargs="+", default=["half"], choices=["half", "float32"])
    parser.add_argument("--dims", nargs="+", type=int, default=[16, 32, 64, 128, 256], help="padded head dimensions")
    parser.add_argument("--length", type=int, default=4096, help="rows of q and k in each sequence")
    parser.add_argument("--tokens", type=int, default=16384, help="rows over the whole batch")
    parser.add_argument("--channels", type=int, default=2048, help="heads times head dimension")
    parser.add_argument("--rounds", type=int, default=3, help="rotations in which the finalists are timed again")
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("tuning needs a CUDA GPU; torch sees none")
    print(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    for arithmetic, head_dim in itertools.product(arguments.arithmetic, arguments.dims):
        found: dict[Pass, TileConfig] = {}
        for name in arguments.passes:
            # The two passes of the backward are timed together: each with the best that was found for the other.
            with tuning.pin(**found):
                best = search(name, arithmetic, head_dim, arguments)
            if best is not None:
                found[name] = best
                print(f'("{name}", "{arithmetic}", {head_dim}): TileConfig{row(best)},')


if __name__ == "__main__":
    main()
