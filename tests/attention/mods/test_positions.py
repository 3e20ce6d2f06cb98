"""Comparisons of the row and the column of a pair: what rules write for them, and which pairs they leave."""

import pytest
import torch

from cs336_systems.attention.mods import mask_mod
from cs336_systems.kernels.mods import registry

Q_LEN, K_LEN = 40, 50
NUMBERS = (0, 1, -1, 3, -7, 2**30, -(2**30), 2**31 - 1, -(2**31), 2**40, -(2**40))

COMPARED = {
    "positions": lambda q, k, n: q < k,
    "distance": lambda q, k, n: q - k < n,
    "distance_of_key": lambda q, k, n: k - q >= n,
    "number_first": lambda q, k, n: n <= q - k,
    "sum": lambda q, k, n: k > q + n,
    "sum_of_number": lambda q, k, n: n + k <= q,
    "difference": lambda q, k, n: q - n >= k,
    "within": lambda q, k, n: (q - k).abs() <= n,
    "within_less": lambda q, k, n: (k - q).abs() < n,
    "outside": lambda q, k, n: (q - k).abs() > n,
    "outside_or_at": lambda q, k, n: (k - q).abs() >= n,
}
DIVIDED = {
    "distance": lambda q, k, n: (q - k) % n == 0,
    "distance_not": lambda q, k, n: (k - q) % n != 0,
    "remainders": lambda q, k, n: q % n == k % n,
    "remainders_not": lambda q, k, n: k % n != q % n,
}
OTHERS = {
    "key": lambda q, k: k < 7,
    "products": lambda q, k: 2 * q < k,
    "two_numbers": lambda q, k: q + 5 < k + 3,
    "remainder": lambda q, k: (q - k) % 5 == 2,
    "other_divisors": lambda q, k: q % 5 == k % 3,
    "sum_of_both": lambda q, k: q + k < 30,
    "number": lambda q, k: q - k < 2.5,
}


def positions():
    return torch.arange(Q_LEN)[:, None], torch.arange(K_LEN)


def text_and_dense(mod):
    """What a rule says, and the pairs that it leaves."""
    mask = mask_mod(lambda b, h, q_idx, kv_idx: mod(q_idx, kv_idx))
    return mask.expression[0], mask.to_tensor(Q_LEN, K_LEN, device="cpu")[0, 0]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", COMPARED)
def test_comparisons(name, number):
    text, seen = text_and_dense(lambda q, k: COMPARED[name](q, k, number))
    assert "less(" in text
    assert "compared(" not in text
    assert torch.equal(seen, COMPARED[name](*positions(), number))


@pytest.mark.parametrize("number", [1, 2, 3, 16, 37])
@pytest.mark.parametrize("name", DIVIDED)
def test_multiples(name, number):
    text, seen = text_and_dense(lambda q, k: DIVIDED[name](q, k, number))
    assert "congruent(" in text
    assert torch.equal(seen, DIVIDED[name](*positions(), number))


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_compared_as_they_are(name):
    text, seen = text_and_dense(OTHERS[name])
    assert "less(" not in text
    assert "congruent(" not in text
    assert torch.equal(seen, OTHERS[name](*positions()).expand(Q_LEN, K_LEN))


def test_windows_of_other_widths_are_one_rule():
    first, second = (mask_mod(lambda b, h, q, k, width=width: (q - k).abs() < width).expression for width in (5, 9))
    assert first[0] == second[0]
    assert (first[1], second[1]) == ((5,), (9,))
    assert registry[first[0]].function is registry[second[0]].function
