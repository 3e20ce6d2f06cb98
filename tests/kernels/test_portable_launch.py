"""Calls of the portable kernels: what their plans depend on, and what is launched, where and how often."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import triton

from cs336_systems.attention import attention
from cs336_systems.attention.variants import dilated
from cs336_systems.kernels import launching, tuning
from cs336_systems.kernels.triton import launch as portable
from cs336_systems.kernels.triton.describe import describe_forward
from cs336_systems.kernels.triton.geometry import in_pipeline, in_units
from cs336_systems.kernels.triton.inputs import Input, row_of_parts
from cs336_systems.kernels.triton.variation import Variation
from cs336_systems.kernels.settings import Settings
from cs336_systems.kernels.tuning import TileConfig
from cs336_systems.testing import LAYOUTS, TF32_EPS, Shapes, assert_within_budget, evaluate, make_inputs

SHAPES = Shapes.of(2, q_len=17, k_len=17, d=32, q_heads=2)
ROUNDS = 1 if launching.INTERPRETED else 2
"""How often a series of calls is made: what is remembered of a compiled launch is used from the second time on, and of
an interpreted one there is only its plan, which the call after it would find already."""
VARIATIONS = {
    "layout": [({"layout": layout}, {}) for layout in LAYOUTS],
    "mask": [({}, {"causal": causal}) for causal in (False, "top_left", "bottom_right", True)],
    "scale": [({}, {"scale": scale}) for scale in (None, 1.0, -1.0, 0.0, 1e-3)],
    "dtype": [({"dtype": dtype}, {}) for dtype in (torch.float32, torch.float16)],
    "heads": [({"shapes": SHAPES._replace(k=(2, heads, 17, 32), v=(2, heads, 17, 32))}, {}) for heads in (2, 1)],
    "batch": [
        ({"shapes": Shapes.of(*leading, q_len=17, d=32)}, {}) for leading in ((4,), (2, 2), (1, 4), (4, 1), (1,))
    ],
    "lengths": [
        ({"shapes": Shapes.of(1, q_len=q, k_len=k, d=32)}, {"causal": True}) for q, k in ((17, 16), (16, 17), (1, 1))
    ],
    "widths": [
        ({"shapes": Shapes.of(1, q_len=17, d=d, dv=dv)}, {}) for d, dv in ((32, 16), (16, 32), (24, 24), (17, 17))
    ],
}


# Calls that have the plan of another: misaligned tensors have the strides of contiguous ones, True is "bottom_right".
ALIKE = {"layout": 1, "mask": 1}


@pytest.fixture
def plans(monkeypatch):
    """How many plans forward and backward have made from here on."""
    stores = ({}, {})
    monkeypatch.setattr(portable._forward_plans, "_plans", stores[0])
    monkeypatch.setattr(portable._backward_plans, "_plans", stores[1])
    return lambda: tuple(map(len, stores))


@pytest.mark.parametrize("what", VARIATIONS)
def test_calls_that_differ_in_one_thing_do_not_share_a_launch(flash_device, plans, what):
    """Each is made among the others, and then again, so that it finds whatever the first ones left."""
    calls = []
    for inputs, settings in VARIATIONS[what]:
        made = make_inputs(**{"shapes": SHAPES, "dtype": torch.float16} | inputs, device=flash_device)
        calls.append((made, settings))
    for _ in range(ROUNDS):
        for inputs, settings in calls:
            results = evaluate(partial(attention, impl="flash", return_lse=True, **settings), inputs)
            assert_within_budget(results, inputs, **settings)
    assert plans() == (len(calls) - ALIKE.get(what, 0),) * 2


@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "dlse"])
def test_the_alignment_of_each_tensor_counts(flash_device, name):
    """Vectors of 16 bytes are read from addresses that allow it alone."""
    inputs = make_inputs(SHAPES, dtype=torch.float16, device=flash_device)
    x = getattr(inputs, name)
    moved = inputs._replace(**{name: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)})
    assert getattr(moved, name).data_ptr() % 16 != 0
    attend = partial(attention, causal=True, impl="flash", return_lse=True)
    for made in (inputs, moved) * ROUNDS:
        assert_within_budget(evaluate(attend, made), made, causal=True)


@pytest.mark.parametrize("return_lse", [(True, False), (False, True)])
def test_a_gradient_of_the_log_sum_exp_or_none(flash_device, plans, return_lse):
    inputs = make_inputs(SHAPES, dtype=torch.float16, device=flash_device)
    for with_lse in return_lse * ROUNDS:
        results = evaluate(partial(attention, impl="flash", return_lse=with_lse), inputs)
        assert ("lse" in results) == with_lse
        assert_within_budget(results, inputs)
    assert plans() == (1, 2)


def test_the_layout_of_the_incoming_gradient_counts(flash_device, plans):
    inputs = make_inputs(SHAPES, dtype=torch.float16, device=flash_device)
    arrangements = (
        lambda x: x,
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.cat([x, x], dim=-1)[..., : x.shape[-1]],
        lambda x: x[:1].expand(x.shape),
    )
    for _ in range(ROUNDS):
        for arrange in arrangements:
            made = inputs._replace(dout=arrange(inputs.dout))
            assert_within_budget(evaluate(partial(attention, impl="flash"), made), made)
    assert plans() == (1, len(arrangements))


def test_precisions_do_not_share_a_launch(flash_device, plans):
    inputs = make_inputs(SHAPES, device=flash_device)
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high") * ROUNDS:
            torch.set_float32_matmul_precision(precision)
            results = evaluate(partial(attention, impl="flash", return_lse=True), inputs)
            torch.set_float32_matmul_precision("highest")
            assert_within_budget(results, inputs, eps=None if precision == "highest" else TF32_EPS)
    finally:
        torch.set_float32_matmul_precision(before)
    assert plans() == (2, 2)


@pytest.fixture
def described(monkeypatch):
    """The names of the attention kernels described from here on, in order."""
    names = []

    def watch(name):
        describe = getattr(portable, f"describe_{name}")

        def describe_and_note(*args):
            names.append(name)
            return describe(*args)

        monkeypatch.setattr(portable, f"describe_{name}", describe_and_note)

    for name in ("forward", "dq", "dkdv"):
        watch(name)
    return names


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_kernels_are_launched_while_the_device_of_their_tensors_is_current(monkeypatch, flash_device, described, dtype):
    current = []

    class Noted(torch.cuda.device):  # torch asks whether something is an instance of it
        def __init__(self, device):
            self.noted = device

        def __enter__(self):
            described.append(f"on {self.noted.type}")
            current.append(self.noted)

        def __exit__(self, *_):
            current.clear()
            described.append("and back")

    monkeypatch.setattr(portable, "is_elsewhere", lambda device: not current)
    monkeypatch.setattr(torch.cuda, "device", Noted)
    inputs = make_inputs(Shapes.of(1, q_len=6, k_len=13, d=17), dtype=dtype, device=flash_device)
    evaluate(partial(attention, impl="flash"), inputs)
    there = f"on {flash_device.type}"
    assert described == [there, "forward", "and back", there, "dq", "dkdv", "and back"]


@pytest.mark.parametrize(
    ("layout", "stages", "architecture", "rows"),
    [
        pytest.param((64, 64), 2, "sm_90", 128, id="pipelined"),
        pytest.param((64, 64), 1, "sm_90", 32, id="one_stage"),
        pytest.param((64, 65), 2, "sm_90", 32, id="odd_strides"),
        pytest.param((63, 64), 2, "sm_90", 32, id="masked_within_a_pair"),
        pytest.param((62, 66), 2, "sm_90", 128, id="pairs"),
        pytest.param((63, 65), 1, "sm_80", 128, id="no_descriptors"),
    ],
)
def test_without_a_pipeline_hopper_s_matrix_instructions_are_avoided(monkeypatch, layout, stages, architecture, rows):
    """Else ptxas 12.8 takes the address of a tile from a register that was never set."""
    monkeypatch.setattr(tuning, "architecture_of", lambda device: architecture)
    width, stride = layout
    q, k, v = (torch.empty(1, 64, size, dtype=torch.float16)[..., :width] for size in (64, 64, stride))
    out, lse = torch.empty(1, 64, width, device="meta"), torch.empty(1, 64, device="meta")
    with tuning.pin(forward=TileConfig(128, 64, 8, stages)):
        inputs, variation = [Input(x, None, ()) for x in (q, k, v)], Variation.of(Settings(), ())
        described = describe_forward(inputs, out, lse, variation, (), 1.0, "half")
    assert described.constants["TILE_Q"] == rows
    assert described.grid == (-(-64 // rows), 1)


def test_parts_of_float32_rows_are_not_pipelined_where_they_end_within_a_pair():
    parts = [torch.empty(2, 8, row_of_parts(width), dtype=torch.float16)[..., :width] for width in (64, 38, 37, 9)]
    assert [in_pipeline(x) for x in parts] == [True, True, False, False]


@pytest.mark.parametrize(
    ("strides", "unit"), [((48, 16, 1), 1), ((80, 40, 1), 8), ((60, 20, 1), 4), ((0, 50, 3), 2), ((66, 33, 1), 1)]
)
def test_strides_are_passed_in_the_largest_unit_that_triton_does_not_find_itself(strides, unit):
    """Each tensor's in its own: beside one of odd strides the others are still read in vectors."""
    tensors = [torch.empty_strided((2, 2, 8), steps, device="meta") for steps in (strides, (66, 33, 1), strides)]
    expected = (*[step // unit for step in strides[:-1]], strides[-1])
    assert in_units(tensors) == ([expected, (66, 33, 1), expected], (unit, 1, unit))


def addresses_of(described):
    """What a repeated launch passes for tensors: an address for each, in the same places."""
    if isinstance(described, tuple):
        return tuple(addresses_of(item) for item in described)
    return described.data_ptr() if isinstance(described, torch.Tensor) else described


REPEATED = {
    "plain": lambda device: {},
    "window": lambda device: {"window": (5, None)},
    "rules": lambda device: {"mask": dilated(2), "softcap": 3.0},
    "blocks": lambda device: {
        "mask": dilated(2).with_blocks(17, 17, device=device),
        "sinks": torch.ones(2, device=device),
    },
    "gradients": lambda device: {
        "bias": torch.zeros(2, 17, 17, device=device, requires_grad=True),
        "alibi_slopes": torch.ones(2, device=device, requires_grad=True),
        "dropout_p": 0.5,
        "seed": 3,
    },
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", REPEATED)
def test_a_repeated_launch_passes_the_tensors_that_the_first_described(monkeypatch, flash_device, name, dtype):
    """Compiled kernels take what comes second by its place alone: one argument too many would shift all the rest."""
    checked = []
    call = launching.Launcher.__call__

    def compare(self, addresses, describe):
        assert addresses == addresses_of(describe().tensors)
        checked.append(self)
        call(self, addresses, describe)

    monkeypatch.setattr(launching.Launcher, "__call__", compare)
    inputs = make_inputs(SHAPES, dtype=dtype, device=flash_device)
    evaluate(partial(attention, impl="flash", return_lse=True), inputs, REPEATED[name](flash_device))
    assert len(checked) >= 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_launches_are_described_once(described, dtype):
    """Fresh tensors of the same metadata are launched on without deriving anything: what is kept has no address."""
    attend = partial(attention, impl="flash", return_lse=True)
    for _ in range(3):
        inputs = make_inputs(Shapes.of(3, q_len=19, k_len=23, d=32), dtype=dtype, device="cuda")
        assert_within_budget(evaluate(attend, inputs), inputs)
        assert described == ["forward", "dq", "dkdv"]


@pytest.mark.gpu
def test_launches_that_were_forgotten_are_described_anew(monkeypatch, described):
    monkeypatch.setattr(launching, "MOST_PLANS", 2)
    for _ in range(2):
        for length in (18, 34, 66):
            inputs = make_inputs(Shapes.of(1, q_len=length, d=32), dtype=torch.float16, device="cuda")
            assert_within_budget(evaluate(partial(attention, impl="flash", return_lse=True), inputs), inputs)
    assert len(described) > 3 * 3


@pytest.mark.gpu
def test_hooks_see_every_launch():
    """As profilers hang themselves into Triton."""
    inputs = make_inputs(SHAPES, dtype=torch.float16, device="cuda")
    attend = partial(attention, impl="flash")
    evaluate(attend, inputs)
    seen = []
    chain = triton.knobs.runtime.launch_enter_hook
    chain.add(seen.append)
    try:
        for _ in range(2):
            evaluate(attend, inputs)
    finally:
        chain.remove(seen.append)
    assert len(seen) == 2 * 3
