"""float32 inputs are rewritten as the same parts however the rewriting is divided among programs and launches."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from cs336_systems.attention import attention
from cs336_systems.kernels.triton import inputs as portable_inputs
from cs336_systems.kernels.triton import launch
from cs336_systems.testing import Shapes, assert_within_budget, evaluate, make_inputs, poisoned_memory

SHAPES = Shapes.of(2, q_len=75, k_len=49, d=16, dv=20, q_heads=2, kv_heads=1)

# Most elements of a group that one program measures, elements it reads at a time, and programs aimed at.
DIVISIONS = {
    "measured_first": (0, 1 << 14, 128),
    "one_share": (1 << 17, 1 << 14, 1),
    "a_bite_a_share": (1 << 17, 1 << 9, 128),
    "bites_that_do_not_divide_into_shares": (1 << 17, 1 << 9, 48),
}


@pytest.fixture(params=DIVISIONS)
def division(request, monkeypatch) -> None:
    """One way to divide the work, in plans made for it."""
    names = ("MOST_ELEMENTS_A_GROUP", "ELEMENTS_A_BITE", "PROGRAMS_TO_SHARE")
    for name, value in zip(names, DIVISIONS[request.param], strict=True):
        monkeypatch.setattr(portable_inputs, name, value)
    for plans in (launch._forward_plans, launch._backward_plans):
        monkeypatch.setattr(plans, "_plans", {})


@pytest.mark.usefixtures("division")
def test_every_division_computes_the_same(flash_device):
    inputs = make_inputs(SHAPES, device=flash_device, layout="length_before_heads")
    # The largest magnitude sets the unit; here the last row of the last group's last matrix has it.
    inputs.q[-1, -1, -1] *= 2.0**6
    inputs.v[-1, -1, -1] *= 2.0**6
    with poisoned_memory():
        results = evaluate(partial(attention, causal=True, impl="flash", return_lse=True), inputs)
    assert_within_budget(results, inputs, causal=True)


def test_shares_follow_from_the_size_of_a_group():
    def shares(groups: int, length: int) -> int | None:
        tensors = [torch.empty(groups, length, 64, device="meta") for _ in range(4)]
        plan = portable_inputs.plan_parts(tensors, "float32")
        assert plan is not None
        return plan.shares

    assert shares(8, 512) == 4
    assert shares(1, 512) == 4, "no more than there are bites"
    assert shares(64, 512) == 1
    assert shares(8, 1024) is None, "measured in a launch of its own"
    assert portable_inputs.plan_parts([torch.empty(2, 3, 16, dtype=torch.float16)] * 3, "half") is None
