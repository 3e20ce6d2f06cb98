"""What autograd keeps of small modules, against bytes counted by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from cs336_systems.profiling.saved import activation_bytes, by_operation, saved_tensors


class Block(nn.Module):
    """x + second(gelu(first(x))), of 8 columns and 32 inner ones."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        inner = F.gelu(self.first(x))
        return x + self.second(inner)


class Two(nn.Module):
    """Two of them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


ROWS = 5
WIDE, NARROW = ROWS * 32 * 4, ROWS * 8 * 4


def test_each_storage_counts_once_and_inputs_do_not():
    model, x = Two(), torch.randn(ROWS, 8)
    saved = saved_tensors(lambda: model(x), model, [x])
    # gelu keeps its input, and second(...) its own; the first block's output is what the second one keeps of its input.
    assert [each.bytes for each in saved] == [WIDE, WIDE, NARROW, WIDE, WIDE]
    assert activation_bytes(saved, "layers.0") == 2 * WIDE
    assert activation_bytes(saved, "layers.1") == 2 * WIDE + NARROW
    assert activation_bytes(saved) == 4 * WIDE + NARROW
    assert activation_bytes(saved_tensors(lambda: model(x), model), "layers.0") == 2 * WIDE + NARROW
    assert [each.origin.module for each in saved] == [
        "layers.0",
        "layers.0.second",
        "layers.1.first",
        "layers.1",
        "layers.1.second",
    ]


def test_by_operation():
    model, x = Two(), torch.randn(ROWS, 8)
    found = by_operation(saved_tensors(lambda: model(x), model, [x]), "layers.1")
    assert [(each.module, each.bytes, each.tensors) for each in found] == [
        ("first", NARROW, 1),
        ("", WIDE, 1),
        ("second", WIDE, 1),
    ]
    assert found[1].source == "test_saved.py:forward: inner = F.gelu(self.first(x))"


def test_a_part_of_a_storage_counts_as_the_whole():
    model, x = nn.Linear(4, 4), torch.randn(ROWS, 4, requires_grad=True)
    (saved,) = saved_tensors(lambda: x.repeat(3, 1)[:ROWS].sin(), model)
    assert (saved.bytes, saved.shape, saved.dtype) == (3 * ROWS * 4 * 4, (ROWS, 4), torch.float32)


def test_copies_of_parameters_are_told_apart():
    model, x = Two(), torch.randn(ROWS, 8)

    def forward():
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    saved = saved_tensors(forward, model, [x])
    copies = sum(each.bytes for each in saved if each.of_parameter)
    # The second block's weights, and of the first block's the one whose input needs a gradient.
    assert copies == 3 * 8 * 32 * 2
    assert activation_bytes(saved) == sum(each.bytes for each in saved) - copies
    embedding = nn.Embedding(16, 8)
    tokens = torch.arange(4)
    (kept,) = saved_tensors(lambda: embedding(tokens).sin(), embedding, [tokens])
    assert not kept.of_parameter


def test_of_checkpointed_work_its_input_is_kept():
    model, x = Two(), torch.randn(ROWS, 8)

    def forward():
        inner = model.layers[0](x)
        return checkpoint(model.layers[1], inner, use_reentrant=False)

    saved = saved_tensors(forward, model, [x])
    assert activation_bytes(saved) == 2 * WIDE + NARROW


def test_without_gradients_nothing_is_kept():
    model = Two()
    with torch.no_grad():
        assert saved_tensors(lambda: model(torch.randn(ROWS, 8)), model) == []


@pytest.mark.gpu
def test_on_a_gpu_it_is_what_the_allocator_counts():
    model, x = Two().cuda(), torch.randn(4096, 8, device="cuda")
    model(x).sum().backward()
    model.zero_grad()
    saved = saved_tensors(lambda: model(x), model, [x])
    before = torch.cuda.memory_allocated()
    output = model(x)
    held = torch.cuda.memory_allocated() - before
    assert held == sum(each.bytes for each in saved) + output.nbytes
