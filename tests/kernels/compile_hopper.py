"""Compile the kernels for Hopper without one, and print what became of them as JSON.

Run as a program of its own, because kernels defined under TRITON_INTERPRET cannot be compiled:

    python tests/kernels/compile_hopper.py --passes forward backward
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch

from cs336_systems.kernels.inspection import Report, compile_for, rows_of
from cs336_systems.kernels.launching import Launch
from cs336_systems.kernels.settings import Window
from cs336_systems.kernels.sm90 import config, describe
from cs336_systems.kernels.sm90.forward import forward_kernel
from cs336_systems.kernels.sm90.forward_more import forward_more_kernel
from cs336_systems.kernels.sm90.launch import KERNELS

BANDS = {
    "none": (None, None),
    "causal": (None, 0),
    "window": (-100, 0),
}


def launch_of(
    name: str,
    head_dim: int,
    band: Window,
    dtype: torch.dtype,
    softcap: float | None,
    length: int,
    is_packed: bool = False,
    deterministic: bool = False,
) -> Launch:
    """A pass on (2, 8, length, head_dim) queries and (2, 2, length, head_dim) keys, on eight multiprocessors.

    Or on a batch of one, packed.
    """

    def made(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    batch = 1 if is_packed else 2
    q, k, v, out = (made(batch, heads, length, head_dim, dtype=dtype) for heads in (8, 2, 2, 8))
    packed = describe.ALONE
    if is_packed:
        packed = describe.Packed(made(9, dtype=torch.int32), made(9, dtype=torch.int32), True)
    counter = made(1, dtype=torch.int32)
    if name == "forward":
        lse = made(batch, 8, length)
        return describe.describe_forward(q, k, v, out, lse, counter, band, 0.1, softcap, 8, packed)
    rows = describe.Rows(
        *(made(16, length), made(16, length), made(16 * length * head_dim), made(16 * length // 64, dtype=torch.int32))
    )
    return describe.describe_backward(q, k, v, out, rows, (k, v), counter, band, 0.1, softcap, 8, packed, deterministic)


def beside_a_product(sass: str) -> list[str]:
    """The instructions of the shortest stretch from a wait that leaves products running to the next wait.

    That is the step most often taken: others mask, or look for the largest score.
    """
    instructions = re.findall(r"/\*[0-9a-f]{4,6}\*/\s+(.*?);", sass)
    waits = [number for number, instruction in enumerate(instructions) if "WARPGROUP.DEPBAR" in instruction]
    stretches = [
        instructions[wait + 1 : following]
        for wait, following in itertools.pairwise(waits)
        if re.search(r"gsb0, 0x[12]\b", instructions[wait])
    ]
    return min((x for x in stretches if any("MUFU.EX2" in instruction for instruction in x)), key=len)


def compile_one(
    name: str,
    head_dim: int,
    band: str,
    dtype: torch.dtype,
    softcap: float | None = None,
    length: int = 8192,
    is_packed: bool = False,
    deterministic: bool = False,
) -> tuple[dict[str, Any], Report]:
    """A kernel in words, and what the compiler made of it."""
    kernel = KERNELS.get(head_dim)
    if name == "forward":
        kernel = forward_kernel if head_dim in config.WIDTHS else forward_more_kernel
    launch = launch_of(name, head_dim, BANDS[band], dtype, softcap, length, is_packed, deterministic)
    # Those of a group's part of a tile, for each of its 128 threads.
    tile = launch.constants["TILE_K" if name == "forward" else "TILE_Q"]
    if name == "backward" and config.BACKWARD[head_dim].keys == describe.ROWS:
        tile //= 2
    about = {
        "pass": name,
        "head_dim": head_dim,
        "band": band,
        "dtype": str(dtype),
        "softcap": softcap,
        "packed": is_packed,
        "exponentials": describe.ROWS * tile // 128,
    }
    return about, compile_for(90, kernel, launch)


def counts_of(sass: str) -> dict[str, int]:
    """What a kernel computes and spills while a product runs."""
    step = beside_a_product(sass)
    return {
        "exponentials_beside_a_product": sum("MUFU.EX2" in instruction for instruction in step),
        "spills_beside_a_product": sum(bool(re.search(r"\b(STL|LDL)", instruction)) for instruction in step),
    }


def lowest_barrier(ptx: str) -> int:
    """Where in shared memory the first barrier lies that is set up."""
    added = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx))
    return min(int(added.get(place, 0)) for place in re.findall(r"mbarrier\.init\S*\s+\[(%r\d+)\]", ptx))


def cases_of(name: str) -> Iterator[dict[str, Any]]:
    """What is compiled of a pass, as `compile_one` takes it."""
    usual = {"name": name, "dtype": torch.bfloat16}
    for head_dim in config.WIDTHS if name == "forward" else config.BACKWARD:
        causal = usual | {"head_dim": head_dim, "band": "causal"}
        yield from (causal, causal | {"band": "none"}, causal | {"softcap": 5.0}, causal | {"is_packed": True})
    of_128 = usual | {"head_dim": 128}
    yield from (of_128 | {"band": "window"}, of_128 | {"band": "causal", "dtype": torch.float16})
    if name == "backward":
        yield of_128 | {"band": "window", "deterministic": True}
        return
    yield usual | {"head_dim": 64, "band": "none", "length": config.SHORT_LENGTH}
    for head_dim in sorted({width + more for width, more, _ in config.FORWARD_MORE}):
        yield from (usual | {"head_dim": head_dim, "band": band} for band in ("none", "causal"))
    yield from (usual | {"head_dim": head_dim, "band": "causal", "is_packed": True} for head_dim in (80, 192))


def main(arguments: Iterable[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", nargs="+", choices=("forward", "backward"), default=["forward", "backward"])
    parser.add_argument("--bands", nargs="+", choices=BANDS, default=[*BANDS])
    parser.add_argument("--head-dims", nargs="+", type=int, help="all, unless given")
    parser.add_argument("--plain", action="store_true", help="of a head dimension and a band what is most used alone")
    options = parser.parse_args([*arguments])
    compiled = [
        compile_one(**case)
        for name in options.passes
        for case in cases_of(name)
        if case["band"] in options.bands and case["head_dim"] in (options.head_dims or [case["head_dim"]])
        if not options.plain or (len(case) == 4 and case["dtype"] == torch.bfloat16)
    ]
    rows = rows_of(compiled)
    more = [counts_of(report.sass) | {"lowest_barrier": lowest_barrier(report.ptx)} for _, report in compiled]
    print(json.dumps([row | own for row, own in zip(rows, more, strict=True)]))


if __name__ == "__main__":
    main(sys.argv[1:])
