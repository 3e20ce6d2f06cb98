"""The statistics of scores of packed sequences: those of each sequence by itself."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from cs336_systems.attention import attention_varlen, score_statistics, score_statistics_varlen
from cs336_systems.attention.variants import document
from cs336_systems.testing import make_packed

from ..helpers import FLOAT, HALF, each_dtype, each_implementation, named, packed_arguments
from ..test_varlen import CASES, HEADS, LENGTHS, maker
from .test_values import check


@each_dtype(flash=(FLOAT, HALF), tiled=(FLOAT,), naive=(FLOAT,))
@pytest.mark.parametrize("name", named(CASES, ["causal_window", "bias"]))
def test_packed_sequences(impl, dtype, device, name):
    causal, features = CASES[name]
    q, k, *_ = make_packed(LENGTHS, heads=HEADS, d=8, beyond=3, dtype=dtype, device=device)
    features = features(maker(LENGTHS, HEADS[0], dtype, device))
    packed = packed_arguments(LENGTHS, device)
    results = check(impl, (q, k), features, function=partial(score_statistics_varlen, **packed), causal=causal)
    q, k = q.to(FLOAT), k.to(FLOAT)
    _, lse = attention_varlen(q, k, k, **packed, **features, causal=causal, impl="naive", return_lse=True)
    torch.testing.assert_close(results["lse"], lse, rtol=1e-5, atol=1e-5)


@each_implementation
def test_packed_sequences_with_lists_of_blocks(impl, device):
    lengths = [(140, 133), (0, 4), (9, 260)]
    q, k, *_ = make_packed(lengths, heads=HEADS, d=8, beyond=3, device=device)
    packed = packed_arguments(lengths, device)
    starts = {name: packed[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    mask = document(*(torch.randint(0, 3, (3, most), device=device).sort(-1).values for most in (140, 260)))
    listed = mask.with_blocks(140, 260, causal=True, **starts)
    expected = score_statistics_varlen(q, k, **packed, causal=True, mask=mask, impl="naive")
    found = score_statistics_varlen(q, k, **packed, causal=True, mask=listed, impl=impl)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@each_implementation
def test_each_packed_sequence_gives_what_it_gives_by_itself(impl, device):
    q, k, *_ = make_packed(LENGTHS, heads=HEADS, d=8, beyond=3, device=device)
    sinks = torch.randn(HEADS[0], device=device)
    settings = {"causal": True, "sinks": sinks, "impl": impl}
    found = score_statistics_varlen(q, k, **packed_arguments(LENGTHS, device), **settings)
    first_q = first_k = 0
    for q_len, k_len in LENGTHS:
        own_q, own_k = (x.transpose(0, 1) for x in (q[first_q:][:q_len], k[first_k:][:k_len]))
        alone = score_statistics(own_q[None], own_k[None], **settings)
        packed = [x[None, :, first_q : first_q + q_len] for x in found]
        torch.testing.assert_close(packed, [*alone], rtol=1e-5, atol=1e-5)
        first_q, first_k = first_q + q_len, first_k + k_len
    for x, expected in zip(found, (sinks, torch.full_like(sinks, -math.inf), torch.zeros_like(sinks)), strict=True):
        torch.testing.assert_close(x[:, first_q:], expected[:, None].expand(-1, 3))


def test_an_option_that_is_none_of_scores():
    q, starts = torch.zeros(7, 2, 4), torch.tensor([0, 7])
    with pytest.raises(TypeError, match=r"^unexpected keyword argument 'dropout_p'$"):
        score_statistics_varlen(q, q, starts, dropout_p=0.1)
