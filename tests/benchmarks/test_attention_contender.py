"""A provider bound to a problem: its tensors, and its passes as functions to be timed."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from benchmarks.attention_contender import Contender, Tensors, relative_difference
from benchmarks.attention_presets import Problem
from benchmarks.attention_provider import Provider

CPU = torch.device("cpu")
PROBLEM = Problem("float32", "causal", batch=2, heads=4, kv_heads=4, length=32, head_dim=8)


def test_key_heads_can_be_fewer():
    tensors = Tensors.random(dataclasses.replace(PROBLEM, kv_heads=2), CPU, seed=0)
    assert tensors.query.shape == tensors.output_gradient.shape == (2, 4, 32, 8)
    assert tensors.key.shape == tensors.value.shape == (2, 2, 32, 8)


def test_inputs_depend_on_the_seed_alone():
    first, again, other = (Tensors.random(PROBLEM, CPU, seed) for seed in (0, 0, 1))
    assert torch.equal(first.query, again.query)
    assert not torch.equal(first.query, other.query)
    assert not torch.equal(first.query, first.key)
    assert abs(float(first.value.std()) - 1) < 0.1


def test_a_forward_is_measured_without_a_graph_and_a_backward_leaves_no_gradients():
    modes: list[bool] = []

    def bind(problem: Problem):
        def attend(q, k, v):
            modes.append(torch.is_grad_enabled())
            return F.scaled_dot_product_attention(q, k, v, is_causal=problem.causal)

        return attend

    tensors = Tensors.random(PROBLEM, CPU, 0).laid_out("heads first", head_axis=True)
    contender = Contender(Provider(name="p", group="peers", bind=bind), PROBLEM, tensors, CPU)
    with contender.ready("forward") as run:
        output = run()
    assert isinstance(output, torch.Tensor)
    assert not output.requires_grad
    assert modes == [False]
    for which in ("backward", "both"):
        modes.clear()
        with contender.ready(which) as run:
            run()
            run()
        assert modes == ([True] if which == "backward" else [True, True])
    assert tensors.query.grad is None


def test_a_result_that_is_no_number_is_infinitely_wrong():
    assert relative_difference(torch.tensor([float("nan")]), torch.ones(1)) == float("inf")
    assert relative_difference(torch.zeros(3), torch.zeros(3)) == 0
