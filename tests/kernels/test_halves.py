"""float32 inputs are split into the same halves however the work is divided among programs and launches."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.kernels.call import Call, Options, plan_caches
from cs336_systems.kernels.triton import halves
from cs336_systems.kernels.triton.problem import Problem, is_pipelined
from cs336_systems.testing import Shapes, make_inputs

from ..attention.helpers import check

SHAPES = Shapes.of(2, q_len=75, k_len=49, d=16, dv=20, q_heads=2, kv_heads=1)

DIVISIONS = {
    # SHORT_GROUP, SHORT_TILE_ELEMENTS, SHORT_PROGRAMS
    "measured_first": (0, 1 << 14, 128),
    "one_share": (1 << 17, 1 << 14, 1),
    "a_tile_a_share": (1 << 17, 1 << 9, 128),
    "tiles_that_do_not_divide_into_shares": (1 << 17, 1 << 9, 48),
}


@pytest.mark.parametrize("division", DIVISIONS)
def test_every_division_computes_the_same(flash_device, monkeypatch, division):
    names = ("SHORT_GROUP", "SHORT_TILE_ELEMENTS", "SHORT_PROGRAMS")
    for name, value in zip(names, DIVISIONS[division], strict=True):
        monkeypatch.setattr(halves, name, value)
    for cache in plan_caches:
        cache.clear()
    inputs = make_inputs(SHAPES, device=flash_device, layout="length_before_heads")
    # The largest magnitude sets the scale; here the last row of the last group's last matrix has it.
    inputs.q[-1, -1, -1] *= 2.0**6
    inputs.v[-1, -1, -1] *= 2.0**6
    check("flash", inputs, causal=True)


@pytest.mark.parametrize(
    ("groups", "length", "shares"),
    [
        pytest.param(8, 512, 4, id="divided"),
        pytest.param(1, 512, 4, id="one_per_tile_at_most"),
        pytest.param(64, 512, 1, id="many_groups"),
        pytest.param(8, 1024, 0, id="measured_in_another_launch"),
    ],
)
def test_shares_follow_from_the_size_of_a_group(groups, length, shares):
    tensors = [torch.empty(groups, length, 64, device="meta") for _ in range(4)]
    assert halves.SplitPlan(tensors, Problem(Call(*tensors[:3], Options(1.0)))).shares == shares


def test_halves_of_rows_that_end_within_a_pair_are_not_pipelined():
    rows = [torch.empty(2, 8, halves.half_row(width), dtype=torch.float16)[..., :width] for width in (64, 38, 37, 9)]
    assert [is_pipelined(x) for x in rows] == [True, True, False, False]
