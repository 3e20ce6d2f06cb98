"""Plans of the Triton backend: what their launches depend on, what they pass, and that they keep no tensor."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
import triton

from cs336_systems.attention import attention, score_statistics
from cs336_systems.attention.variants import dilated
from cs336_systems.kernels import launching
from cs336_systems.kernels.call import NO_AUX, Call, Options, Wanted
from cs336_systems.kernels.triton import backend, tiles
from cs336_systems.kernels.triton.halves import inputs_of
from cs336_systems.kernels.triton.launch import forward_launch
from cs336_systems.kernels.triton.problem import Problem, stride_multiples
from cs336_systems.kernels.triton.statistics import statistics_kernel
from cs336_systems.kernels.triton.tiles import TileConfig
from cs336_systems.testing import LAYOUTS, Inputs, Shapes, assert_within_budget, evaluate, make_inputs

from .portable import portable

SHAPES = Shapes.of(2, q_len=17, k_len=17, d=32, q_heads=2)
ROUNDS = 1 if launching.INTERPRETED else 2
"""Compiled launches are repeated from the second time on; interpreted ones are not kept."""
FLASH = partial(attention, impl="flash", return_lse=True)

ARRANGED_DOUT = [
    lambda x: x,
    lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    lambda x: torch.cat([x, x], dim=-1)[..., : x.shape[-1]],
    lambda x: x[:1].expand(x.shape),
    lambda x: x.mT.contiguous().mT,
]


def misaligned(x):
    """16 bytes are loaded at once only from multiples of 16."""
    moved = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    assert moved.data_ptr() % 16 != 0
    return moved


def of_shapes(*shapes, **settings):
    return [({"shapes": each}, settings) for each in shapes]


VARIATIONS = {
    "layout": [({"layout": layout}, {}) for layout in LAYOUTS],
    "mask": [({}, {"causal": causal}) for causal in (False, "top_left", "bottom_right", True)],
    "scale": [({}, {"scale": scale}) for scale in (None, 1.0, -1.0, 0.0, 1e-3)],
    "dtype": [({"dtype": dtype}, {}) for dtype in (torch.float32, torch.float16)],
    "heads": of_shapes(*[SHAPES._replace(k=(2, heads, 17, 32), v=(2, heads, 17, 32)) for heads in (2, 1)]),
    "batch": of_shapes(*[Shapes.of(*leading, q_len=17, d=32) for leading in ((4,), (2, 2), (1, 4), (4, 1), (1,))]),
    "lengths": of_shapes(*[Shapes.of(1, q_len=q, k_len=k, d=32) for q, k in ((17, 16), (16, 17), (1, 1))], causal=True),
    "widths": of_shapes(*[Shapes.of(1, q_len=17, d=d, dv=v) for d, v in ((32, 16), (16, 32), (24, 24), (17, 17))]),
    "lse": [({}, {"return_lse": with_lse}) for with_lse in (True, False, True)],
    "no_lse": [({}, {"return_lse": with_lse}) for with_lse in (False, True, False)],
    "dout": [({"dout": arrange}, {"return_lse": False}) for arrange in ARRANGED_DOUT],
    **{f"alignment_of_{x}": [({}, {"causal": True}), ({x: misaligned}, {"causal": True})] for x in Inputs._fields},
}


def inputs_for(device, **changes):
    """`make_inputs` of its arguments, with tensors by name changed."""
    arguments = {name: changes.pop(name) for name in ("shapes", "dtype", "layout") if name in changes}
    inputs = make_inputs(**{"shapes": SHAPES, "dtype": torch.float16} | arguments, device=device)
    return inputs._replace(**{name: change(getattr(inputs, name)) for name, change in changes.items()})


@pytest.mark.parametrize("what", VARIATIONS)
def test_calls_that_differ_in_one_thing_do_not_share_a_launch(flash_device, what):
    """Each call is made among the others, and then again with the plans that they left."""
    calls = [(inputs_for(flash_device, **changes), settings) for changes, settings in VARIATIONS[what]]
    for inputs, settings in calls * ROUNDS:
        results = evaluate(partial(FLASH, **settings), inputs)
        assert ("lse" in results) == settings.get("return_lse", True)
        assert_within_budget(results, inputs, **{name: x for name, x in settings.items() if name != "return_lse"})


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
    """Otherwise ptxas 12.8 takes the address of a tile from a register that is never written."""
    monkeypatch.setattr(tiles, "architecture_of", lambda device: architecture)
    width, stride = layout
    q, k, v = (torch.empty(1, 64, size, dtype=torch.float16)[..., :width] for size in (64, 64, stride))
    out, lse = torch.empty(1, 64, width, device="meta"), torch.empty(1, 64, device="meta")
    with portable(forward=TileConfig(128, 64, 8, stages)):
        problem = Problem(Call(q, k, v, Options(1.0)))
        launch = forward_launch(problem, inputs_of([q, k, v], None, None), out, lse, NO_AUX)
    assert launch.constants["C"].TILE_Q.value == rows
    assert launch.grid == (-(-64 // rows), 1)


@pytest.mark.parametrize(
    ("strides", "multiple"), [((48, 16, 1), 1), ((80, 40, 1), 8), ((60, 20, 1), 4), ((0, 50, 3), 2), ((66, 33, 1), 1)]
)
def test_strides_are_passed_in_the_largest_multiple_that_triton_does_not_find_itself(strides, multiple):
    tensors = [torch.empty_strided((2, 2, 8), steps, device="meta") for steps in (strides, (66, 33, 1), strides)]
    expected = (*[step // multiple for step in strides[:-1]], strides[-1])
    assert stride_multiples(tensors) == ([expected, (66, 33, 1), expected], (multiple, 1, multiple))


def addresses_of(tensors):
    """The operands of a repeated launch: addresses in place of tensors."""
    if isinstance(tensors, tuple):
        return tuple(addresses_of(item) for item in tensors)
    return tensors.data_ptr() if isinstance(tensors, torch.Tensor) else tensors


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
def test_a_repeated_launch_passes_the_tensors_of_the_first(monkeypatch, flash_device, name, dtype):
    """Compiled kernels take operands by position: one too many would shift all the others."""
    checked, call = [], launching.Launcher.__call__

    def compare(self, operands, describe, *described):
        assert operands == addresses_of(describe(*described).tensors)
        checked.append(self)
        call(self, operands, describe, *described)

    monkeypatch.setattr(launching.Launcher, "__call__", compare)
    inputs = make_inputs(SHAPES, dtype=dtype, device=flash_device)
    features = REPEATED[name](flash_device)
    with portable():
        evaluate(FLASH, inputs, features)
        assert len(checked) >= 3
        features = {name: x for name, x in features.items() if name not in ("dropout_p", "seed")}
        score_statistics(inputs.q, inputs.k, impl="flash", **features)
    assert checked[-1]._kernel is statistics_kernel


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_plans_keep_no_tensor_alive(flash_device, dtype):
    inputs = make_inputs(SHAPES, dtype=dtype, device=flash_device)
    q, k, v, dout = (x.detach().clone() for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    call = Call(q, k, v, Options(0.2, window_right=0))
    forward, backward = backend.plan_forward(call), backend.plan_backward(call, q, dout, False, Wanted())
    for _ in range(2):
        out, lse = forward(q, k, v, NO_AUX)
        gradients = backward(q, k, v, out, lse, dout, None, NO_AUX)
    assert [x.stride() for x in gradients[:3]] == [x.stride() for x in (q, k, v)]
    statistics = backend.plan_statistics(call)
    found = statistics(q, k, NO_AUX)
    alive = [weakref.ref(x) for x in (q, k, v, dout, out, lse, *gradients[:3], *found)]
    del call, q, k, v, dout, out, lse, gradients, found
    gc.collect()
    assert not any(x() is not None for x in alive)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_launches_are_described_once(monkeypatch, dtype):
    """New tensors of the same metadata are launched on without deriving anything."""
    first, count = launching.Launcher._first, []
    monkeypatch.setattr(launching.Launcher, "_first", lambda self, *args: (count.append(self), first(self, *args)))
    calls, launches = [], []
    with portable():
        for _ in range(3):
            inputs = make_inputs(Shapes.of(3, q_len=19, k_len=23, d=32), dtype=dtype, device="cuda")
            calls.append((evaluate(FLASH, inputs), inputs))
            launches.append(len(count))
    for results, inputs in calls:
        assert_within_budget(results, inputs)
    assert launches == [launches[0]] * 3
    assert launches[0] >= 3


@pytest.mark.gpu
def test_hooks_see_every_launch():
    """Profilers add hooks to Triton."""
    inputs, attend, seen = make_inputs(SHAPES, dtype=torch.float16, device="cuda"), partial(attention, impl="flash"), []
    with portable():
        evaluate(attend, inputs)
        chain = triton.knobs.runtime.launch_enter_hook
        chain.add(seen.append)
        try:
            for _ in range(2):
                evaluate(attend, inputs)
        finally:
            chain.remove(seen.append)
    assert len(seen) == 2 * 3
