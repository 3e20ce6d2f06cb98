"""Bad packed sequences: each message names the argument, what was expected and what came."""

from __future__ import annotations

import re

import pytest
import torch

from cs336_systems.attention import attention_varlen, explain_varlen
from cs336_systems.attention.variants import block_local, relative_bias

Q, K = torch.zeros(10, 4, 16), torch.zeros(12, 2, 16)
THREE = torch.zeros(12, 3, 16)
STARTS = torch.tensor([0, 4, 10], dtype=torch.int32)
NUMBERS = "must be (sequences + 1,) int32 or int64 numbers"
COUNT = "must count from 0 on, never decrease, and end at"

ARGUMENTS = {
    "q_with_batch": ((Q[None], K, K, STARTS), "q must have shape (all rows, heads, d); got (1, 10, 4, 16)"),
    "k_dim": ((Q, K[..., :8], K, STARTS), "k must have a head dimension of 16 to match q; got (12, 2, 8)"),
    "v_rows": ((Q, K, K[:3], STARTS), "v must have shape (12, 2, *) to match k; got (3, 2, 16)"),
    "heads": ((Q, THREE, THREE, STARTS), "k must have a number of heads that divides q's 4; got 3"),
    "one_start": ((Q, K, K, STARTS[:1]), f"cu_seqlens_q {NUMBERS}, at least 2 of them; got shape (1,)"),
    "matrix": ((Q, K, K, STARTS[None]), f"cu_seqlens_q {NUMBERS}, at least 2 of them; got shape (1, 3)"),
    "not_from_0": ((Q, K, K, STARTS + 1), f"cu_seqlens_q {COUNT} q's 10 rows at most; got [1, 5, 11]"),
    "decreasing": ((Q, K, K, torch.tensor([0, 7, 3])), f"cu_seqlens_q {COUNT} q's 10 rows at most; got [0, 7, 3]"),
    "too_many": (
        (Q, K, K, STARTS, torch.tensor([0, 4, 13])),
        f"cu_seqlens_k {COUNT} k's 12 rows at most; got [0, 4, 13]",
    ),
    "other_count": (
        (Q, K, K, STARTS, STARTS[:2]),
        "cu_seqlens_k must have shape (3,) to match cu_seqlens_q; got (2,)",
    ),
    "device": ((Q, K, K, STARTS.to("meta")), "cu_seqlens_q must be on cpu to match q; got meta"),
}
TYPES = {
    "list": ((Q, K, K, [0, 10]), f"cu_seqlens_q {NUMBERS}; got list"),
    "floats": ((Q, K, K, STARTS.float()), f"cu_seqlens_q {NUMBERS}; got torch.float32"),
    "tokens": ((Q.long(), K, K, STARTS), "q must have a dtype of"),
}
OPTIONS = {
    "short_q": ({"max_seqlen_q": 5}, "max_seqlen_q must be at least 6, the longest sequence; got 5"),
    "short_k": ({"max_seqlen_k": -1}, "max_seqlen_k must be at least 0; got -1"),
    "bias_unbounded": (
        {"bias": torch.zeros(6, 6)},
        "bias must have a shape that broadcasts to (2, 4, 1, 1); got (6, 6), without max_seqlen_q and max_seqlen_k",
    ),
    "relative_unbounded": (
        {"scores": relative_bias(torch.zeros(4, 11))},
        "max_seqlen_q and max_seqlen_k must be given for what scores captured for distances; got None",
    ),
    "slopes": ({"alibi_slopes": torch.zeros(3, 4)}, "alibi_slopes must have shape (4,) or (2, 4); got (3, 4)"),
    "blocks": ({"mask": block_local(3).with_blocks(10, 12)}, "mask must have no lists of blocks for packed sequences"),
    "window": ({"window": (-1, 2)}, "window must be (before, after)"),
    "sdpa": ({"impl": "sdpa"}, "torch's kernels are asked for causal masks alone"),
}

either = pytest.mark.parametrize("call", [attention_varlen, explain_varlen])


@either
@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_do_not_fit(call, name):
    arguments, message = ARGUMENTS[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        call(*arguments)


@either
@pytest.mark.parametrize("name", TYPES)
def test_arguments_of_wrong_types(call, name):
    arguments, message = TYPES[name]
    with pytest.raises(TypeError, match=re.escape(message)):
        call(*arguments)


@either
@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_do_not_fit(call, name):
    options, message = OPTIONS[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        call(Q, K[:10], K[:10], STARTS, **options)


@either
def test_a_bound_is_a_whole_number(call):
    with pytest.raises(TypeError, match=re.escape("max_seqlen_q must be an int or None; got 6.0 of type float")):
        call(Q, K, K, STARTS, max_seqlen_q=6.0)
