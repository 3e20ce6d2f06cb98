"""Functions of a pair, what they capture, and what torch computes of them, for the tests of mods."""

from __future__ import annotations

import torch
import torch.nn.functional as F

BATCH, HEADS, LENGTH, DIM = 2, 4, 45, 8
SIZES = (BATCH, HEADS, LENGTH, LENGTH)
PLACES = [torch.arange(size).view([-1 if axis == own else 1 for axis in range(4)]) for own, size in enumerate(SIZES)]


def leaf(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), requires_grad=True)


IDS = torch.randint(0, 4, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
PADDED = torch.tensor([[True] * 30 + [False] * 15, [True] * 45])
NEAR, PARTS = torch.arange(2 * LENGTH - 1) % 5 != 2, torch.tensor([7, 11])
BUCKETS = torch.randint(0, 9, (2 * LENGTH,), generator=torch.Generator().manual_seed(1))
SLOPES, TABLE, BIAS, SCALAR = (
    leaf(HEADS),
    leaf(HEADS, 2 * LENGTH - 1),
    leaf(*SIZES),
    torch.tensor(0.7, requires_grad=True),
)
ROWS, LONG, LEARNED = leaf(LENGTH), leaf(LENGTH + 7), leaf(HEADS, 9)
TURNED = leaf(LENGTH, LENGTH, HEADS)
ENDS = (torch.arange(LENGTH) % 5 / 4 - 0.5).requires_grad_()
ALL = [SLOPES, TABLE, BIAS, SCALAR, ROWS, LONG, LEARNED, ENDS]
WIDE = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
TRIPLES = leaf(BATCH, HEADS, LENGTH, 3)
CHOSEN = torch.randint(0, 6, (BATCH, LENGTH, 3), generator=torch.Generator().manual_seed(2))
ALL += [TURNED, WIDE, TRIPLES]

MASKS = {
    "documents": lambda b, h, q, k: (q >= k) & (IDS[b, q] == IDS[b, k]),
    "window": lambda b, h, q, k: (q - k < 17) & (q >= k),
    "of_some_heads": lambda b, h, q, k: (q >= k) | (h % 2 == 0),
    "blocks": lambda b, h, q, k: (q // 16 == k // 16) | ((q - k) % 7 == 0),
    "rounds_down": lambda b, h, q, k: (k - q) // 5 >= -3,
    "rounds_down_by_powers": lambda b, h, q, k: ((q - k) % 8 < 5) | ((k - q) // 4 == h),
    "inverted": lambda b, h, q, k: ~((q - k).abs() < 3) & torch.logical_not(q == 40),
    "everything": lambda b, h, q, k: h >= 0,
    "padded_keys": lambda b, h, q, k: PADDED[b, k],
    "chosen": lambda b, h, q, k: torch.where(h > 1, q >= k, True) & torch.where(q > 20, k % 2 == 0, q < 2**30),
    "products": lambda b, h, q, k: (q * 2**27 + k) % 5 != (k * 2**28 - q) % 3,
    "by_distance": lambda b, h, q, k: NEAR[q - k + LENGTH - 1] & (q // PARTS[b] >= k // PARTS[b]),
    "of_the_first_entry": lambda b, h, q, k: PADDED[0, k] ^ (q < k),
    "shifted": lambda b, h, q, k: ((q << 27) >> 3) % 5 >= ((k - 9) >> 1) % 4,
}
SCORES = {
    "alibi": lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(),
    "softcap": lambda s, b, h, q, k: 2 * torch.tanh(s / 2),
    "by_distance": lambda s, b, h, q, k: s + TABLE[h, k - q + LENGTH - 1],
    "by_distance_backwards": lambda s, b, h, q, k: s + TABLE[h, q - k + LENGTH - 1],
    "halved": lambda s, b, h, q, k: torch.where(q > k, s, s * 0.5) - (q - k).abs() * 0.01,
    "squared_and_biased": lambda s, b, h, q, k: s * s * 0.1 + BIAS[b, h, q, k],
    "turned_bias": lambda s, b, h, q, k: s + TURNED[k, q, h],
    "learned_number": lambda s, b, h, q, k: s * SCALAR + ROWS[q] * ROWS[k],
    "clamped": lambda s, b, h, q, k: s.clamp(-0.5, 0.4) ** 2 + torch.sigmoid(s) * torch.exp(-(q - k).abs() / 8),
    "without_the_score": lambda s, b, h, q, k: SLOPES[h] * 1.0,
    "of_a_computed_tensor": lambda s, b, h, q, k: s - SLOPES.exp()[h] * (q - k).abs() / 10,
    "largest": lambda s, b, h, q, k: torch.maximum(s, ROWS[q] * 0.3).abs(),
    "at_the_ends": lambda s, b, h, q, k: (
        s * ENDS[q].clamp(-0.5, 0.25) + torch.relu(ENDS[k]) + torch.maximum(ENDS[k], 0.25 - s * 0) + ENDS[q].abs()
    ),
    "longer_than_the_call": lambda s, b, h, q, k: s + LONG[k],
    "powers": lambda s, b, h, q, k: s - 2 ** (-2.0 * (h + 1)) * (q - k).abs() + 0.5 ** (q % 3) + (q - k + 0.5) ** -2,
    "of_floats": lambda s, b, h, q, k: s + (q / 7) % 2.5 - (k / 3) // 2 + torch.div(q, 4, rounding_mode="floor"),
    "activations": lambda s, b, h, q, k: (
        F.gelu(s) + F.gelu(s + ROWS[q], approximate="tanh") + F.silu(ROWS[k] - s) + F.leaky_relu(s, 0.2) + torch.erf(s)
    ),
    "masked": lambda s, b, h, q, k: s.masked_fill(q - k > 30, float("-inf")) + torch.where(h < 2, ROWS[q], 0.25),
}


def in_place(s, b, h, q, k):
    s += SLOPES[h]
    s *= 0.5
    return s


SCORES["in_place"] = in_place
SCORES["a_wider_number"] = lambda s, b, h, q, k: s - WIDE * SLOPES[h] * (q - k).abs()
BY_TABLES = {
    "learned_buckets": lambda s, b, h, q, k: s + LEARNED[h, BUCKETS[k - q + LENGTH]],
    "clamped_distances": lambda s, b, h, q, k: s * LEARNED[h, (q - k).clamp(-4, 4) + 4],
    "of_rows": lambda s, b, h, q, k: s + ROWS[(q * 2) % LENGTH] * LEARNED[h, IDS[b, q]],
    "of_columns": lambda s, b, h, q, k: torch.tanh(s * LEARNED[1, IDS[b, k] + 2]),
    "of_pairs": lambda s, b, h, q, k: s + LEARNED[h, IDS[b, q] + IDS[b, k]] * ROWS[torch.maximum(q, k)],
    "of_a_table": lambda s, b, h, q, k: s + ROWS[(SLOPES[h] * 4 + q / 2).abs().to(torch.int64) % LENGTH],
    "a_diagonal": lambda s, b, h, q, k: s + TURNED[q, q, h],
}
"""Read at indices that are no axes, or one twice."""
MASKS_BY_ROWS = {
    "of_a_row": lambda b, h, q, k: (CHOSEN[b, q] == (k // 8).unsqueeze(-1)).any(dim=-1) | (CHOSEN[b, k].amax(-1) > 4),
}
BY_ROWS = {
    "a_product_of_rows": lambda s, b, h, q, k: s + (0.5 * TRIPLES[b, h, q] * TRIPLES[b, 0, k]).sum(-1),
    "a_sum_of_a_row": lambda s, b, h, q, k: (
        s * torch.tanh(TRIPLES[b, h, q] - TRIPLES[0, h, k, 1].unsqueeze(-1)).sum(dim=-1)
    ),
}
"""They read all elements along the last axis of a captured tensor."""


def tensors():
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(BATCH, HEADS, LENGTH, DIM, generator=generator, requires_grad=True) for _ in range(3)]


def by_torch(q, k, v, mask=None, score=None):
    """Attention in float64, with the functions on tensors of all pairs."""
    q, k, v = (x.double() for x in (q, k, v))
    scores = q @ k.mT / DIM**0.5
    if score is not None:
        scores = score(scores.clone(), *PLACES).double().expand(SIZES)
    if mask is not None:
        scores = scores.masked_fill(~mask(*PLACES), float("-inf"))
    return torch.softmax(scores, -1).nan_to_num() @ v


def assert_close(found, expected):
    """Within a few roundings of float32."""
    for own, other in zip(found, expected, strict=True):
        assert (own is None) == (other is None) or not (own if other is None else other).any()
        if own is not None and other is not None:
            own, other = own.detach(), other.detach()
            assert (own - other).abs().max() <= 4e-6 * max(1.0, float(other.abs().max()))


class Rounded(torch.autograd.Function):
    """Has another backward than what its forward computes."""

    @staticmethod
    def forward(ctx, x):
        return torch.floor(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient
