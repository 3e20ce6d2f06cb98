"""The operators behind a call: what torch.library checks, fake results, dispatch modes, vmap and torch.func."""

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


BATCHED = {
    "nothing": ((), {"causal": True}),
    "everything": (("bias", "alibi_slopes", "sinks", "mask"), EVERYTHING),
}


def entries(device, dtype=FLOAT):
    """Three calls of q, k and v, stacked."""
    return make_inputs(Shapes.of(3, 2, q_len=5, k_len=9, d=16, dv=8, q_heads=4, kv_heads=2), dtype=dtype, device=device)


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("impl", named(["flash", "tiled", "naive", "auto"], ["tiled", "auto"]))
def test_vmap_over_calls(impl, device, name):
    names, settings = BATCHED[name]
    attend = partial(attention, impl=impl, return_lse=impl != "auto", **settings)
    inputs = entries(device)
    made = [{key: x.detach() for key, x in features_of(device).items() if key in names} for _ in range(3)]
    stacked = {key: torch.stack([one[key] for one in made]) for key in names}
    results = torch.vmap(lambda q, k, v, tensors: attend(q, k, v, **tensors))(*inputs[:3], stacked)
    calls = [flat(attend(*[x[i] for x in inputs[:3]], **made[i])) for i in range(3)]
    for result, parts in zip(flat(results), zip(*calls, strict=True), strict=True):
        torch.testing.assert_close(result, torch.stack(parts))


@pytest.mark.parametrize("names", [pytest.param((), marks=slow), ("bias", "mask")])
def test_vmap_over_some_arguments(flash_device, names):
    tensors = {key: x.detach() for key, x in features_of(flash_device).items() if key in names}
    inputs = entries(flash_device)
    q, k, v = inputs.q, inputs.k[0], inputs.v.movedim(0, 2)
    attend = partial(attention, impl="flash", **tensors)
    out = torch.vmap(attend, in_dims=(0, None, 2))(q, k, v)
    torch.testing.assert_close(out, torch.stack([attend(q[i], k, v[:, :, i]) for i in range(3)]))


@pytest.mark.parametrize("impl", named(["flash", "tiled"], ["tiled"]))
def test_vmap_over_the_backward_operator(impl, device):
    (operator, first), (_, second) = (calls_of(impl, HEADS, device, HALF, everything=True)[1] for _ in range(2))
    is_tensor = [isinstance(x, torch.Tensor) or (isinstance(x, list) and bool(flat(x))) for x in first]
    stacked = [
        tree_map(lambda x, y: torch.stack([x, y]), x, y)
        for x, y, has in zip(first, second, is_tensor, strict=True)
        if has
    ]

    def backward(*tensors):
        rest = iter(tensors)
        return operator(*[next(rest) if has else x for x, has in zip(first, is_tensor, strict=True)])

    results = torch.vmap(backward)(*stacked)
    expected = [flat(operator(*arguments)) for arguments in (first, second)]
    for result, parts in zip(flat(results), zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(result, torch.stack(parts))


NAIVE = partial(attention, impl="naive")


def loss(q, k, v, sinks, bias, impl):
    options = {"causal": True, "window": (9, None), "sinks": sinks, "bias": bias}
    out, lse = attention(q, k, v, **options, impl=impl, return_lse=True)
    return out.square().sum() + lse.sin().sum()


@pytest.mark.parametrize("impl", named(["flash", "tiled", "naive", "auto"], ["tiled", "auto"]))
def test_gradients_by_torch_func(device, impl):
    """`torch.func.grad` gives what autograd gives of naive, and vmap of it the gradients of each call."""
    stacked = [*entries(device)[:3], torch.randn(3, 4, device=device), torch.randn(3, 4, 5, 9, device=device)]
    gradients = []
    for one in zip(*stacked, strict=True):
        leaves = [x.detach().requires_grad_() for x in one]
        gradients.append(torch.autograd.grad(loss(*leaves, "naive"), leaves))
    expected = tuple(torch.stack(parts) for parts in zip(*gradients, strict=True))
    of_one = torch.func.grad(partial(loss, impl=impl), argnums=(0, 1, 2, 3, 4))
    torch.testing.assert_close(of_one(*[x[1] for x in stacked]), tuple(x[1] for x in expected))
    torch.testing.assert_close(torch.vmap(of_one)(*stacked), expected)


@pytest.mark.parametrize("impl", named(["flash", "tiled"], ["tiled"]))
def test_a_batch_of_gradients(device, impl):
    """autograd's own batches are refused with what to do instead, which gives what naive does of them."""
    q, k, v = (x[0, :1].requires_grad_() for x in entries(device)[:3])
    gradients = torch.randn(3, *q.shape[:-1], v.shape[-1], device=device)
    call = partial(attention, causal=True, impl=impl)
    with pytest.raises(RuntimeError, match=r"use torch\.vmap of what torch\.func\.vjp returns"):
        torch.autograd.grad(call(q, k, v), q, gradients, is_grads_batched=True)
    with pytest.raises(RuntimeError, match=r"or torch\.func\.jacrev"):
        torch.autograd.functional.jacobian(lambda q: call(q, k, v).sum((0, 1)), q, vectorize=True)
    of_q, of_naive = (lambda q, by=by: by(q, k, v, causal=True).sum((0, 1))[:2] for by in (call, NAIVE))
    expected = torch.autograd.functional.jacobian(of_naive, q)
    torch.testing.assert_close(torch.func.jacrev(of_q)(q), expected, atol=1e-5, rtol=1e-5)
    _, pull = torch.func.vjp(call, q, k, v)
    expected = torch.autograd.grad(NAIVE(q, k, v, causal=True), (q, k, v), gradients, is_grads_batched=True)
    torch.testing.assert_close(torch.vmap(pull)(gradients), expected)


@each_function
def test_torch_func_refuses_what_cannot_be(impl, device):
    """Second derivatives, and those in forward mode, are naive's alone; "compiled" has no transform at all."""
    q = entries(device).q[0, :1, :1, :3]

    def of_q(q):
        return attention(q, q, q, impl=impl).square().sum()

    with pytest.raises(RuntimeError, match=r"forward-mode|impl='naive' has"):
        torch.func.jacfwd(of_q)(q)
    with pytest.raises(RuntimeError, match=r"differentiated twice; impl='naive' can"):
        torch.func.grad(lambda q: torch.func.grad(of_q)(q).square().sum())(q)
    with pytest.raises(ValueError, match=r"torch\.func does not transform what torch\.compile made"):
        torch.vmap(partial(attention, impl="compiled"))(*entries(device)[:3])
