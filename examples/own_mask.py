"""A mask and a score change of your own, with a learned tensor and lists of blocks, checked against naive attention.

    python examples/own_mask.py
    python examples/own_mask.py --length 4096 --heads 16     # on a GPU

The mask: documents packed into a row, in which a token sees its own document's last --window tokens and its first four.
The score change: a learned penalty for each head that grows with the logarithm of the distance.

Prints how many blocks of 128 x 128 pairs are visited, which implementation computes the call, and its largest
differences from naive attention, in the output and in each gradient. The exit status is 1 if one is too large.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor

from cs336_systems.attention import attention, explain
from cs336_systems.attention.mods import mask_mod, score_mod

FIRST = 4
"""Tokens at the beginning of a document that all of its tokens see (Xiao et al., 2023, keep such "attention sinks")."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("batch", 2), ("heads", 4), ("length", 512), ("window", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    batch, heads, length, window = options.batch, options.heads, options.length, options.window
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)

    # Captured by the mask: each token's document, of some 200 tokens, and where it begins.
    begins = torch.rand(batch, length, device=device) < 1 / 200
    begins[:, 0] = True
    document = begins.cumsum(-1)
    first = torch.where(begins, torch.arange(length, device=device), 0).cummax(-1).values
    # Captured by the score change, and learned.
    penalty = torch.rand(heads, device=device, requires_grad=True)

    @mask_mod
    def visible(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        near = (q_idx - kv_idx < window) | (kv_idx - first[b, q_idx] < FIRST)
        return (document[b, q_idx] == document[b, kv_idx]) & near

    @score_mod
    def farther_is_less(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - penalty[h] * torch.log(1.0 + (q_idx - kv_idx).abs())

    # Found once, and good for all layers and steps with these documents. `causal` belongs to the lists.
    mask = visible.with_blocks(length, length, causal=True)
    assert mask.blocks is not None
    visited, side = int(mask.blocks.rows[..., :2].sum()), -(-length // 128)
    print(f"blocks visited: {visited} of {batch * side * side}; causal alone: {batch * side * (side + 1) // 2}")

    shape = (batch, heads, length, 64)
    q, k, v = (torch.randn(shape, device=device, requires_grad=True) for _ in range(3))
    dout = torch.randn(shape, device=device)

    def results(impl: str) -> dict[str, Tensor]:
        out = attention(q, k, v, causal=True, mask=mask, scores=farther_is_less, impl=impl)
        gradients = torch.autograd.grad(out, (q, k, v, penalty), dout)
        return dict(zip(("out", "dq", "dk", "dv", "dpenalty"), (out, *gradients), strict=True))

    chosen = "auto" if device.type == "cuda" else "tiled"  # auto on a CPU is naive for few scores
    print(explain(q, k, v, causal=True, mask=mask, scores=farther_is_less, impl=chosen))
    ours, naive = results(chosen), results("naive")
    worst = 0.0
    for name, expected in naive.items():
        difference = ((ours[name] - expected).abs().max() / expected.abs().max()).item()
        worst = max(worst, difference)
        print(f"{name}: largest difference {difference:.1e} of the largest element")
    print("equal but for rounding" if worst < 1e-4 else "too different")
    return int(worst >= 1e-4)


if __name__ == "__main__":
    sys.exit(main())
