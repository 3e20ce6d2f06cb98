"""Masks and score changes by the kernels for Hopper, emulated and on one: values and gradients against float64."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.attention import variants
from cs336_systems.attention.call import Arguments, make_call
from cs336_systems.attention.mods import mask_mod, score_mod
from cs336_systems.testing import Shapes, make_inputs

from .hopper import (  # noqa: F401 - a fixture
    KERNELS,
    WITH_PORTABLE,
    check_features,
    kernels,
)

each_kernel = pytest.mark.parametrize("kernels", KERNELS, indirect=True)


def sizes(q_len=200, k_len=None, d=64, heads=(2, 2), dv=None):
    return Shapes.of(2, q_len=q_len, k_len=k_len or q_len, d=d, dv=dv or d, q_heads=heads[0], kv_heads=heads[1])


def numbers(device, *shape):
    return torch.randn(shape, device=device)


def documents(device, length, every=37):
    return (torch.arange(length, device=device) + torch.tensor([[0], [3]], device=device)) // every


def listed(mask, q_len, k_len=None, **asked):
    return mask.with_blocks(q_len, k_len or q_len, **asked)


def trees(device):
    """One whose branches have branches, and two roots with a shorter row."""
    lengths = [[130, 70, 60, 90, 40, 110], [200, 35, 150]]
    return variants.tree_layout(lengths, [[-1, 0, 1, 1, 0, 4], [-1, 0, -1]], device=device).ends


def distances(device, heads=2, length=399):
    return variants.relative_bias(numbers(device, heads, length))


def by_heads(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() % (h + 2) != 1


def by_distance(b, h, q_idx, kv_idx):
    """Comparisons of positions, each kind of them."""
    near = ((q_idx - kv_idx).abs() < 40) & (kv_idx - q_idx <= 11) & (q_idx > kv_idx - 9)
    return near | ((q_idx - kv_idx) % 16 == 0) | (kv_idx % 7 == q_idx % 7) & (q_idx - kv_idx >= 60)


def by_far_distance(b, h, q_idx, kv_idx):
    """Numbers that make sums of more than 32 bits: all true but the last ones."""
    true = (q_idx - kv_idx < 2**31 - 1) & (kv_idx - q_idx > -(2**31)) & (q_idx <= kv_idx + 2**40)
    return (true & (q_idx > kv_idx)) | (q_idx - kv_idx >= 2**31 - 1) | (kv_idx - 2**40 > q_idx)


def blocks_by_heads(b, h, q_idx, kv_idx):
    """Lists of different lengths, and empty ones, for heads that share keys."""
    return (q_idx // 128 + kv_idx // 128 < h + b) & ((q_idx + kv_idx) % 3 != h)


def last_keys_for_every_third(b, h, q_idx, kv_idx):
    """Every third row sees all keys; the others do not see the last ones, which are visited first."""
    return (q_idx % 3 == 0) | (kv_idx < 300)


def of_earlier_blocks(b, h, q_idx, kv_idx):
    """Each row sees keys of earlier blocks alone."""
    return q_idx // 128 > kv_idx // 128


def since_multiples_of_90(b, h, q_idx, kv_idx):
    """Documents that begin every 90 rows, seen to their end."""
    return q_idx // 90 * 90 <= kv_idx


def late_and_large(score, b, h, q_idx, kv_idx):
    """Raises what is visited last beyond what P can be relative to the first scores."""
    return score + torch.where(kv_idx < 70, 200.0, 0.0)


CASES = {
    "document": (sizes(), {"causal": True}, lambda on: {"mask": variants.document(documents(on, 200))}),
    "document_listed": (
        sizes(500), {"causal": True},
        lambda on: {"mask": listed(variants.document(documents(on, 500)), 500, causal=True)},
    ),
    "listed_window": (
        sizes(700), {"causal": True},
        lambda on: {
            "mask": listed(variants.document(documents(on, 700, 300)), 700, causal=True, window=(90, None)),
            "window": (90, None),
        },
    ),
    "prefix_listed": (
        sizes(300), {},
        lambda on: {"mask": listed(variants.prefix(torch.tensor([50, 130], device=on)) | variants.causal(), 300)},
    ),
    "trees_listed": (
        sizes(500, heads=(4, 2)), {"causal": True},
        lambda on: {"mask": listed(variants.prefix_tree(trees(on)), 500, causal=True)},
    ),
    "by_distance": (sizes(330, 270), {}, lambda on: {"mask": mask_mod(by_distance)}),
    "by_distance_listed": (
        sizes(400, 512, d=128), {"causal": True},
        lambda on: {"mask": listed(mask_mod(by_distance), 400, 512, causal=True, device=on)},
    ),
    "by_far_distance": (sizes(), {}, lambda on: {"mask": mask_mod(by_far_distance)}),
    "by_heads": (sizes(heads=(4, 2)), {}, lambda on: {"mask": mask_mod(by_heads)}),
    "by_heads_listed": (sizes(300), {}, lambda on: {"mask": listed(mask_mod(by_heads), 300, heads=2, device=on)}),
    **{
        f"blocks_by_heads_{d}": (
            sizes(400, 500, d=d, heads=heads), {},
            lambda on, q_heads=heads[0]: {
                "mask": listed(mask_mod(blocks_by_heads), 400, 500, batch=2, heads=q_heads, device=on),
            },
        )
        for d, heads in ((64, (6, 2)), (128, (4, 1)), (256, (4, 2)))
    },
    "causal_by_heads": (
        sizes(500, heads=(4, 2)), {"causal": True},
        lambda on: {
            "mask": listed(mask_mod(lambda b, h, q, k: q - k < 90 * (h + 1)), 500, causal=True, heads=4, device=on),
        },
    ),
    "dense_mask": (sizes(130, 270), {}, lambda on: {"mask": torch.rand(2, 2, 130, 270, device=on) < 0.6}),
    "padded_keys": (sizes(heads=(4, 1)), {}, lambda on: {"mask": torch.rand(2, 1, 1, 200, device=on) < 0.6}),
    "alibi": (sizes(), {"causal": True}, lambda on: {"alibi_slopes": torch.rand(2, device=on)}),
    "alibi_128": (sizes(d=128), {}, lambda on: {"alibi_slopes": torch.rand(2, 2, device=on)}),
    "bias": (sizes(), {}, lambda on: {"bias": numbers(on, 2, 2, 200, 200)}),
    "bias_128": (sizes(130, 210, d=128), {"causal": True}, lambda on: {"bias": numbers(on, 2, 130, 210).bfloat16()}),
    "relative_bias": (sizes(d=128), {}, lambda on: {"window": (60, 20), "scores": distances(on)}),
    "bent": (
        sizes(d=128), {},
        lambda on: {"scores": score_mod(lambda s, b, h, q, k: s.tanh() * 3 + (s * 2).sigmoid()), "softcap": 5.0},
    ),
    "bent_256": (
        sizes(d=256), {"causal": True},
        lambda on: {"scores": score_mod(lambda s, b, h, q, k: s.tanh() * 3 - s * h), "mask": variants.dilated(3)},
    ),
    "bent_400": (
        sizes(d=400, heads=(4, 2)), {"causal": True},
        lambda on: {"scores": score_mod(lambda s, b, h, q, k: s.tanh() * 3 - s * h), "mask": variants.dilated(3)},
    ),
    "block_local_512": (sizes(300, d=512), {}, lambda on: {"mask": listed(variants.block_local(128), 300, device=on)}),
    "sinks_264": (sizes(d=264), {"causal": True}, lambda on: {"sinks": numbers(on, 2).requires_grad_()}),
    "block_local_256": (sizes(300, d=256), {}, lambda on: {"mask": listed(variants.block_local(128), 300, device=on)}),
    "tails": (sizes(d=80), {}, lambda on: {"scores": score_mod(lambda s, b, h, q, k: s * 0.5 + (q > k) * 1.0)}),
    "dropout_bias": (
        sizes(130, 210), {"causal": True},
        lambda on: {"bias": numbers(on, 2, 2, 130, 210), "dropout_p": 0.3, "seed": 1},
    ),
    "sinks": (sizes(), {"causal": True}, lambda on: {"sinks": numbers(on, 2).requires_grad_()}),
    "sinks_and_window": (
        sizes(130, 210, d=128, heads=(4, 2)), {"causal": True},
        lambda on: {"sinks": numbers(on, 4).bfloat16().requires_grad_(), "window": (40, None)},
    ),
    "sinks_of_empty_rows": (sizes(200, 90), {"causal": True}, lambda on: {"sinks": numbers(on, 2).requires_grad_()}),
    "sinks_far_away": (
        sizes(), {},
        lambda on: {"sinks": torch.tensor([300.0, -300.0], device=on), "mask": mask_mod(lambda b, h, q, k: k < q - 9)},
    ),
    "late_and_large": (sizes(300), {}, lambda on: {"scores": score_mod(late_and_large)}),
    **{
        f"distances_in_whole_tiles_{d}_{dv}": (
            sizes(256, d=d, dv=dv), {"causal": True},
            lambda on: {
                "scores": distances(on, length=511),
                "mask": listed(variants.document(documents(on, 256)), 256, causal=True),
            },
        )
        for d, dv in ((64, 64), (96, 96), (128, 128), (160, 160), (192, 128), (256, 256), (512, 512))
    },
    **{
        f"{name}_{d}": (sizes(q_len, 384, d=d, heads=(4, 2)), settings, features)
        for d in (64, 128)
        for name, q_len, settings, features in (
            (
                "whole_tiles", 384, {"causal": True},
                lambda on: {"mask": listed(variants.document(documents(on, 384, 100)), 384, causal=True)},
            ),
            ("documents_seen_late", 384, {}, lambda on: {"mask": listed(variants.document(documents(on, 384)), 384)}),
            (
                "earlier_blocks", 384, {"causal": True},
                lambda on: {"mask": listed(mask_mod(of_earlier_blocks), 384, causal=True, device=on)},
            ),
            (
                "shifted_documents", 320, {"causal": True},
                lambda on: {"mask": listed(mask_mod(since_multiples_of_90), 320, 384, causal=True, device=on)},
            ),
            ("some_rows_see_the_last_keys", 200, {}, lambda on: {"mask": mask_mod(last_keys_for_every_third)}),
            (
                "masked_late_and_large", 256, {},
                lambda on: {
                    "mask": listed(mask_mod(lambda b, h, q, k: (q + k) % 3 > 0), 256, 384, device=on),
                    "scores": score_mod(late_and_large),
                },
            ),
            (
                "whole_tiles_of_a_bias", 256, {"causal": True, "window": (150, None)},
                lambda on: {"mask": variants.dilated(2), "bias": numbers(on, 4, 256, 384)},
            ),
        )
    },
    "nothing": (sizes(), {}, lambda on: {"mask": mask_mod(lambda b, h, q, k: q < 0)}),
    "nothing_listed": (sizes(), {}, lambda on: {"mask": listed(mask_mod(lambda b, h, q, k: q < 0), 200, device=on)}),
    "more_keys": (
        sizes(70, 500, heads=(4, 1)), {"causal": True},
        lambda on: {
            "mask": mask_mod(lambda b, h, q, k: (k * 7 + q) % 5 < 3),
            "scores": score_mod(lambda s, b, h, q, k: s * 1.5),
        },
    ),
}  # fmt: skip


@each_kernel
@pytest.mark.parametrize("name", CASES)
def test_results_are_within_the_budget(kernels, name):  # noqa: F811
    torch.manual_seed(len(name))
    check_features(kernels, CASES[name])


@each_kernel
@pytest.mark.parametrize("name", ["documents_seen_late_64", "shifted_documents_64", "earlier_blocks_128"])
def test_lists_with_many_sections_of_heads(kernels, name, monkeypatch):  # noqa: F811
    """The last two claim the tiles with the longest lists first, if a head has as many halves of blocks as tiles."""
    from cs336_systems.kernels.sm90 import launches

    monkeypatch.setattr(launches, "SECTION_BYTES", 1)
    check_features(kernels, CASES[name])


def test_what_the_backward_leaves_to_others():
    from cs336_systems.kernels.sm90.backend import unsupported_backward, unsupported_call

    def call(**arguments):
        shapes = sizes(heads=(4, 2))
        return make_call(*make_inputs(shapes, dtype=torch.bfloat16)[:3], Arguments.of(**arguments))

    together = call(mask=listed(variants.block_local(64), 200), deterministic=True)
    assert unsupported_backward(together) == (
        "adds up dQ of listed blocks in no fixed order, which deterministic=True needs"
    )
    q, k, v = (x[:, 0] for x in make_inputs(sizes(), dtype=torch.bfloat16)[:3])
    without_heads = make_call(q, k, v, Arguments.of(mask=variants.block_local(64)))
    assert unsupported_call(without_heads) == "needs an axis of heads for masks and score changes"
