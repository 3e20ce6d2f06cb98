"""Compile attention over a cache for a GPU that need not be there, and print what became of it as JSON.

Run as a program of its own, because kernels defined under TRITON_INTERPRET cannot be compiled:

    python tests/kernels/compile_cached.py sm_90 --arithmetics half float32 --widths 64 128
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from torch import Tensor

from cs336_systems.kernels import tuning
from cs336_systems.kernels.inspection import compile_for, rows_of
from cs336_systems.kernels.launching import Launch
from cs336_systems.kernels.triton import cached, cached_launch
from cs336_systems.kernels.triton.cached_launch import Call

BATCH, HEADS, CAPACITY, PARTS = 2, 4, 512, 5


def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of metadata alone."""
    return torch.empty(shape, dtype=dtype, device="meta")


def launches(arithmetic: tuning.Arithmetic, width: int, rows: int, call: Call) -> Iterator[tuple[str, Any, Launch]]:
    """Both kernels of a call whose sequences are divided into parts: a name, the kernel and its launch."""
    dtype = torch.bfloat16 if arithmetic == "half" else torch.float32
    q, kv = (made(BATCH, HEADS, length, width, dtype=dtype) for length in (rows, CAPACITY))
    lengths = made(BATCH, dtype=torch.int64)
    parts = made(BATCH, HEADS, rows, PARTS, width), made(BATCH, HEADS, rows, PARTS)
    whole = made(BATCH, HEADS, rows, width, dtype=dtype), made(BATCH, HEADS, rows)
    described = cached_launch.describe_cached(q, kv, kv, lengths, *parts, 1, PARTS, arithmetic, call)
    yield "cached", cached.cached_kernel, described
    yield "merge", cached.merge_kernel, cached_launch.describe_merge(*parts, *whole)


def main(arguments: Iterable[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architecture", choices=tuning.TABLES)
    parser.add_argument("--arithmetics", nargs="+", choices=("half", "tf32", "float32"), default=["half", "float32"])
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128], help="of the heads")
    parser.add_argument("--rows", nargs="+", type=int, default=[4], help="new queries of a group of heads")
    options = parser.parse_args([*arguments])
    tuning.architecture_of = lambda device: options.architecture  # type: ignore[assignment]
    capability = int(options.architecture.removeprefix("sm_"))
    compiled = [
        (
            {
                "kernel": name,
                "arithmetic": arithmetic,
                "width": width,
                "rows": rows,
                "capped": call.softcap is not None,
            },
            compile_for(capability, kernel, launch),
        )
        for arithmetic in options.arithmetics
        for width in options.widths
        for rows in options.rows
        for call in (Call(0.1, None, None), Call(-0.1, 100, 30.0))
        for name, kernel, launch in launches(arithmetic, width, rows, call)
    ]
    print(json.dumps(rows_of(compiled)))


if __name__ == "__main__":
    main(sys.argv[1:])
