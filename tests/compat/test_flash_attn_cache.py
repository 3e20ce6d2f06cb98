"""``flash_attn_with_kvcache`` against its definition in float64, one sequence at a time."""

from __future__ import annotations

import inspect
import math
import re
import typing
from functools import partial

import pytest
import torch

from cs336_systems.attention import attention, attention_with_cache
from cs336_systems.compat import flash_attn, flash_attn_cache
from cs336_systems.compat.flash_attn import flash_attn_with_kvcache

BATCH, CAPACITY, HEADS, KV_HEADS, D, DV, ENTRIES = 3, 12, 4, 2, 8, 6, 5
HELD, PADDING, CHOSEN = [7, 0, 4], [2, 0, 5], [4, 0, 2]
SLOPES = torch.tensor([0.1, 0.5, 0.25, 1.0])
CASES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (3, -1)},
    "window_of_both_sides": {"window_size": (2, 1)},
    "softcap_and_scale": {"causal": True, "softcap": 0.5, "softmax_scale": 0.7},
    "alibi": {"causal": True, "alibi_slopes": SLOPES},
    "alibi_batch": {"alibi_slopes": torch.linspace(0.1, 1, BATCH * HEADS).view(BATCH, HEADS)},
    "batch_idx": {"causal": True, "cache_batch_idx": torch.tensor(CHOSEN)},
    "leftpad": {"causal": True, "cache_leftpad": torch.tensor(PADDING, dtype=torch.int32)},
    "leftpad_plain": {"cache_leftpad": torch.tensor(PADDING)},
    "splits": {"num_splits": 3, "causal": True},
    "all": {
        "causal": True,
        "window_size": (4, 0),
        "softcap": 2.0,
        "alibi_slopes": SLOPES,
        "cache_batch_idx": torch.tensor(CHOSEN, dtype=torch.int32),
        "cache_leftpad": torch.tensor(PADDING),
    },
}


def rotate(x, cos, sin, positions, interleaved):
    """Of x (length, heads, d), by complex numbers."""
    pairs = cos.shape[1]
    part, rest = x[..., : 2 * pairs].double(), x[..., 2 * pairs :].double()
    first, second = (part[..., ::2], part[..., 1::2]) if interleaved else (part[..., :pairs], part[..., pairs:])
    turned = torch.complex(first, second) * torch.complex(cos.double(), sin.double())[positions][:, None]
    if interleaved:
        return torch.cat([torch.view_as_real(turned).flatten(-2), rest], -1)
    return torch.cat([turned.real, turned.imag, rest], -1)


def definition(q, k, v, first, options):
    """The output (q_len, q_heads, dv) and log-sum-exp (q_heads, q_len) of a sequence, from all the keys that it has."""
    left, right = (math.inf if side < 0 else side for side in options.get("window_size", (-1, -1)))
    right = 0 if options.get("causal") else right
    out, lse = torch.zeros(*q.shape[:2], v.shape[-1], dtype=q.dtype), torch.full(q.shape[:2][::-1], -math.inf).double()
    for i, row in enumerate(range(k.shape[0] - q.shape[0], k.shape[0])):
        slots = [j for j in range(first, k.shape[0]) if row - left <= j <= row + right]
        for head in range(q.shape[1] if slots else 0):
            of = head // (q.shape[1] // k.shape[1])
            scores = k[slots, of] @ q[i, head] * options.get("softmax_scale", q.shape[-1] ** -0.5)
            if "softcap" in options:
                scores = options["softcap"] * torch.tanh(scores / options["softcap"])
            if "alibi_slopes" in options:
                distances = torch.tensor([abs(row - j) for j in slots])
                scores = scores - options["alibi_slopes"][head].double() * distances
            out[i, head], lse[head, i] = scores.softmax(0) @ v[slots, of], scores.logsumexp(0)
    return out, lse


def check(device, options, *, q_len=2, new=2, rotary=None, interleaved=True, dtype=torch.float64, tolerance=1e-11):
    chosen = options.get("cache_batch_idx", torch.arange(BATCH)).tolist()
    entries = ENTRIES if "cache_batch_idx" in options else BATCH
    make = partial(torch.randn, dtype=dtype, device=device)
    q, k, v = make(BATCH, q_len, HEADS, D), make(BATCH, new, KV_HEADS, D), make(BATCH, new, KV_HEADS, DV)
    caches = make(entries, CAPACITY, KV_HEADS, D), make(entries, CAPACITY, KV_HEADS, DV)
    for number, entry in enumerate(chosen):
        for cache in caches:  # only what a sequence has may be looked at
            cache[entry, HELD[number] :] = math.nan
    before = [cache.clone() for cache in caches]
    given = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    if new:
        given |= {"k": k, "v": v}
    if rotary:
        angles = torch.rand(CAPACITY, rotary, device=device) * 6
        given |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": interleaved}
    lengths = torch.tensor(HELD, dtype=torch.int32, device=device)
    out, lse = flash_attn_with_kvcache(q, *caches, **given, cache_seqlens=lengths, return_softmax_lse=True)
    assert out.is_contiguous()
    for number, (entry, held) in enumerate(zip(chosen, HELD, strict=True)):
        rows, added = q[number].double(), [x[number].double() for x in (k, v)]
        if rotary:
            table = given["rotary_cos"], given["rotary_sin"]
            one_by_one = options.get("causal") or "window_size" in options
            positions = [held + i * bool(one_by_one) for i in range(q_len)]
            rows = rotate(rows, *table, positions, interleaved)
            added[0] = rotate(added[0], *table, [held + i for i in range(new)], interleaved)
        keys, values = (torch.cat([x[entry, :held].double(), y]) for x, y in zip(before, added, strict=True))
        for cache, x, old in zip(caches, added, before, strict=True):
            torch.testing.assert_close(cache[entry, held : held + new].double(), x, rtol=tolerance, atol=tolerance)
            old[entry, held : held + new] = cache[entry, held : held + new]
        own = dict(options)
        if "alibi_slopes" in options and options["alibi_slopes"].ndim == 2:
            own["alibi_slopes"] = options["alibi_slopes"][number]
        first = int(options["cache_leftpad"][number]) if "cache_leftpad" in options else 0
        expected = definition(rows.cpu(), keys.cpu(), values.cpu(), first, own)
        actual = out[number].double().cpu(), lse[number].double().cpu()
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(caches, tuple(before), rtol=0, atol=0, equal_nan=True)  # nothing else is written


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("q_len", "new"), [(2, 2), (1, 1), (1, 0), (3, 1), (2, 0)])
def test_values_and_caches(device, options, q_len, new):
    check(device, options, q_len=q_len, new=new)


@pytest.mark.parametrize("name", ["plain", "causal", "window_of_both_sides", "all"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("pairs", [D // 2, 3])
def test_rotary(device, name, interleaved, pairs):
    """By the whole width and a part of it; q at the positions of the new keys, or at one if it sees them all."""
    check(device, CASES[name], q_len=3, new=3, rotary=pairs, interleaved=interleaved, tolerance=1e-6)


@pytest.mark.parametrize("name", ["plain", "causal", "all"])
def test_triton(flash_device, name, monkeypatch):
    for each in (attention, attention_with_cache):
        monkeypatch.setattr(flash_attn_cache, each.__name__, partial(each, impl="flash"))
    check(flash_device, CASES[name], q_len=2, new=2, dtype=torch.float32, tolerance=1e-5)


def test_one_length_for_all(device):
    q, k_cache, v_cache = (torch.randn(2, length, 2, 8, device=device) for length in (2, 6, 6))
    expected = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=torch.tensor([4, 4], device=device))
    torch.testing.assert_close(flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=4), expected, rtol=0, atol=0)
    whole = flash_attn.flash_attn_func(q, k_cache, v_cache)
    torch.testing.assert_close(flash_attn_with_kvcache(q, k_cache, v_cache), whole)


@pytest.mark.gpu
def test_a_step_waits_for_nothing_and_can_be_captured(waiting_forbidden):
    make = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    q, k, v, k_cache, v_cache = make(2, 1, 4, 64), *(make(2, n, 2, 64) for n in (1, 1, 256, 256))
    cos, sin = make(256, 32), make(256, 32)
    lengths = torch.tensor([100, 3], device="cuda")
    step = partial(flash_attn_with_kvcache, q, k_cache, v_cache, k, v, cos, sin, lengths, causal=True)
    step()
    with waiting_forbidden():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    lengths.copy_(torch.tensor([40, 200]))
    graph.replay()
    captured = torch.clone(out)
    torch.testing.assert_close(captured, step(), rtol=0, atol=0)


def test_signature():
    names = "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table"
    defaults = {"softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0}
    defaults |= {"rotary_interleaved": True, "alibi_slopes": None, "num_splits": 0, "return_softmax_lse": False}
    parameters = inspect.signature(flash_attn_with_kvcache).parameters
    assert list(parameters) == [*names.split(), *defaults]
    assert {name: parameters[name].default for name in defaults} == defaults
    assert typing.get_type_hints(flash_attn_with_kvcache).keys() >= parameters.keys()


CACHE, NEW, TABLE = torch.zeros(2, 6, 2, 8), torch.zeros(2, 1, 2, 8), torch.ones(6, 4)
VALID = {"q": torch.zeros(2, 1, 4, 8), "k_cache": CACHE, "v_cache": CACHE, "k": NEW, "v": NEW, "cache_seqlens": 5}
NO_KEYS = {"k": None, "v": None}
INVALID = {
    "block_table": (
        {"block_table": TABLE},
        "block_table must be None: paged keys and values are not supported; got a block table",
    ),
    "q": ({"q": NEW[0]}, "q must have shape (batch, q_len, q_heads, d); got (1, 2, 8)"),
    "width": (
        {"k_cache": CACHE[..., :4]},
        "k_cache must have shape (cache_batch, capacity, kv_heads, 8); got (2, 6, 2, 4)",
    ),
    "v_cache": ({"v_cache": CACHE[:, :5]}, "v_cache must have shape (2, 6, 2, dv); got (2, 5, 2, 8)"),
    "alone": ({"v": None}, "k and v must be given together; got k alone"),
    "new": ({"k": NEW[:1]}, "k must have shape (2, new, 2, 8); got (1, 1, 2, 8)"),
    "dtype": (
        {"v_cache": CACHE.double()},
        "v_cache must be torch.float32 on cpu to match q; got torch.float64 on cpu",
    ),
    "new_dtype": ({"k": NEW.double()}, "k must be torch.float32 on cpu to match q; got torch.float64 on cpu"),
    "no_length": ({"cache_seqlens": None}, "cache_seqlens must be given where k is; got None"),
    "full": ({"cache_seqlens": 6}, "cache_seqlens must be from 0 to 5; got 6"),
    "bool": ({"cache_seqlens": True}, "cache_seqlens must be an int or a tensor; got bool"),
    "too_long": ({"cache_seqlens": torch.tensor([2, 6])}, "cache_seqlens must be from 0 to 5; got 2 to 6"),
    "negative": ({"cache_seqlens": torch.tensor([-1, 3])}, "cache_seqlens must be from 0 to 5; got -1 to 3"),
    "float_lengths": (
        {"cache_seqlens": torch.ones(2)},
        "cache_seqlens must be (2,) int32 or int64 numbers on cpu to match q; got torch.float32",
    ),
    "lengths": (
        {"cache_seqlens": torch.tensor([3])},
        "cache_seqlens must be (2,) int32 or int64 numbers on cpu to match q; got (1,) on cpu",
    ),
    "batch_idx": ({"cache_batch_idx": torch.tensor([0, 2])}, "cache_batch_idx must be from 0 to 1; got 0 to 2"),
    "leftpad": ({"cache_leftpad": torch.tensor([-1, 2])}, "cache_leftpad must be from 0 to 6; got -1 to 2"),
    "entries": ({"k_cache": CACHE[:1], "v_cache": CACHE[:1]}, "k_cache must have at least 2 entries to match q; got 1"),
    "sin": ({"rotary_cos": TABLE}, "rotary_cos and rotary_sin must be given together; got rotary_cos alone"),
    "rotary_without_k": (
        {"rotary_cos": TABLE, "rotary_sin": TABLE} | NO_KEYS,
        "rotary_cos and rotary_sin must be None where no k is given; got tensors",
    ),
    "short_table": (
        {"rotary_cos": TABLE[:5], "rotary_sin": TABLE[:5]},
        "rotary_cos must have at least 6 rows, the capacity; got 5",
    ),
    "num_splits": ({"num_splits": -1}, "num_splits must be an integer from 0 on; got -1"),
    "slopes": ({"alibi_slopes": torch.ones(3)}, "alibi_slopes must have shape (4,) or (2, 4); got (3,)"),
    "causal": ({"causal": None}, "causal must be a bool; got None of type NoneType"),
    "gradient_of_cos": (
        {"rotary_cos": TABLE.clone().requires_grad_(), "rotary_sin": TABLE},
        "rotary_cos must need no gradient: attention over a cache has no backward pass; call it under torch.no_grad()",
    ),
    "gradient": (
        {"q": torch.zeros(2, 1, 4, 8, requires_grad=True)},
        "q must need no gradient: attention over a cache has no backward pass; call it under torch.no_grad()",
    ),
}


@pytest.mark.parametrize(("change", "message"), INVALID.values(), ids=INVALID)
def test_invalid_arguments_write_nothing(change, message):
    cache = torch.zeros_like(CACHE)
    given = {**VALID, "k": torch.ones_like(NEW), "k_cache": cache, "v_cache": cache.clone(), **change}
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
        flash_attn_with_kvcache(**given)
    assert (cache == 0).all()
