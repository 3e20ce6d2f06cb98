"""Rules that do not say how scores depend on what they captured: tiled has autograd differentiate them on each tile."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from cs336_systems.attention import attention
from cs336_systems.attention.rules import score_rule
from cs336_systems.attention.variants import bias, relative_bias, softcap
from cs336_systems.kernels.language import at, tanh
from cs336_systems.testing import Shapes, evaluate, make_inputs

from ..features import clipped
from ..helpers import DOUBLE, FLOAT, HALF, check, each_dtype

SHAPES = Shapes.of(2, q_len=35, k_len=41, d=8, q_heads=4, kv_heads=2)


@score_rule
def steered(score, batch, head, row, column, rates, kinds):
    """Neither its derivative is said, nor what it does with its tensors."""
    return tanh(score * at(rates, (at(kinds, (column,)), head))) + at(rates, (at(kinds, (row,)), 0))


@score_rule
def replaced(score, batch, head, row, column, table):
    return at(table, (row % 4, column % 3)) + 0.0 * score


@score_rule
def partly(score, batch, head, row, column, rates, table):
    """One of its tensors has a gradient that is said."""
    return score * at(rates, (head,)) + at(table, (row // 7,)) * at(table, (column // 7,))


@partly.derivative
def _(score, batch, head, row, column, rates, table):
    return at(rates, (head,))


@partly.gradient("rates", axes="head")
def _(score, batch, head, row, column, rates, table):
    return score


def parameter(device, *shape, dtype=FLOAT):
    return torch.randn(shape, device=device, dtype=dtype).requires_grad_()


def kinds(device):
    return torch.arange(41, device=device) * 5 % 3


RULES = {
    "clipped": lambda on: clipped(parameter(on, 4, 13), 6),
    "steered": lambda on: steered(parameter(on, 3, 4), kinds(on)),
    "replaced": lambda on: replaced(parameter(on, 4, 3)),
    "partly": lambda on: partly(parameter(on, 4), parameter(on, 6)),
    "said_alone": lambda on: partly(parameter(on, 4), parameter(on, 6).detach()),
    "among_others": lambda on: (
        bias(parameter(on, 1, 4, 1, 41))
        + steered(parameter(on, 3, 4), kinds(on))
        + softcap(1.5)
        + clipped(parameter(on, 4, 13), 6)
        + relative_bias(parameter(on, 4, 75), 34)
        + softcap(2.0)
    ),
}


@pytest.mark.parametrize("name", RULES)
@each_dtype(tiled=(FLOAT, DOUBLE))
def test_gradients_are_within_the_budget(impl, dtype, device, name):
    features = {"scores": RULES[name](device), "window": (30, None), "dropout_p": 0.2, "seed": 3}
    check(impl, make_inputs(SHAPES, dtype=dtype, device=device), features, causal=True)


def test_sums_are_not_rounded_to_the_dtype_of_the_tensor(device):
    """One number, read by every pair."""
    inputs = make_inputs(Shapes.of(4, q_len=100, d=8, q_heads=4), dtype=HALF, device=device)
    one_kind = torch.zeros_like(kinds(device)).repeat(3)
    check("tiled", inputs, {"scores": steered(parameter(device, 1, 4, dtype=HALF), one_kind)})


def test_without_a_gradient_wanted_nothing_is_traced(device, monkeypatch):
    monkeypatch.setattr(torch.func, "vjp", lambda *given: pytest.fail("a rule was traced"))
    features = {"scores": clipped(parameter(device, 4, 13).detach(), 6)}
    evaluate(partial(attention, impl="tiled"), make_inputs(SHAPES, device=device), features)


def test_they_cannot_be_differentiated_twice(device):
    inputs, table = make_inputs(SHAPES, device=device), parameter(device, 4, 13)
    out = attention(*inputs[:3], scores=clipped(table, 6), impl="tiled")
    [gradient] = torch.autograd.grad(out, table, inputs.dout, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        gradient.sum().backward()
