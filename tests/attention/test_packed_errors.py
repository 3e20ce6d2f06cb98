"""Bad packed sequences and caches: each message names the argument, what was expected and what came."""

from __future__ import annotations

import re

import pytest
import torch

from cs336_systems.attention import attention_varlen, attention_with_cache, explain_varlen, explain_with_cache
from cs336_systems.attention.variants import block_local, relative_bias

from .helpers import rows

PACKED_Q, PACKED_K = torch.zeros(10, 4, 16), torch.zeros(12, 2, 16)
THREE = torch.zeros(12, 3, 16)
STARTS = torch.tensor([0, 4, 10], dtype=torch.int32)
NUMBERS = "must be (sequences + 1,) int32 or int64 numbers"
COUNT = "must count from 0 on, never decrease, and end at"

WRONG_PACKED = {
    "q_with_batch": (
        (PACKED_Q[None], PACKED_K, PACKED_K, STARTS),
        "q must have shape (all rows, heads, d); got (1, 10, 4, 16)",
    ),
    "k_dim": (
        (PACKED_Q, PACKED_K[..., :8], PACKED_K, STARTS),
        "k must have a head dimension of 16 to match q; got (12, 2, 8)",
    ),
    "v_rows": ((PACKED_Q, PACKED_K, PACKED_K[:3], STARTS), "v must have shape (12, 2, *) to match k; got (3, 2, 16)"),
    "heads": ((PACKED_Q, THREE, THREE, STARTS), "k must have a number of heads that divides q's 4; got 3"),
    "one_start": (
        (PACKED_Q, PACKED_K, PACKED_K, STARTS[:1]),
        f"cu_seqlens_q {NUMBERS}, at least 2 of them; got shape (1,)",
    ),
    "matrix": (
        (PACKED_Q, PACKED_K, PACKED_K, STARTS[None]),
        f"cu_seqlens_q {NUMBERS}, at least 2 of them; got shape (1, 3)",
    ),
    "not_from_0": (
        (PACKED_Q, PACKED_K, PACKED_K, STARTS + 1),
        f"cu_seqlens_q {COUNT} q's 10 rows at most; got [1, 5, 11]",
    ),
    "decreasing": (
        (PACKED_Q, PACKED_K, PACKED_K, torch.tensor([0, 7, 3])),
        f"cu_seqlens_q {COUNT} q's 10 rows at most; got [0, 7, 3]",
    ),
    "too_many": (
        (PACKED_Q, PACKED_K, PACKED_K, STARTS, torch.tensor([0, 4, 13])),
        f"cu_seqlens_k {COUNT} k's 12 rows at most; got [0, 4, 13]",
    ),
    "other_count": (
        (PACKED_Q, PACKED_K, PACKED_K, STARTS, STARTS[:2]),
        "cu_seqlens_k must have shape (3,) to match cu_seqlens_q; got (2,)",
    ),
    "device": ((PACKED_Q, PACKED_K, PACKED_K, STARTS.to("meta")), "cu_seqlens_q must be on cpu to match q; got meta"),
}
WRONG_PACKED_TYPES = {
    "list": ((PACKED_Q, PACKED_K, PACKED_K, [0, 10]), f"cu_seqlens_q {NUMBERS}; got list"),
    "floats": ((PACKED_Q, PACKED_K, PACKED_K, STARTS.float()), f"cu_seqlens_q {NUMBERS}; got torch.float32"),
    "tokens": ((PACKED_Q.long(), PACKED_K, PACKED_K, STARTS), "q must have a dtype of"),
}
WRONG_PACKED_OPTIONS = {
    "short_q": ({"max_seqlen_q": 5}, "max_seqlen_q must be at least 6, the longest sequence; got 5"),
    "float_q": ({"max_seqlen_q": 6.0}, "max_seqlen_q must be an int or None; got 6.0 of type float"),
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
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        *rows({name: (given, ValueError, message) for name, (given, message) in WRONG_PACKED.items()}),
        *rows({name: (given, TypeError, message) for name, (given, message) in WRONG_PACKED_TYPES.items()}),
    ],
)
def test_packed_sequences_that_do_not_fit(call, arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(*arguments)


@either
@pytest.mark.parametrize(("options", "message"), rows(WRONG_PACKED_OPTIONS))
def test_options_of_packed_sequences_that_do_not_fit(call, options, message):
    error = TypeError if isinstance(options.get("max_seqlen_q"), float) else ValueError
    with pytest.raises(error, match=re.escape(message)):
        call(PACKED_Q, PACKED_K[:10], PACKED_K[:10], STARTS, **options)


NEW, CACHE, LENGTH = torch.zeros(2, 4, 1, 16), torch.zeros(2, 2, 8, 16), torch.tensor([3, 8])
SLOTS = "lengths must be (batch,) int32 or int64 numbers"
WRONG_CACHES = {
    "q_axes": (
        (NEW[0], CACHE.flatten(0, 1), CACHE.flatten(0, 1), LENGTH),
        {},
        ValueError,
        "q must have shape (batch, q_heads, new, d); got (4, 1, 16)",
    ),
    "k_dim": (
        (NEW, CACHE[..., :8], CACHE, LENGTH),
        {},
        ValueError,
        "k must have shape (2, kv_heads, *, 16) to match q; got (2, 2, 8, 8)",
    ),
    "list": ((NEW, CACHE, CACHE, [3, 8]), {}, TypeError, f"{SLOTS}; got list"),
    "floats": ((NEW, CACHE, CACHE, LENGTH.float()), {}, TypeError, f"{SLOTS}; got torch.float32"),
    "count": ((NEW, CACHE, CACHE, LENGTH[:1]), {}, ValueError, "lengths must have shape (2,) to match q; got (1,)"),
    "device": ((NEW, CACHE, CACHE, LENGTH.to("meta")), {}, ValueError, "lengths must be on cpu to match q; got meta"),
    "softcap": (
        (NEW, CACHE, CACHE, LENGTH),
        {"softcap": 0.0},
        ValueError,
        "softcap must be above 0 and finite; got 0.0",
    ),
    "window": (
        (NEW, CACHE, CACHE, LENGTH),
        {"window": 3},
        TypeError,
        "window must be (before, after), each None or an integer from 0 on; got 3",
    ),
    "impl": (
        (NEW, CACHE, CACHE, LENGTH),
        {"impl": "sdpa"},
        ValueError,
        "impl='sdpa' cannot compute this call: torch's kernels are asked for causal masks alone",
    ),
    "gradients": (
        (NEW, CACHE.clone().requires_grad_(), CACHE, LENGTH),
        {},
        ValueError,
        "q, k and v must need no gradients: attention over a cache has no backward pass; call it under "
        "torch.no_grad(), or attention()",
    ),
}


@pytest.mark.parametrize("call", [attention_with_cache, explain_with_cache])
@pytest.mark.parametrize(("arguments", "options", "error", "message"), rows(WRONG_CACHES))
def test_caches_that_do_not_fit(call, arguments, options, error, message):
    for _ in range(2):  # no plan is kept of what is refused
        with pytest.raises(error, match=f"^{re.escape(message)}$"):
            call(*arguments, **options)


@pytest.mark.parametrize("impl", ["flash", "naive"])
@pytest.mark.parametrize("numbers", [[2**32 + 3, 1], [-1, 1], [1, 9], [-(2**40), 2**62]])
def test_lengths_of_a_cache_that_cannot_be_are_refused_on_a_cpu(impl, numbers):
    attention_with_cache(NEW, CACHE, CACHE, LENGTH, impl=impl)
    with pytest.raises(
        ValueError, match=f"^{re.escape(f'lengths must be from 0 to 8, the slots of k; got {numbers}')}$"
    ):
        attention_with_cache(NEW, CACHE, CACHE, torch.tensor(numbers), impl=impl)


def test_a_cache_may_need_gradients_where_none_are_recorded():
    with torch.no_grad():
        attention_with_cache(NEW, CACHE.clone().requires_grad_(), CACHE, LENGTH)
