"""The operators behind a call: what torch.library checks, fake results, and dispatch modes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from cs336_systems.attention import attention, attention_varlen, attention_with_cache
from cs336_systems.testing import LAYOUTS, Shapes, evaluate, make_cache, make_inputs, make_packed

from .features import Maker, stretched
from .helpers import (
    COMPILES,
    DOUBLE,
    FLOAT,
    HALF,
    Record,
    assert_same,
    each_function,
    flat,
    named,
    operator_calls,
    packed_arguments,
    sizes_of,
    slow,
)

pytestmark = COMPILES
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
HEADS = Shapes.of(2, q_len=5, k_len=9, d=16, dv=8, q_heads=4, kv_heads=2)
SHAPES = {
    "heads": HEADS,
    "no_heads": Shapes.of(2, q_len=5, d=16),
    "five_axes": Shapes.of(1, 2, q_len=5, d=16, q_heads=2, kv_heads=1),
    "no_keys": Shapes.of(2, q_len=5, k_len=0, d=16),
    "no_queries": Shapes.of(2, q_len=0, k_len=5, d=16),
}


def features_of(device, dtype=FLOAT):
    """Every tensor that a call may have, for `HEADS`."""
    factors = torch.rand(2, 4, 1, 1, device=device, dtype=dtype).requires_grad_()
    tensors = Maker(sizes_of(HEADS), dtype, device).tensors("bias", "alibi_slopes", "sinks", "mask")
    return tensors | {"scores": stretched(factors)}


EVERYTHING = {"causal": True, "window": (7, None), "softcap": 2.0, "dropout_p": 0.25, "seed": 5}


def calls_of(impl, shapes, device, dtype, *, layout="contiguous", everything=False, return_lse=True):
    """The forward and the backward operator with their arguments."""
    inputs = make_inputs(shapes, dtype=dtype, device=device, layout=layout)
    features, settings = (features_of(device, dtype), EVERYTHING) if everything else ({}, {"causal": True})
    attend = partial(attention, impl=impl, return_lse=return_lse, **settings)
    calls = operator_calls(attend, inputs, features)
    calls = [call for call in calls if "seed" not in str(call[0])]
    assert [str(operator) for operator, _ in calls] == [
        f"cs336_systems.{impl}_{way}.default" for way in ("forward", "backward")
    ]
    return calls


def are_sound(calls):
    for operator, arguments in calls:
        torch.library.opcheck(operator, arguments, test_utils=CHECKS)


@pytest.mark.parametrize(
    ("impl", "name", "dtype", "everything"),
    [
        pytest.param("flash", "heads", HALF, True, marks=slow),
        ("tiled", "heads", DOUBLE, True),
        pytest.param("tiled", "heads", HALF, True, marks=slow),
        *[pytest.param("flash", name, HALF, False, marks=[slow] * (name != "no_heads")) for name in SHAPES],
        pytest.param("flash", "no_heads", FLOAT, False, marks=slow),
    ],
)
def test_operators_are_sound(impl, name, dtype, everything, device):
    """With and without a gradient of the log-sum-exp."""
    are_sound(calls_of(impl, SHAPES[name], device, dtype, everything=everything, return_lse=dtype is not FLOAT))


@pytest.mark.parametrize("impl", named(["flash", "tiled"], ["tiled"]))
def test_operators_of_packed_sequences_are_sound(impl, device):
    lengths = [(3, 5), (6, 8)]
    inputs = make_packed(lengths, heads=(4, 2), d=16, device=device)
    given = packed_arguments(lengths, device) | {"max_seqlen_q": None}
    calls = operator_calls(partial(attention_varlen, causal=True, impl=impl, return_lse=True, **given), inputs)
    assert len(calls) == 2
    are_sound(calls)


@pytest.mark.parametrize("new", [1, pytest.param(2, marks=slow)])
def test_the_operator_of_a_cache_is_sound(flash_device, new):
    cache = make_cache([30, 7], capacity=32, q_heads=4, kv_heads=2, d=16, dv=8, new=new, device=flash_device)
    cache.k.nan_to_num_()
    cache.v.nan_to_num_()
    with Record() as record:
        attention_with_cache(*cache, window=(9, None), impl="flash")
    assert len(record.calls) == 1
    are_sound(record.calls)
    look_alike(record.calls)


def looks(results):
    return [(x.shape, x.dtype, x.stride(), x.device) for x in flat(results)]


def look_alike(calls):
    """Fake results have the shape, dtype and strides of real ones, by which compiled code addresses them."""
    for operator, arguments in calls:
        with FakeTensorMode(allow_non_fake_inputs=False) as mode:
            fake = operator(*tree_map(lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x, arguments))
        assert looks(fake) == looks(operator(*arguments))


BIASES = {
    "transposed": lambda bias: bias.mT.contiguous().mT,
    "heads_last": lambda bias: bias.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "of_longer_rows": lambda bias: torch.cat([bias, bias], -1)[..., : bias.shape[-1]],
    "expanded": lambda bias: bias[:1].expand_as(bias),
}


@pytest.mark.parametrize("layout", BIASES)
@each_function
def test_gradients_of_a_bias_lie_where_compiled_code_takes_them_to_lie(impl, layout, device):
    """Also where the kernel for Hopper pads their rows, to multiples of 16 bytes."""
    inputs = make_inputs(Shapes.of(2, 4, q_len=37, k_len=43, d=64), dtype=HALF, device=device)
    bias = BIASES[layout](torch.randn(2, 4, 37, 43, dtype=HALF, device=device)).requires_grad_()
    calls = operator_calls(partial(attention, impl=impl), inputs, {"bias": bias})
    assert len(calls) == 2
    are_sound(calls)
    look_alike(calls)


LAID_OUT = [(layout, name) for layout in LAYOUTS for name in ("heads", "no_heads")]
LAID_OUT += [("contiguous", name) for name in ("five_axes", "no_keys", "no_queries")]


@pytest.mark.parametrize(
    ("layout", "name"),
    [pytest.param(*row, marks=[slow] * (row[1] == "heads" and number > 0)) for number, row in enumerate(LAID_OUT)],
)
@each_function
def test_fake_results_look_like_real_ones(impl, device, layout, name):
    shapes = SHAPES[name]
    if layout == "packed":
        shapes = shapes._replace(k=(*shapes.k[:-2], *shapes.q[-2:]), v=(*shapes.v[:-2], shapes.q[-2], shapes.v[-1]))
    look_alike(calls_of(impl, shapes, device, HALF, layout=layout, everything=(layout, name) == LAID_OUT[2]))


class Flash(torch.nn.Module):
    def forward(self, q, k, v):
        return attention(q, k, v, causal=True, impl="flash")


@pytest.mark.parametrize("way", ["fake", "exported", "compiled"])
def test_a_traced_call_leaves_the_choice_of_kernels_to_its_operator(monkeypatch, flash_device, way):
    """Kernels for one GPU depend on addresses and sizes, which a traced call does not have."""
    from cs336_systems.kernels.sm90 import backend

    monkeypatch.setattr(backend, "unsupported_device", lambda device: None)  # as on a Hopper GPU
    q, k, v = (torch.randn(1, 2, 9, 64, dtype=HALF, device=flash_device) for _ in range(3))
    if way == "fake":
        with FakeTensorMode() as mode:
            results = attention(*[mode.from_tensor(x) for x in (q, k, v)], impl="flash", return_lse=True)
        assert looks(results) == looks([q, q.new_empty(q.shape[:-1], dtype=FLOAT)])
        return
    shapes = [{2: torch.export.Dim("length", min=2, max=512)}] * 3
    program = torch.export.export(Flash(), (q, k, v), dynamic_shapes=shapes, strict=way == "compiled")
    assert any(node.target is torch.ops.cs336_systems.flash_forward.default for node in program.graph.nodes)


@pytest.mark.parametrize("impl", named(["flash", "tiled"], ["tiled"]))
def test_operators_compute_what_eager_calls_do(impl, device):
    """Which go around the dispatcher where they may."""
    inputs, features = make_inputs(HEADS, dtype=HALF, device=device), features_of(device, HALF)
    attend = partial(attention, impl=impl, return_lse=True, **EVERYTHING)
    with Record() as record:
        results = evaluate(attend, inputs, features)
    assert len(record.calls) == 2
    assert_same(results, evaluate(attend, inputs, features), exact=True)


@each_function
def test_a_mode_that_begins_with_the_backward_sees_its_operator(impl, device):
    inputs = make_inputs(HEADS, dtype=HALF, device=device)
    leaves, sinks = [x.detach().requires_grad_() for x in inputs[:3]], torch.randn(4, device=device).requires_grad_()
    out = attention(*leaves, sinks=sinks, impl=impl)
    expected = torch.autograd.grad(out, (*leaves, sinks), inputs.dout, retain_graph=True)
    with Record() as record:
        gradients = torch.autograd.grad(out, (*leaves, sinks), inputs.dout)
    assert [str(operator) for operator, _ in record.calls] == [f"cs336_systems.{impl}_backward.default"]
    assert all(torch.equal(x, y) for x, y in zip(gradients, expected, strict=True))


def test_an_operator_refuses_what_its_kernels_cannot_compute(flash_device):
    (operator, arguments), _ = calls_of("flash", HEADS, flash_device, HALF)
    with pytest.raises(ValueError, match=r"^the flash kernels cannot compute this call: it computes in float16, bfl"):
        operator(*[x.double() for x in arguments[:3]], *arguments[3:])
