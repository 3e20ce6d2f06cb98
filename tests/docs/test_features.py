"""docs/features.md: the examples of largest scores and entropies do what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from cs336_systems.attention import score_statistics

from .pages import examples

PAGE = (Path(__file__).parents[2] / "docs/features.md").read_text(encoding="utf-8")
SECTION = PAGE.split("\n## Largest scores and entropies\n")[1].split("\n## ")[0]
HEADS, D, CHANNELS, TAU = 3, 8, 16, 20.0


def functions() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for example in examples(SECTION):
        exec(example, names)
    return names


def heads(x, weights):
    return (x @ weights.mT).unflatten(-1, (HEADS, D)).transpose(1, 2)


def test_qk_clip_limits_the_scores_of_heads_above_tau_and_leaves_the_others():
    x = torch.randn(2, 30, CHANNELS)
    w_q, w_k = (torch.randn(HEADS * D, CHANNELS) for _ in "qk")
    w_q[:D] *= 10.0
    w_q[D : 2 * D] *= 0.01
    before = w_q.clone(), w_k.clone()
    q, k = heads(x, w_q), heads(x, w_k)
    largest = functions()["qk_clip"](w_q, w_k, q, k, TAU)
    torch.testing.assert_close(largest, score_statistics(q, k, causal=True).max_scores.amax((0, 2)))
    assert largest[0] > TAU > largest[1]
    after = score_statistics(heads(x, w_q), heads(x, w_k), causal=True).max_scores.amax((0, 2))
    torch.testing.assert_close(after, largest.clamp(max=TAU))
    for own, other in zip((w_q, w_k), before, strict=True):
        assert torch.equal(own[D : 2 * D], other[D : 2 * D])
        torch.testing.assert_close(own[:D], other[:D] * (TAU / largest[0]).sqrt())


def test_the_penalty_raises_low_entropies():
    q, k = (4 * torch.randn(2, HEADS, 20, D) for _ in "qk")
    penalty = functions()["entropy_penalty"]
    q.requires_grad_()
    first = penalty(q, k)
    assert first > 0.1
    first.backward()
    with torch.no_grad():
        assert penalty(q - q.grad, k) < first
    assert penalty(0 * q, k) == 0
