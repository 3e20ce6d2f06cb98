"""Windows and lengths of any size: what reaches further than a sequence hides nothing, and nothing wraps around."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch

from cs336_systems.attention import attention, attention_varlen, attention_with_cache, explain
from cs336_systems.attention.rules import Mask
from cs336_systems.attention.validation import window_sides
from cs336_systems.attention.variants import alibi, block_local, causal, dilated, window
from cs336_systems.kernels.call import MAX_LENGTH
from cs336_systems.testing import Shapes, assert_within_budget, evaluate, make_inputs, starts_of

from .helpers import EVERY, FLOAT, HALF, each_implementation, named, slow

FAR_SIDES = [2**29, 2**30, 2**31 - 1, 2**31, 2**32 + 3, 2**40, 2**62, 2**63, 2**200]
SOME = [2**31 - 1, 2**63]


@pytest.mark.parametrize("causal_mask", [False, True, pytest.param("top_left", marks=slow)])
@pytest.mark.parametrize("far_first", [True, False])
@each_implementation
def test_a_far_side_hides_nothing(device, impl, causal_mask, far_first):
    """The other side does, and the sides of different calls are different kernels' arguments."""
    dtype = FLOAT if impl == "naive" else HALF  # naive's log-sum-exp has the inputs' dtype
    for side in SOME:
        inputs = make_inputs(Shapes.of(1, q_len=20, k_len=37, d=16), dtype=dtype, device=device)
        asked, near = ((side, 3), (None, 3)) if far_first else ((3, side), (3, None))
        attend = partial(attention, impl=impl, causal=causal_mask, window=asked, return_lse=True)
        assert_within_budget(evaluate(attend, inputs), inputs, causal=causal_mask, features={"window": near})


@pytest.mark.parametrize("causal_mask", [None, "top_left", "bottom_right"])
@pytest.mark.parametrize(("q_len", "k_len"), [(1, 1), (3, 5), (5, 3), (4, 4), (1, 7)])
def test_a_window_that_hides_nothing_is_none(causal_mask, q_len, k_len):
    """What is None hides no pair, and what hides none is None."""
    distance = torch.arange(k_len) - torch.arange(q_len)[:, None] - (k_len - q_len if causal_mask != "top_left" else 0)
    for before in (*range(7), *FAR_SIDES):
        for after in (*range(7), *FAR_SIDES):
            left, right, bottom_right = window_sides(causal_mask, (before, after), q_len, k_len)
            assert bottom_right == (causal_mask != "top_left")
            assert left == (None if before > 6 or bool((distance >= -before).all()) else before)
            hides = after <= 6 and bool((distance > after).any())
            assert right == (0 if causal_mask else after if hides else None)


@pytest.mark.parametrize("causal_mask", [True, pytest.param(False, marks=slow)])
@pytest.mark.parametrize("impl", named(EVERY, ["tiled", "naive"]))
def test_packed_sequences(device, impl, causal_mask):
    q_lens, k_lens = (5, 0, 9), (7, 3, 20)
    q, k = (torch.randn(sum(lens), 1, 16, device=device) for lens in (q_lens, k_lens))
    starts = starts_of(q_lens, device), starts_of(k_lens, device)
    attend = partial(attention_varlen, q, k, k, *starts, causal=causal_mask, impl=impl)
    for near in ((None, 2), (2, None), None):
        expected = attend(window=near)
        for side in SOME:
            asked = tuple(side if x is None else x for x in near or (None, None))
            assert torch.equal(attend(window=asked), expected)


FAR_MASKS: dict[str, tuple[Mask, Mask | None]] = {
    "window": (window(2**31 - 1, 2**31 - 1), None),
    "one_side": (window(2, 2**31 - 1), window(2, 100)),
    "shift": (window(2**31 + 1, 2**31 + 2, 2**31), window(1, 2**31)),
    "causal": (causal(2**31 - 1), None),
    "nothing": (causal(-(2**40)), causal(-100)),
    "dilated": (dilated(2**31), dilated(100)),
    "block_local": (block_local(2**63), None),
}


@pytest.mark.parametrize("name", FAR_MASKS)
@each_implementation
def test_numbers_of_masks(device, impl, name):
    far, near = FAR_MASKS[name]
    q, k = torch.randn(1, 2, 20, 16, device=device), torch.randn(1, 2, 37, 16, device=device)
    expected = attention(q, k, k, mask=near, impl="naive")
    torch.testing.assert_close(attention(q, k, k, mask=far, impl=impl), expected)


def test_a_shift_of_distances_has_to_be_one_of_positions():
    with pytest.raises(ValueError, match=r"^shift must be from -1073741824 to 1073741824; got 2147483647$"):
        alibi(torch.ones(1, 2), 2**31 - 1)


def test_more_rows_than_kernels_count_are_refused():
    many, one = (torch.zeros(1, 1, 1, 16).expand(1, 1, length, 16) for length in (MAX_LENGTH + 1, 1))
    reason = f"it counts rows in 32 bits, up to {MAX_LENGTH}; got 1 of q and {MAX_LENGTH + 1} of k"
    for call in (attention, partial(attention_with_cache, lengths=torch.tensor([3]))):
        with pytest.raises(ValueError, match=re.escape(reason)):
            call(one, many, many, impl="flash")
    assert explain(one, many, many, window=(3, 3)).reasons["triton"] == reason
