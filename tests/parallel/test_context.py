"""Context parallel attention: outputs and gradients are those of full sequences, computed naively in float64."""

from __future__ import annotations

import os

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from cs336_systems.attention import Attention, attention
from cs336_systems.parallel import ContextAttention
from cs336_systems.parallel.zigzag import chunks_of

from .processes import layout_of, spawn

HEADS, KV_HEADS, CHUNK, D = 4, 2, 5, 8


def shard(x, layout):
    """A process's two chunks."""
    chunks = x.split(CHUNK, dim=2)
    return torch.cat([chunks[number] for number in chunks_of(layout.context_rank, layout.context_size)], dim=2)


def drawn(layout, dtype=torch.float64):
    """q, k, v and the output's gradient of full sequences, the same on all processes."""
    generator = torch.Generator().manual_seed(7)
    length = 2 * layout.context_size * CHUNK
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    made = [torch.randn(2, count, length, D, dtype=torch.float64, generator=generator) for count in heads]
    return [x.to(layout.device, dtype) for x in made]


def check_gradients(layout, impl, window, checkpointed):
    dtype = torch.float64 if impl in ("naive", "tiled") else torch.float32
    q, k, v, dout = drawn(layout)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = attention(*whole, causal=True, window=window, impl="naive")
    expected.backward(dout)
    mine = [shard(x, layout).to(dtype).requires_grad_() for x in (q, k, v)]
    attend = ContextAttention(Attention(causal=True, window=window, impl=impl), layout.context_group)

    def layer(*inputs):
        return 2 * attend(*(x + 0 for x in inputs))  # no input is a leaf, as in a model

    out = checkpoint(layer, *mine, use_reentrant=False) if checkpointed else layer(*mine)
    out.backward(shard(dout, layout).to(dtype) / 2)
    close = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    what = f"{impl}, window {window}, checkpointed {checkpointed}"
    results = {"out": (out / 2, expected)}
    results |= {f"d{name}": (x.grad, of.grad) for name, x, of in zip("qkv", mine, whole, strict=True)}
    for name, (x, of_whole) in results.items():
        message = lambda text, name=name: f"{what}, {name}: {text}"  # noqa: E731
        torch.testing.assert_close(x.double(), shard(of_whole, layout), msg=message, **close)


def check_memory(layout):
    """The gathered keys and values that autograd saves have no storage until the backward pass."""
    q, k, v, _ = (shard(x, layout).requires_grad_() for x in drawn(layout))
    kept = []
    with saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = ContextAttention(Attention(causal=True, impl="tiled"), layout.context_group)(q, k, v)
    gathered = [x for x in kept if x.shape[1] == KV_HEADS and x.untyped_storage().size() == 0]
    # Keys and values, saved by two calls of attention and by what frees them.
    assert len(gathered) == 6
    whole = k.nbytes * layout.context_size
    assert all(x.untyped_storage().size() < whole for x in kept if x.shape[1] == KV_HEADS)
    out.sum().backward(retain_graph=True)
    first = k.grad.clone()
    out.sum().backward()
    torch.testing.assert_close(k.grad, 2 * first)


def check_frozen(layout):
    """Without gradients of keys or values, the others are the same."""
    q, k, v, dout = (shard(x, layout) for x in drawn(layout))
    attend = ContextAttention(Attention(causal=True, impl="naive"), layout.context_group)
    grads = []
    for needs in ((q, k, v), (q, v), (q,)):
        mine = [x.clone().requires_grad_(any(x is each for each in needs)) for x in (q, k, v)]
        attend(*mine).backward(dout)
        grads.append([x.grad for x in mine])
    assert grads[1][1] is grads[2][1] is grads[2][2] is None
    assert torch.equal(grads[0][0], grads[2][0])
    assert torch.equal(grads[0][2], grads[1][2])


def check_autocast(layout):
    """Keys are gathered in autocast's dtype; their gradients have the dtype of the keys."""
    q, k, v, dout = (shard(x, layout) for x in drawn(layout, torch.float32))
    expected = attention(*(x.to(layout.device) for x in drawn(layout)[:3]), causal=True)
    mine = [x.requires_grad_() for x in (q, k, v)]
    with torch.autocast(layout.device.type, torch.bfloat16):
        out = ContextAttention(Attention(causal=True), layout.context_group)(*mine)
    out.backward(dout.to(out.dtype))
    assert (out.dtype, k.grad.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out.double(), shard(expected, layout), rtol=2e-2, atol=2e-2)


def check_refusals(layout):
    group = layout.context_group
    with pytest.raises(ValueError, match="attention must be causal, aligned at the bottom right; got causal=False"):
        ContextAttention(Attention(), group)
    with pytest.raises(ValueError, match=r"attention must have a dropout_p of 0; got 0\.5"):
        ContextAttention(Attention(causal=True, dropout_p=0.5), group)
    odd = torch.zeros(1, 1, 3, 8, device=layout.device)
    with pytest.raises(ValueError, match="q must have an even length, two chunks of a sequence; got 3"):
        ContextAttention(Attention(causal=True), group)(odd, odd, odd)


def all_checks(place):
    with layout_of("context", place) as layout:
        # Where there is a GPU kernels are not interpreted.
        kernels = ["flash"] if place == "cuda" or "TRITON_INTERPRET" in os.environ else []
        implementations = ["naive", "tiled", "auto", *kernels]
        for impl in implementations:
            check_gradients(layout, impl, None, False)
            check_gradients(layout, impl, (7, 0), True)
        check_gradients(layout, "sdpa", None, False)  # it has no windows
        check_memory(layout)
        check_frozen(layout)
        check_autocast(layout)
        check_refusals(layout)


def test_two_processes_have_the_outputs_and_gradients_of_one(place):
    spawn(all_checks, 2, place)


def three():
    with layout_of("context", "cpu") as layout:
        check_gradients(layout, "tiled", None, True)
        check_gradients(layout, "tiled", (11, 0), False)


@pytest.mark.slow
def test_three_processes():
    spawn(three, 3)
