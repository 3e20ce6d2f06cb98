"""Gradients of what score changes captured, beside the kernels for Hopper, emulated and on one: against float64."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.attention import variants
from cs336_systems.attention.mods import score_mod

from .hopper import WITH_PORTABLE, check_features, kernels  # noqa: F401 - a fixture
from .test_hopper_rules import documents, listed, numbers, sizes


def learned(device, *shape):
    return numbers(device, *shape).requires_grad_()


def temperatures(device, heads, q_len, k_len=None):
    """A factor for each head, and products of numbers for rows of q and for keys."""
    heat, of_rows, of_keys = learned(device, heads), learned(device, 2, q_len), learned(device, heads, k_len or q_len)
    return score_mod(lambda s, b, h, q, k: s * heat[h] + of_rows[b, q] * of_keys[h, k])


CAPTURED = {
    "pairs": (sizes(), {}, lambda on: {"bias": learned(on, 2, 2, 200, 200)}),
    "pairs_128": (sizes(130, 210, d=128), {"causal": True}, lambda on: {"bias": learned(on, 2, 130, 210)}),
    "distances": (
        sizes(d=128), {},
        lambda on: {"window": (60, 20), "scores": variants.relative_bias(learned(on, 2, 399))},
    ),
    "heads": (sizes(heads=(4, 2)), {"causal": True}, lambda on: {"alibi_slopes": learned(on, 4)}),
    "entries_and_heads": (
        sizes(90, 170, d=128), {},
        lambda on: {"alibi_slopes": learned(on, 2, 2), "window": (60, 20), "softcap": 3.0},
    ),
    "rows": (sizes(130, 70, d=80), {"causal": True}, lambda on: {"bias": learned(on, 2, 1, 130, 1)}),
    "keys_80": (sizes(130, 300, d=80, heads=(4, 1)), {}, lambda on: {"bias": learned(on, 4, 1, 300)}),
    "rows_that_see_nothing": (
        sizes(520, 150, d=128), {"causal": "top_left"},
        lambda on: {"window": (100, None), "scores": temperatures(on, 2, 520, 150)},
    ),
    "keys_that_none_sees": (
        sizes(150, 520), {"causal": "top_left"}, lambda on: {"scores": temperatures(on, 2, 150, 520), "softcap": 4.0},
    ),
    "pairs_264": (sizes(130, 70, d=264), {"causal": True}, lambda on: {"bias": learned(on, 2, 130, 70)}),
    "columns": (sizes(70, 130, d=256, heads=(4, 1)), {}, lambda on: {"bias": learned(on, 4, 1, 130)}),
    "listed": (
        sizes(300, heads=(4, 2)), {"causal": True},
        lambda on: {
            "scores": temperatures(on, 4, 300), "mask": listed(variants.document(documents(on, 300)), 300, causal=True),
        },
    ),
    "dropout": (
        sizes(130, 210, d=128, heads=(4, 2)), {},
        lambda on: {
            "alibi_slopes": learned(on, 4), "bias": learned(on, 4, 130, 210), "dropout_p": 0.3, "seed": 1,
        },
    ),
    "all": (
        sizes(100), {},
        lambda on: {
            "alibi_slopes": learned(on, 2), "bias": learned(on, 100, 100), "scores": temperatures(on, 2, 100),
            "sinks": learned(on, 2),
        },
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.* encountered in :RuntimeWarning")
@pytest.mark.parametrize("kernels", WITH_PORTABLE, indirect=True)
@pytest.mark.parametrize("name", CAPTURED)
def test_gradients_of_what_score_changes_captured(kernels, name):  # noqa: F811
    """By a kernel of their own, from what the backward leaves; above d 128 by portable ones."""
    check_features(kernels, CAPTURED[name], dtype=torch.float16, learned=True)


def root(factors):
    """A score change whose derivative at 0, the score of pairs that do not exist, is infinite."""
    return score_mod(lambda s, b, h, q, k: s.abs().sqrt() * factors[h])


def sign(factors):
    """One whose value there is NaN, and so are its derivatives."""
    return score_mod(lambda s, b, h, q, k: s / s.abs() * factors[h] + s)


@pytest.mark.filterwarnings("ignore:.* encountered in :RuntimeWarning")
@pytest.mark.parametrize("kernels", WITH_PORTABLE, indirect=True)
@pytest.mark.parametrize("make", [root, sign])
@pytest.mark.parametrize("shapes", [sizes(70, 90), sizes(130, 70, d=128), sizes(70, d=192), sizes(70, d=192, dv=128)])
def test_derivatives_that_are_not_finite_at_0(kernels, make, shapes):  # noqa: F811
    check_features(
        kernels, (shapes, {}, lambda on: {"scores": make(learned(on, 2))}), dtype=torch.float16, learned=True
    )
