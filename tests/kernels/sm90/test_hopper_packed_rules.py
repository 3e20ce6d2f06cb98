"""Masks, score changes and lists of blocks of packed sequences by the kernels for Hopper, emulated and on one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cs336_systems.attention import variants
from cs336_systems.attention.call import Arguments, make_call
from cs336_systems.attention.mods import mask_mod, score_mod
from cs336_systems.attention.sizes import Packed
from cs336_systems.testing import assert_packed_within_budget, make_packed

from .hopper import KERNELS, WITH_PORTABLE, compute, heads_first, kernels, packed_aux, rows_first  # noqa: F401 - a fixture

LENGTHS = [(70, 90), (0, 4), (300, 260), (1, 0), (129, 400), (40, 33)]
MOST = 300, 400
HEADS = (4, 2)

each_kernel = pytest.mark.parametrize("kernels", KERNELS, indirect=True)


def packed_call(inputs, lengths, most, settings, features):
    """The call of packed inputs, and these as it takes them."""
    inputs, aux = heads_first(inputs), packed_aux(lengths, inputs.q.device)
    packed = Packed(aux.cu_seqlens_q, aux.cu_seqlens_k, *most)
    return make_call(*inputs[:3], Arguments.of(**settings, **features), packed), inputs


def results(call, packed, backend, **more):
    """Values and gradients, with rows before heads."""
    return rows_first(compute(packed, call.options, call.aux, backend=backend, **more))


def listed(mask, device, **settings):
    """A mask with the blocks of each sequence."""
    aux = packed_aux(LENGTHS, device)
    starts = {"cu_seqlens_q": aux.cu_seqlens_q, "cu_seqlens_k": aux.cu_seqlens_k}
    return mask.with_blocks(*MOST, **starts, heads=HEADS[0], **settings)


def documents(device):
    return variants.document(*(torch.randint(0, 3, (len(LENGTHS), x), device=device).sort(-1).values for x in MOST))


def trees(device):
    """Of a prefix and three branches that do not see one another."""
    lengths = [[150, 50, 60, 140]] * len(LENGTHS)
    return variants.prefix_tree(variants.tree_layout(lengths, [[-1, 0, 0, 0]] * len(LENGTHS), device=device).ends)


def known_pairs(device):
    """A bias that is NaN past the ends of each sequence."""
    bias = torch.full((len(LENGTHS), HEADS[0], *MOST), math.nan, device=device)
    for number, (q_len, k_len) in enumerate(LENGTHS):
        bias[number, :, :q_len, :k_len] = torch.randn(HEADS[0], q_len, k_len, device=device)
    return bias


def numbers(device, *shape):
    return torch.randn(shape, device=device)


def for_rows_and_keys(device):
    of_rows, of_keys = numbers(device, MOST[0]), numbers(device, HEADS[0], MOST[1])
    return score_mod(lambda s, b, h, q, k: s + of_rows[q] * of_keys[h, k])


CASES: dict[str, Any] = {
    "documents": (64, {"causal": True}, lambda on: {"mask": documents(on)}, False),
    "documents_listed": (64, {"causal": True}, lambda on: {"mask": documents(on)}, True),
    "documents_listed_128": (128, {"causal": "top_left"}, lambda on: {"mask": documents(on)}, True),
    "trees_listed": (128, {"causal": "top_left"}, lambda on: {"mask": trees(on)}, True),
    "trees_listed_96": (96, {"causal": "top_left"}, lambda on: {"mask": trees(on)}, True),
    "blocks_listed_256": (256, {"window": (90, None)}, lambda on: {"mask": ~variants.block_local(100)}, True),
    "of_heads_listed": (
        64, {"causal": True, "window": (200, None)},
        lambda on: {"mask": mask_mod(lambda b, h, q, k: (q + k * b) % (h + 2) == 0)}, True,
    ),
    "nothing_listed": (64, {}, lambda on: {"mask": mask_mod(lambda b, h, q, k: q < 0)}, True),
    "bias": (64, {"causal": True}, lambda on: {"bias": known_pairs(on)}, False),
    "bias_128": (128, {}, lambda on: {"bias": known_pairs(on).bfloat16()}, False),
    "relative_bias": (128, {}, lambda on: {"scores": variants.relative_bias(numbers(on, 4, 699), 299)}, False),
    "dense_mask": (64, {}, lambda on: {"mask": torch.rand(len(LENGTHS), 1, *MOST, device=on) < 0.6}, False),
    "rows_and_keys": (80, {"causal": True}, lambda on: {"scores": for_rows_and_keys(on)}, False),
    "no_element_of_a_row": (
        64, {"causal": True},
        lambda on: {
            "mask": mask_mod(lambda b, h, q, k: (2 * q + k + h) % 3 != 0),
            "scores": score_mod(lambda s, b, h, q, k: s - (h + 1) * (q - 2 * k).abs() * 0.1),
        },
        False,
    ),
}  # fmt: skip


@each_kernel
@pytest.mark.parametrize("name", CASES)
def test_results_are_within_the_budget(kernels, name):  # noqa: F811
    backend, device = kernels
    d, settings, features, with_lists = CASES[name]
    torch.manual_seed(len(name))
    inputs, given = (
        make_packed(LENGTHS, heads=HEADS, d=d, beyond=5, dtype=torch.bfloat16, device=device),
        features(device),
    )
    expected = dict(given)
    if "mask" in given and not isinstance(given["mask"], torch.Tensor):
        expected["mask"] = given["mask"].to_tensor(*MOST, batch=len(LENGTHS), heads=HEADS[0], device=device)
    if with_lists:
        given["mask"] = listed(given["mask"], device, **settings)
    actual = results(*packed_call(inputs, LENGTHS, MOST, settings, given), backend, calls=2)
    expected |= {"window": settings["window"]} if "window" in settings else {}
    assert_packed_within_budget(actual, inputs, LENGTHS, causal=settings.get("causal", False), features=expected)


@each_kernel
@pytest.mark.parametrize("with_lists", [False, True])
@pytest.mark.parametrize("d", [64, 256])
def test_bounds_and_lists_that_do_not_hold_leave_the_next_call_as_it_is(kernels, d, with_lists):  # noqa: F811
    """Numbers are meaningless then, but every address is inside, and every wait ends."""
    backend, device = kernels
    inputs = make_packed(LENGTHS, heads=HEADS, d=d, beyond=5, dtype=torch.bfloat16, device=device)
    mask = documents(device)
    given = {"mask": listed(mask, device, causal=True) if with_lists else mask}
    call, packed = packed_call(inputs, LENGTHS, MOST, {"causal": True}, given)
    expected = results(call, packed, backend)
    for q_len, k_len in ([545, 0], [0, 792]), ([540, 5], [700, 20]), ([0, 0], [792, 0]):
        others = [(q_len[0], k_len[0]), (q_len[1], k_len[1]), *[(0, 0)] * 4]
        results(packed_call(inputs, others, MOST, {"causal": True}, given)[0], packed, backend)
    again = results(call, packed, backend)
    assert all(torch.equal(expected[name], again[name]) for name in ("out", "lse", "dk", "dv"))


@each_kernel
@pytest.mark.parametrize(("d", "count"), [(64, 31), (64, 40), (128, 5), (256, 12)])
@pytest.mark.parametrize("causal", [False, True])
def test_tiles_of_many_sequences_and_sections_of_heads(kernels, d, count, causal, monkeypatch):  # noqa: F811
    """Of up to 31 the longest is claimed first in the last sections."""
    from cs336_systems.kernels.sm90 import launches

    monkeypatch.setattr(launches, "SECTION_BYTES", 1)
    backend, device = kernels
    lengths = [(number * 67 % 150, number * 53 % 140) for number in range(count)]
    inputs = make_packed(lengths, heads=HEADS, d=d, beyond=5, dtype=torch.bfloat16, device=device)
    actual = results(*packed_call(inputs, lengths, (150, 140), {"causal": causal}, {}), backend)
    assert_packed_within_budget(actual, inputs, lengths, causal=causal)


def learned(device, *shape):
    return numbers(device, *shape).requires_grad_()


LEARNED = {
    "slopes": lambda on: {"alibi_slopes": learned(on, 4)},
    "slopes_of_sequences": lambda on: {"alibi_slopes": learned(on, len(LENGTHS), 4)},
    "pairs": lambda on: {"bias": learned(on, 1, 4, *MOST)},
    "rows": lambda on: {"bias": learned(on, len(LENGTHS), 1, MOST[0], 1)},
    "columns": lambda on: {"bias": learned(on, 1, 4, 1, MOST[1])},
}


@pytest.mark.filterwarnings("ignore:.* encountered in :RuntimeWarning")
@pytest.mark.parametrize("kernels", WITH_PORTABLE, indirect=True)
@pytest.mark.parametrize("name", LEARNED)
def test_gradients_of_what_score_changes_captured(kernels, name):  # noqa: F811
    backend, device = kernels
    inputs = make_packed(LENGTHS, heads=HEADS, d=64, beyond=5, dtype=torch.float16, device=device)
    given = LEARNED[name](device)
    call, packed = packed_call(inputs, LENGTHS, MOST, {"causal": "top_left"}, given)
    captured = {f"d{feature}": x for feature, x in given.items()}
    actual = results(call, packed, backend, captured=captured)
    assert_packed_within_budget(actual, inputs, LENGTHS, causal="top_left", features=given)
