"""The functions of ``flash_attn.bert_padding`` against loops over rows."""

from __future__ import annotations

import re

import pytest
import torch

from cs336_systems.compat.flash_attn_padding import (
    index_first_axis,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

MASK = [[1, 1, 0, 1], [0, 0, 0, 0], [0, 1, 1, 0]]
UNUSED = [[0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("tail", [(), (3,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32])
@pytest.mark.parametrize("unused", [None, UNUSED])
def test_there_and_back(device, tail, dtype, unused):
    x = torch.randn(3, 4, *tail, dtype=torch.float64, device=device, requires_grad=True)
    mask = torch.tensor(MASK, dtype=dtype, device=device)
    other = None if unused is None else torch.tensor(unused, dtype=dtype, device=device)
    packed, indices, cu_seqlens, longest, used = unpad_input(x, mask, other)
    taken = [[m + u for m, u in zip(*rows, strict=True)] for rows in zip(MASK, unused or [[0] * 4] * 3, strict=True)]
    places = [(i, j) for i, row in enumerate(taken) for j, one in enumerate(row) if one]
    assert torch.equal(packed, torch.stack([x[place] for place in places]))
    assert indices.tolist() == [4 * i + j for i, j in places]
    lengths = [sum(row) for row in taken]
    assert cu_seqlens.tolist() == [sum(lengths[:i]) for i in range(4)]
    assert cu_seqlens.dtype is used.dtype is torch.int32
    assert (longest, type(longest)) == (max(lengths), int)
    assert used.tolist() == [sum(row) for row in MASK]
    back = pad_input(packed, indices, 3, 4)
    kept = torch.tensor(taken, device=device).view(3, 4, *(1 for _ in tail))
    assert torch.equal(back, x * kept)
    dout = torch.randn_like(back)
    assert torch.equal(torch.autograd.grad(back, x, dout)[0], dout * kept)


def test_concatenated_sequences(device):
    x = torch.randn(3, 6, 2, device=device, requires_grad=True)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]], device=device)
    packed, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(packed, torch.cat([x[0, :5], x[2]]))
    assert indices.tolist() == [*range(5), *range(12, 18)]
    assert cu_seqlens.tolist() == [0, 2, 5, 11]
    assert longest == 6


def test_rows_by_their_indices(device):
    x = torch.randn(4, 2, device=device, requires_grad=True)
    indices = torch.tensor([3, 1], device=device)
    assert torch.equal(index_first_axis(x, indices), x[indices])
    placed = index_put_first_axis(x[:2], indices, 5)
    assert torch.equal(placed[indices], x[:2])
    assert (placed[[0, 2, 4]] == 0).all()


def test_nothing_is_kept(device):
    x, mask = torch.randn(2, 3, device=device), torch.zeros(2, 3, dtype=torch.bool, device=device)
    packed, indices, cu_seqlens, longest, _ = unpad_input(x, mask)
    assert (packed.shape, indices.shape, cu_seqlens.tolist(), longest) == ((0,), (0,), [0, 0, 0], 0)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.zeros(2, 3), "attention_mask must be a tensor of bools or integers; got torch.float32"),
        (None, "attention_mask must be a tensor of bools or integers; got NoneType"),
        (torch.zeros(2, 4).bool(), "attention_mask must have shape (2, 3) to match hidden_states; got (2, 4)"),
    ],
)
def test_invalid_masks(mask, message):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
        unpad_input(torch.zeros(2, 3, 5), mask)
