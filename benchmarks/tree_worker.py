"""A process that computes attention with the `cs336_systems` of one checkout, as compare_trees.py asks.

Run with that checkout first on PYTHONPATH. A line of JSON comes in for each request, and one goes out:
{"do": "prepare" | "check" | "time", "device", "dtype", "impl", "pass", "shape", "groups", "causal", "method"} and
{"value"} or {"failure"}. Only what every checkout has is imported from it.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from cs336_systems.attention import attention
from cs336_systems.profiling import TimingMethod, measure_ms
from cs336_systems.testing import Shapes, assert_within_budget, evaluate, make_inputs

LONGEST_CHECKED = 512
"""The float64 oracle keeps every pair of a query and a key."""


Shape = tuple[int, ...]


@functools.lru_cache(maxsize=1)
def call_of(
    which: str, shape: Shape, groups: int, causal: bool, impl: str, dtype: str, device: str
) -> Callable[[], Any]:
    """The pass of an attention call on random inputs, the same for every checkout."""
    generator = torch.Generator(device).manual_seed(0)
    batch, heads, length, d = shape
    of_queries = (batch, heads * groups, 1 if which == "decode" else length, d)
    q, k, v, dout = (
        torch.randn(size, generator=generator, device=device, dtype=getattr(torch, dtype))
        for size in (of_queries, shape, shape, of_queries)
    )
    if which == "decode":
        return decoding(q, k, v, impl)
    if which == "forward":
        return lambda: attention(q, k, v, causal=causal, impl=impl)
    for x in (q, k, v):
        x.requires_grad_()
    if which == "both":
        return lambda: torch.autograd.grad(attention(q, k, v, causal=causal, impl=impl), (q, k, v), dout)
    out = attention(q, k, v, causal=causal, impl=impl)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def decoding(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, impl: str) -> Callable[[], Any]:
    """A call over caches that are full."""
    # Here, because older checkouts lack it.
    from cs336_systems.attention import attention_with_cache

    lengths = torch.full((k.shape[0],), k.shape[2], device=k.device)
    return lambda: attention_with_cache(q, k, v, lengths, impl=impl)


def check_decoding(shape: Shape, groups: int, causal: bool, impl: str, dtype: str, device: str) -> None:
    """Hold a call over a shorter cache to twice the rounding of its dtype, by the norm of the error."""
    batch, heads, length, d = shape
    length = min(length, LONGEST_CHECKED) - 3
    q = torch.randn(batch, heads * groups, 1, d, device=device, dtype=getattr(torch, dtype))
    k, v = (torch.randn(batch, heads, length, d, device=device, dtype=q.dtype) for _ in range(2))
    expected = decoding(q.double(), k.double(), v.double(), "naive")()
    error = float((decoding(q, k, v, impl)() - expected).norm() / expected.norm())
    bound = 2 * torch.finfo(q.dtype).eps
    if not error <= bound:
        raise AssertionError(f"expected a relative error of at most {bound:.1e}; got {error:.1e}")


def check(shape: Shape, groups: int, causal: bool, impl: str, dtype: str, device: str) -> None:
    """Hold values and gradients of a shorter call, whose last tile is not whole, to the error budget."""
    length = min(shape[2], LONGEST_CHECKED) - 3
    heads = min(shape[1], 2)
    shapes = Shapes.of(1, q_len=length, d=shape[3], q_heads=heads * groups, kv_heads=heads)
    inputs = make_inputs(shapes, dtype=getattr(torch, dtype), device=device)
    attend = functools.partial(attention, causal=causal, impl=impl, return_lse=True)
    assert_within_budget(evaluate(attend, inputs), inputs, causal=causal)


def answer(request: dict[str, Any]) -> float | None:
    """What a request asks for: a time in milliseconds, or nothing."""
    shape, where = tuple(request["shape"]), [request[name] for name in ("groups", "causal", "impl", "dtype", "device")]
    if request["do"] == "check":
        (check_decoding if request["pass"] == "decode" else check)(shape, *where)
        return None
    call = call_of(request["pass"], shape, *where)
    if request["do"] == "prepare":
        call()
        return None
    return measure_ms(call, device=request["device"], method=TimingMethod(**request["method"]))


def main() -> None:
    """Answer until there are no more requests. What anything else prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            said: dict[str, Any] = {"value": answer(json.loads(line))}
        except Exception as error:
            said = {"failure": f"{type(error).__name__}: {' '.join(str(error).split())[:1000]}"}
        print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    main()
