"""Masks and score changes in the idioms of FlexAttention's users: the pairs and scores that torch's functions give."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torchs

from cs336_systems.attention.mods import MaskMod, ScoreMod
from cs336_systems.compat.flex_attention import and_masks, create_block_mask, create_mask, flex_attention, or_masks

BATCH, HEADS, LENGTH, DIM = 2, 4, 144, 16
WIDTH = 12
"""Of an image with as many patches as there are tokens."""


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def sliding(window: int) -> MaskMod:
    """A mask that a function makes and names."""

    def sliding_window(b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= window

    sliding_window.__name__ = f"sliding_window_{window}"
    return sliding_window


def dilated(window: int, step: int) -> MaskMod:
    def mask(b, h, q_idx, kv_idx):
        diff = torch.abs(q_idx - kv_idx)
        return (diff <= window) & ((diff % step) == 0) & (diff >= 0)

    return mask


def packed(lengths: list[int], inner: MaskMod) -> MaskMod:
    """Documents one after another, each with the inner mask, whose positions count from where it begins."""
    sizes = torch.tensor(lengths)
    document = torch.repeat_interleave(torch.arange(len(lengths)), sizes)
    begin = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)[:-1]])

    def mask(b, h, q_idx, kv_idx):
        same = document[q_idx] == document[kv_idx]
        own_q, own_kv = q_idx - begin[document[q_idx]], kv_idx - begin[document[kv_idx]]
        return same & inner(b, h, own_q, own_kv)

    return mask


def prefix(lengths: torch.Tensor) -> MaskMod:
    return or_masks(lambda b, h, q_idx, kv_idx: kv_idx < lengths[b], causal)


def neighbourhood(b, h, q_idx, kv_idx, *, radius):
    """Patches of an image see those around them; at its border, as many."""
    q_x, q_y = q_idx // WIDTH, q_idx % WIDTH
    x, y = (torch.clamp(at, radius, WIDTH - 1 - radius) for at in (q_x, q_y))
    return ((x - kv_idx // WIDTH).abs() <= radius) & ((y - kv_idx % WIDTH).abs() <= radius)


def images(intervals: torch.Tensor, size: int) -> MaskMod:
    """Images of ``size`` keys are seen by intervals of queries."""

    def mask(b, h, q_idx, kv_idx):
        interval = intervals[kv_idx // size]
        return (q_idx >= interval[0]) & (q_idx < interval[1])

    return mask


def global_tokens(count: int) -> MaskMod:
    return lambda b, h, q_idx, kv_idx: (q_idx < count) | (kv_idx < count)


class Padded:
    """An object that is a function, and has its tensor in an attribute."""

    def __init__(self, lengths: torch.Tensor) -> None:
        self.lengths = lengths

    def __call__(self, b, h, q_idx, kv_idx):
        return (kv_idx < self.lengths[b]).logical_and(q_idx < self.lengths[b])


LENGTHS = torch.tensor([17, 60])
MASKS: dict[str, Callable[..., Any]] = {
    "sliding": and_masks(causal, sliding(30)),
    "dilated": dilated(24, 3),
    "packed": packed([40, 1, 63, 40], causal),
    "packed_and_sliding": packed([100, 44], and_masks(causal, sliding(10))),
    "prefix": prefix(LENGTHS),
    "neighbourhood": functools.partial(neighbourhood, radius=2),
    "longformer": or_masks(global_tokens(5), sliding(8)),
    "padded": Padded(LENGTHS),
    "a_head_of_two": lambda b, h, q_idx, kv_idx: torch.where(h % 2 == 0, q_idx >= kv_idx, q_idx <= kv_idx),
}


def chosen_blocks(chosen: torch.Tensor) -> MaskMod:
    """Each block of 16 queries sees a few blocks of 16 keys."""

    def mask(b, h, q_idx, kv_idx):
        return (chosen[b, h, q_idx // 16] == (kv_idx // 16).unsqueeze(-1)).any(dim=-1)

    return mask


def morton(b, h, q_idx, kv_idx):
    """The squares of 4 x 4 pixels, whose bits are interleaved."""
    x, y = ((idx & 1) | ((idx >> 1) & 2) for idx in (q_idx, kv_idx))
    return (q_idx >> 4 == kv_idx >> 4) | ((x << 1) >= y + 3)


MASKS["chosen_blocks"] = chosen_blocks(torch.randint(0, 9, (BATCH, HEADS, 9, 3)))
MASKS["morton"] = morton
MASKS["images"] = images(torch.tensor([[0, 7], [5, 70], [70, 144]]), 48)


def alibi(heads: int) -> ScoreMod:
    def score_mod(score, b, h, q_idx, kv_idx):
        return score + torch.exp2(-((h + 1) * 8.0 / heads)) * (kv_idx - q_idx)

    return score_mod


def softcap(cap: float) -> ScoreMod:
    return lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap)


def within(mask: MaskMod, inner: ScoreMod) -> ScoreMod:
    """A score change that hides pairs itself."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.where(mask(b, h, q_idx, kv_idx), inner(score, b, h, q_idx, kv_idx), -float("inf"))

    return score_mod


def relative(score, b, h, q_idx, kv_idx):
    return score + (q_idx - kv_idx)


def checkerboard(score, b, h, q_idx, kv_idx):
    score = torch.where(torch.abs(kv_idx - q_idx) % 2 == 1, score * 0.5, score)
    return torch.where(torch.abs(kv_idx - q_idx) % 2 == 0, score * 2.0, score)


def rotary(rows: torch.Tensor, columns: torch.Tensor) -> ScoreMod:
    """What a second, narrower product adds to each score."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + 0.3 * torch.dot(rows[b, h, q_idx], columns[b, h // 4, kv_idx])

    return score_mod


def activated(score, b, h, q_idx, kv_idx):
    return torch.log(torch.nn.functional.silu(score) + torch.nn.functional.gelu(score) + 1.5)


SCORES: dict[str, ScoreMod] = {
    "rotary": rotary(torch.randn(BATCH, HEADS, LENGTH, 5), torch.randn(BATCH, 1, LENGTH, 5)),
    "activated": activated,
    "alibi": alibi(HEADS),
    "softcap": softcap(1.5),
    "hidden": within(packed([40, 104], causal), alibi(HEADS)),
    "relative": relative,
    "checkerboard": checkerboard,
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_those_of_torch(name):
    sizes = BATCH, HEADS, LENGTH, LENGTH
    found = create_mask(MASKS[name], *sizes, device="cpu")
    assert torch.equal(found, torchs.create_mask(MASKS[name], *sizes, device="cpu"))
    listed = create_block_mask(MASKS[name], *sizes, device="cpu")
    blocks = torch.nn.functional.pad(found, (0, -LENGTH % 128, 0, -LENGTH % 128))
    blocks = blocks.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128)).any(-1).any(-2)
    assert torch.equal(listed.to_dense().bool(), blocks)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("name", SCORES)
def test_scores_are_those_of_torch(name):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(BATCH, HEADS, LENGTH, DIM, generator=generator) for _ in range(3))
    listed = create_block_mask(MASKS["sliding"], None, None, LENGTH, LENGTH, device="cpu")
    theirs = torchs.create_block_mask(MASKS["sliding"], None, None, LENGTH, LENGTH, device="cpu")
    expected = torchs.flex_attention(q, k, v, SCORES[name], theirs)
    assert isinstance(expected, torch.Tensor)
    torch.testing.assert_close(flex_attention(q, k, v, SCORES[name], listed), expected, rtol=2e-5, atol=2e-5)
