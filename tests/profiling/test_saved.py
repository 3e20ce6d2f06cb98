"""The tensors that autograd saves in small modules, against bytes counted by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from cs336_systems.profiling import activation_bytes, saved_tensors


class Block(nn.Module):
    """x + second(gelu(first(x))), with 8 and 32 columns."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        inner = F.gelu(self.first(x))
        return x + self.second(inner)


ROWS = 5
WIDE, NARROW = ROWS * 32 * 4, ROWS * 8 * 4


@pytest.fixture
def model():
    return nn.Sequential(Block(), Block())


@pytest.fixture
def x():
    return torch.randn(ROWS, 8)


def test_each_storage_counts_once_and_inputs_do_not(model, x):
    saved = saved_tensors(lambda: model(x), model, [x])
    # gelu and second save their inputs; the first block's output is saved by the second block.
    assert [(each.module, each.bytes) for each in saved] == [
        ("0", WIDE),
        ("0.second", WIDE),
        ("1.first", NARROW),
        ("1", WIDE),
        ("1.second", WIDE),
    ]
    assert str(saved[0].statement).startswith("test_saved.py:")
    assert saved[0].statement.source == "inner = F.gelu(self.first(x))"
    assert activation_bytes(saved, "0") == 2 * WIDE
    assert activation_bytes(saved, "1") == 2 * WIDE + NARROW
    assert activation_bytes(saved) == 4 * WIDE + NARROW
    assert activation_bytes(saved_tensors(lambda: model(x), model), "0") == 2 * WIDE + NARROW


def test_a_view_counts_as_its_whole_storage():
    x = torch.randn(ROWS, 4, requires_grad=True)
    (saved,) = saved_tensors(lambda: x.repeat(3, 1)[:ROWS].sin(), nn.Linear(4, 4))
    assert (saved.bytes, saved.shape, saved.dtype) == (3 * ROWS * 4 * 4, (ROWS, 4), torch.float32)


def test_a_freed_storage_counts_too(x):
    x.requires_grad_()

    def forward():
        for _ in range(3):
            (x * 2).sin()  # freed, and the next one may have its address

    assert len(saved_tensors(forward, nn.Linear(1, 1), [x])) == 3


def test_autocasts_copies_of_parameters_are_no_activations(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        saved = saved_tensors(lambda: model(x), model, [x])
    copies = sum(each.bytes for each in saved if each.of_parameter)
    # Both weights of the second block; of the first block only the weight whose input requires a gradient.
    assert copies == 3 * 8 * 32 * 2
    assert activation_bytes(saved) == sum(each.bytes for each in saved) - copies
    embedding, tokens = nn.Embedding(16, 8), torch.arange(4)
    (looked_up,) = saved_tensors(lambda: embedding(tokens).sin(), embedding, [tokens])
    assert not looked_up.of_parameter


def test_a_checkpointed_block_saves_its_input(model, x):
    saved = saved_tensors(lambda: checkpoint(model[1], model[0](x), use_reentrant=False), model, [x])
    assert activation_bytes(saved) == 2 * WIDE + NARROW
    with torch.no_grad():
        assert saved_tensors(lambda: model(x), model) == []


@pytest.mark.gpu
def test_on_a_gpu_it_is_what_the_allocator_counts(model):
    model, x = model.cuda(), torch.randn(4096, 8, device="cuda")
    model(x).sum().backward()
    model.zero_grad()
    saved = saved_tensors(lambda: model(x), model, [x])
    before = torch.cuda.memory_allocated()
    output = model(x)
    assert torch.cuda.memory_allocated() - before == sum(each.bytes for each in saved) + output.nbytes
