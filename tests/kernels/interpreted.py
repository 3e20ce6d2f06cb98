"""Run a small kernel in Triton's interpreter, as it is and as the tests have it, and print its results as JSON.

A program, because what the tests change stays changed: python tests/kernels/interpreted.py
"""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl

from tests.interpreter import make_faster


@triton.jit
def of_a_tile(x, columns):
    return tl.where(columns[None, :] < 13, x, 0.0)


@triton.jit
def kernel(floats, integers, halves, sums, whole, rounded, SIZE: tl.constexpr):
    """Whatever depends on a shape or on a dtype: broadcasts, casts, pointers, sums that overflow, a product."""
    rows, columns = tl.arange(0, SIZE), tl.arange(0, SIZE)
    places = rows[:, None] * SIZE + columns[None, :]
    x = of_a_tile(tl.load(floats + places, mask=rows[:, None] < 15, other=-1.0), columns)
    n = tl.load(integers + places)
    n = n * 65537 + n + (n > 0)
    half = tl.load(halves + places)
    product = tl.dot(x.to(tl.float16), tl.trans(half.to(tl.float16))) + x.shape[0] + x.numel
    tl.store(sums + rows, tl.sum(product, axis=1) + tl.max(n, axis=0) % 7 + (-1))
    tl.store(whole + places, n.to(tl.int64) // 3 + tl.sum(n.to(tl.int64)))
    tl.store(rounded + places, (product * 1.001 + n / 7 - half / 2.0 - (3 - rows)[:, None] / 4).to(tl.bfloat16))


def computed() -> list[Any]:
    size = 16
    generator = torch.Generator().manual_seed(1)
    floats = torch.randn(size, size, generator=generator)
    integers = torch.randint(-(2**31), 2**31, (size, size), dtype=torch.int32, generator=generator)
    sums, whole = torch.empty(size), torch.empty(size, size, dtype=torch.int64)
    rounded = torch.empty(size, size, dtype=torch.bfloat16)
    kernel[(1,)](floats, integers, floats.half(), sums, whole, rounded, SIZE=size)
    return [sums.tolist(), whole.tolist(), rounded.tolist()]


if __name__ == "__main__":
    as_it_is = computed()
    make_faster()
    print(json.dumps([as_it_is, computed()]))
