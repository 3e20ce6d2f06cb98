"""Bad packed sequences and caches: each message names the argument, what was expected and what came."""

from __future__ import annotations

import re

import pytest
import torch

from cs336_systems.attention import attention_varlen, attention_with_cache, explain_varlen, explain_with_cache
from cs336_systems.attention.variants import block_local, relative_bias

from .helpers import says, wrong

Q, KV = torch.zeros(10, 4, 16), torch.zeros(12, 2, 16)
STARTS = torch.tensor([0, 4, 10], dtype=torch.int32)
PACKED = {"q": Q, "k": KV, "v": KV, "cu_seqlens_q": STARTS}
LISTED = block_local(3).with_blocks(6, 6, cu_seqlens_q=STARTS)
NUMBERS = "must be (sequences + 1,) int32 or int64 numbers"
TOO_FEW = f"{NUMBERS}, at least 2 of them"
COUNT = "must count from 0 on, never decrease, and end at"
WRONG_TYPES = {
    "list": ({"cu_seqlens_q": [0, 10]}, f"cu_seqlens_q {NUMBERS}; got list"),
    "floats": ({"cu_seqlens_q": STARTS.float()}, f"cu_seqlens_q {NUMBERS}; got torch.float32"),
    "tokens": ({"q": Q.long()}, "q must have a dtype of"),
    "float_q": ({"max_seqlen_q": 6.0}, "max_seqlen_q must be an int or None; got 6.0 of type float"),
}
WRONG_VALUES = {
    "q_with_batch": ({"q": Q[None]}, "q must have shape (all rows, heads, d); got (1, 10, 4, 16)"),
    "k_dim": ({"k": KV[..., :8]}, "k must have a head dimension of 16 to match q; got (12, 2, 8)"),
    "v_rows": ({"v": KV[:3]}, "v must have shape (12, 2, *) to match k; got (3, 2, 16)"),
    "heads": ({"q": Q[:, :3]}, "k must have a number of heads that divides q's 3; got 2"),
    "one_start": ({"cu_seqlens_q": STARTS[:1]}, f"cu_seqlens_q {TOO_FEW}; got shape (1,)"),
    "matrix": ({"cu_seqlens_q": STARTS[None]}, f"cu_seqlens_q {TOO_FEW}; got shape (1, 3)"),
    "not_from_0": ({"cu_seqlens_q": STARTS + 1}, f"cu_seqlens_q {COUNT} q's 10 rows at most; got [1, 5, 11]"),
    "decreasing": (
        {"cu_seqlens_q": torch.tensor([0, 7, 3])},
        f"cu_seqlens_q {COUNT} q's 10 rows at most; got [0, 7, 3]",
    ),
    "too_many": ({"cu_seqlens_k": STARTS + STARTS // 3}, f"cu_seqlens_k {COUNT} k's 12 rows at most; got [0, 5, 13]"),
    "count": ({"cu_seqlens_k": STARTS[:2]}, "cu_seqlens_k must have shape (3,) to match cu_seqlens_q; got (2,)"),
    "device": ({"cu_seqlens_q": STARTS.to("meta")}, "cu_seqlens_q must be on cpu to match q; got meta"),
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
    "blocks_without": (
        {"mask": block_local(3).with_blocks(10, 12), "max_seqlen_q": 10, "max_seqlen_k": 12},
        "mask must have blocks that were found with cu_seqlens_q for this call; got some without",
    ),
    "blocks_unbounded": (
        {"mask": LISTED},
        "max_seqlen_q and max_seqlen_k must be given for a mask with lists of blocks; got None",
    ),
    "blocks_causal": (
        {"mask": LISTED, "max_seqlen_q": 6, "max_seqlen_k": 6, "causal": True},
        "mask must have blocks that were found for this call",
    ),
    "blocks_bounds": (
        {"mask": LISTED, "max_seqlen_q": 7, "max_seqlen_k": 6},
        "mask must have blocks that were found for this call",
    ),
    "blocks_of_others": (
        {"mask": LISTED, "max_seqlen_q": 6, "max_seqlen_k": 6, "cu_seqlens_k": STARTS - STARTS // 10},
        "mask must have blocks that were found for these sequences; got others in cu_seqlens_k",
    ),
    "blocks_of_fewer": (
        {"mask": LISTED, "max_seqlen_q": 6, "max_seqlen_k": 6, "cu_seqlens_q": torch.tensor([0, 4, 8, 10])},
        "mask must have blocks that were found for these sequences; got others in cu_seqlens_q",
    ),
    "window": ({"window": (-1, 2)}, "window must be (before, after)"),
    "sdpa": ({"impl": "sdpa", "softcap": 2.0}, "torch's kernels are asked for causal masks alone"),
}


@pytest.mark.parametrize("call", [attention_varlen, explain_varlen])
@wrong(WRONG_TYPES, WRONG_VALUES)
def test_packed_sequences_that_do_not_fit(call, wrong, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(**PACKED | wrong)


SLOTS = torch.zeros(2, 2, 8, 16)
CACHE = {"q": torch.zeros(2, 4, 1, 16), "k": SLOTS, "v": SLOTS, "lengths": torch.tensor([3, 8])}
LENGTHS = "lengths must be (batch,) int32 or int64 numbers"
WINDOW = "window must be (before, after), each None or an integer from 0 on"
WRONG_CACHE_TYPES = {
    "list": ({"lengths": [3, 8]}, f"{LENGTHS}; got list"),
    "floats": ({"lengths": CACHE["lengths"].float()}, f"{LENGTHS}; got torch.float32"),
    "window": ({"window": 3}, f"{WINDOW}; got 3"),
}
WRONG_CACHE_VALUES = {
    "q_axes": (
        {"q": CACHE["q"][0], "k": SLOTS.flatten(0, 1), "v": SLOTS.flatten(0, 1)},
        "q must have shape (batch, q_heads, new, d); got (4, 1, 16)",
    ),
    "k_dim": ({"k": SLOTS[..., :8]}, "k must have shape (2, kv_heads, *, 16) to match q; got (2, 2, 8, 8)"),
    "count": ({"lengths": CACHE["lengths"][:1]}, "lengths must have shape (2,) to match q; got (1,)"),
    "device": ({"lengths": CACHE["lengths"].to("meta")}, "lengths must be on cpu to match q; got meta"),
    "softcap": ({"softcap": 0.0}, "softcap must be above 0 and finite; got 0.0"),
    "impl": (
        {"impl": "sdpa", "softcap": 2.0},
        "impl='sdpa' cannot compute this call: torch's kernels are asked for causal masks alone",
    ),
    "gradients": (
        {"k": SLOTS.clone().requires_grad_()},
        "q, k and v must need no gradients: attention over a cache has no backward pass; call it under "
        "torch.no_grad(), or attention()",
    ),
}


@pytest.mark.parametrize("call", [attention_with_cache, explain_with_cache])
@wrong(WRONG_CACHE_TYPES, WRONG_CACHE_VALUES)
def test_caches_that_do_not_fit(call, wrong, error, message):
    for _ in range(2):  # no plan is kept of what is refused
        with pytest.raises(error, match=says(message)):
            call(**CACHE | wrong)


@pytest.mark.parametrize("impl", ["flash", "naive"])
@pytest.mark.parametrize("numbers", [[2**32 + 3, 1], [-1, 1], [1, 9]])
def test_lengths_of_a_cache_that_cannot_be_are_refused_on_a_cpu(impl, numbers):
    attention_with_cache(**CACHE, impl=impl)
    with pytest.raises(ValueError, match=says(f"lengths must be from 0 to 8, the slots of k; got {numbers}")):
        attention_with_cache(**CACHE | {"lengths": torch.tensor(numbers)}, impl=impl)


def test_a_cache_may_need_gradients_where_none_are_recorded():
    with torch.no_grad():
        attention_with_cache(**CACHE | {"k": SLOTS.clone().requires_grad_()})
