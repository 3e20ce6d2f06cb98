"""SwiGLU's kernels and Function: results, saved tensors, and where the plain expression is used."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.transformer import Linear, SwiGLU, swiglu

from .conftest import COMPILE_WARNINGS, assert_all_close, saved_bytes

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAMES = ("x", "w1", "w3", "w2")
FUSED = swiglu.fused


@pytest.fixture(autouse=True)
def _use_kernels(monkeypatch):
    """Also where they are interpreted on a CPU."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(swiglu, "fused", swiglu.can_be_fused)


@pytest.fixture
def layer(flash_device):
    return SwiGLU(16, 24, device=flash_device)


@pytest.fixture
def inputs(flash_device):
    """x and the gradient of the output."""
    return tuple(torch.randn(5, 16, device=flash_device) for _ in range(2))


def weights_of(layer):
    return {"w1": layer.w1.weight, "w3": layer.w3.weight, "w2": layer.w2.weight}


def evaluate(layer, x, dout, function=None):
    """The output, and the gradients of x and the weights."""
    x = x.detach().requires_grad_()
    out = layer(x) if function is None else function(x)
    leaves = {"x": x} | weights_of(layer)
    gradients = torch.autograd.grad(out, list(leaves.values()), dout.to(out.dtype))
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def assert_accurate(monkeypatch, dtype, layer, x, dout, function=None):
    """At most twice the error of the plain expression against float64, plus the rounding of the results."""
    actual = evaluate(layer, x, dout, function)
    with monkeypatch.context() as patch:
        patch.setattr(swiglu, "fused", lambda *tensors: False)
        plain = evaluate(layer, x, dout, function)
    exact = evaluate(copy.deepcopy(layer).double(), x.double(), dout.double())
    for name, expected in exact.items():
        assert (actual[name].dtype, actual[name].shape) == (plain[name].dtype, plain[name].shape)
        largest, error, plain_error = (
            float(each.abs().max()) if each.numel() else 0.0
            for each in (expected, actual[name] - expected, plain[name] - expected)
        )
        roundings = 8 if dtype == torch.float32 else 2
        assert error <= 2 * plain_error + roundings * torch.finfo(dtype).eps * largest, name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "d_ff"), [(1, 1), (3, 50), (37, 16), (5, 1024), (2, 1365), (3, 2064), (0, 8)])
def test_kernels(flash_device, rows, d_ff, dtype):
    gu = (3 * torch.randn(rows, 2 * d_ff, device=flash_device)).to(dtype)
    dh = torch.randn(rows, d_ff, device=flash_device).to(dtype)
    exact_gu = gu.double().requires_grad_()
    g, u = exact_gu.chunk(2, -1)
    expected = F.silu(g) * u
    (gradient,) = torch.autograd.grad(expected, exact_gu, dh.double())
    close = {"rtol": torch.finfo(dtype).eps / 2 + 2e-6, "atol": 1e-5}  # one rounding, from float32
    dgu, again = swiglu.silu_and_mul_backward(dh, gu)
    assert dgu.dtype == again.dtype == dtype
    for h in (swiglu.silu_and_mul(gu), again):
        torch.testing.assert_close(h.double(), expected.detach(), **close)
    torch.testing.assert_close(dgu.double(), gradient, **close)


def test_saturated_gates(flash_device):
    g = torch.tensor([[-1e30, -1e4, -100.0, -0.0, 0.0, 100.0, 1e4, 1e30]], device=flash_device)
    gu = torch.cat((g, torch.full_like(g, 2.0)), 1)
    h, dgu = swiglu.silu_and_mul(gu), swiglu.silu_and_mul_backward(torch.ones_like(g), gu)[0]
    closed, large = torch.zeros_like(g[0, :3]), g[0, 5:]
    torch.testing.assert_close(h[0], torch.cat((closed, closed[:2], 2 * large)))
    dg = torch.cat((closed, torch.ones_like(closed[:2]), torch.full_like(large, 2.0)))
    torch.testing.assert_close(dgu[0], torch.cat((dg, h[0] / 2)))


def test_strided_operands(flash_device, layer):
    gu = torch.randn(12, 5, device=flash_device).T
    dh = torch.ones((), device=flash_device).expand(5, 6)
    dgu, h = swiglu.silu_and_mul_backward(dh.contiguous(), gu.contiguous())
    assert_all_close(dict(enumerate(swiglu.silu_and_mul_backward(dh, gu))), {0: dgu, 1: h}, atol=0, rtol=0)
    assert torch.equal(swiglu.silu_and_mul(gu), h)
    x, dout = (torch.randn(4, 3, 16, device=flash_device).transpose(0, 1) for _ in range(2))
    assert_all_close(evaluate(layer, x, dout), evaluate(layer, x.contiguous(), dout.contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "d_ff"), [((1, 16), 24), ((2, 9, 32), 50), ((3, 2, 5, 24), 64), ((16,), 24), ((0, 16), 24)], ids=str
)
def test_values_and_gradients(flash_device, monkeypatch, shape, d_ff, dtype):
    x, dout = (torch.randn(shape, device=flash_device, dtype=dtype) for _ in range(2))
    assert_accurate(monkeypatch, dtype, SwiGLU(shape[-1], d_ff, flash_device, dtype), x, dout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast(flash_device, monkeypatch, dtype):
    """Products in bfloat16, gradients of float32 parameters in float32; x may have either dtype."""
    layer = SwiGLU(32, 50, device=flash_device)
    x, dout = (torch.randn(2, 9, 32, device=flash_device) for _ in range(2))

    def under_autocast(x):
        with torch.autocast(flash_device.type, torch.bfloat16):
            out = layer(x)
        assert out.dtype == torch.bfloat16
        return out

    assert_accurate(monkeypatch, torch.bfloat16, layer, x.to(dtype), dout.bfloat16(), under_autocast)


def test_autocast_does_not_apply_to_the_backward_pass(flash_device, layer, inputs):
    x, dout = inputs
    expected = evaluate(layer, x, dout)
    out = layer(x)
    with torch.autocast(flash_device.type, torch.bfloat16):
        out.backward(dout)
    for name, weight in weights_of(layer).items():
        assert torch.equal(weight.grad, expected[name])


def assert_gradients(layer, inputs, needed, function):
    """``function(dout, layer, x)`` computes the gradients of ``needed`` only."""
    x, dout = inputs
    expected, leaves = evaluate(layer, x, dout), {"x": x} | weights_of(layer)
    for name, each in leaves.items():
        each.requires_grad_(name in needed)
    function(dout, layer, x)
    assert all(each.grad is None for name, each in leaves.items() if name not in needed)
    assert_all_close({name: leaves[name].grad for name in needed}, {name: expected[name] for name in needed})


@pytest.mark.parametrize(
    "needed", [names for count in range(1, 5) for names in itertools.combinations(NAMES, count)], ids="-".join
)
def test_only_needed_gradients_are_computed(layer, inputs, needed):
    def backward(dout, layer, x):
        saves_x = {"w1", "w3"} & set(needed)
        assert saved_bytes(lambda: layer(x), *layer.parameters()) == 5 * (2 * 24 + (16 if saves_x else 0)) * 4
        out = layer(x)
        with FlopCounterMode(display=False) as counter:
            out.backward(dout)
        products = {"x": 2, "w1": 1, "w3": 1, "w2": 1}
        count = sum(products[name] for name in needed) + (needed != ("w2",))
        assert counter.get_total_flops() == count * 2 * 5 * 16 * 24

    assert_gradients(layer, inputs, needed, backward)


def test_saved_tensors_under_autocast(flash_device, layer, inputs):
    """x and two tensors of width d_ff, and no copies of weights."""
    with torch.autocast(flash_device.type, torch.bfloat16):
        assert saved_bytes(lambda: layer(inputs[0]), *layer.parameters()) == 5 * (2 * 24 + 16) * 2


def test_a_second_derivative_raises(layer, inputs):
    x = inputs[0].requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="SwiGLU on CUDA can be differentiated once"):
        gradient.sum().backward()


@COMPILE_WARNINGS
@pytest.mark.usefixtures("compile_afresh")
class TestCompiled:
    @pytest.mark.parametrize("autocast", [False, True])
    @pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
    def test_one_graph(self, flash_device, layer, inputs, backend, autocast):
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        with torch.autocast(flash_device.type, torch.bfloat16, enabled=autocast):
            expected, actual = evaluate(layer, *inputs), evaluate(layer, *inputs, compiled)
        close = {"rtol": 2e-2, "atol": 2e-2} if autocast else {"rtol": 1e-4, "atol": 1e-5}
        assert_all_close(actual, expected, **close)

    @pytest.mark.parametrize("autocast", [False, True])
    def test_concatenated_weights_are_not_saved(self, flash_device, layer, inputs, autocast):
        compiled = torch.compile(lambda x: layer(x), fullgraph=True, backend="aot_eager")
        with torch.autocast(flash_device.type, torch.bfloat16, enabled=autocast):
            size = saved_bytes(lambda: compiled(inputs[0]), *layer.parameters())
        itemsize = 2 if autocast else 4
        # torch 2.13 saves the cast w2; torch 2.15 casts it again in the backward pass.
        assert size - 5 * (16 + 2 * 24) * itemsize in (0, 16 * 24 * itemsize if autocast else 0)

    def test_other_lengths_do_not_recompile(self, flash_device, layer):
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
        for length in (5, 11):
            inputs = [torch.randn(2, length, 16, device=flash_device) for _ in range(2)]
            with torch.compiler.set_stance("default" if length == 5 else "fail_on_recompile"):
                actual = evaluate(layer, *inputs, compiled)
            assert_all_close(actual, evaluate(layer, *inputs))

    @pytest.mark.parametrize("frozen", [("w1", "w3"), ("w1",), ("w2",), ("x", "w1", "w3")], ids="-".join)
    def test_frozen_weights(self, layer, inputs, frozen):
        def backward(dout, layer, x):
            torch.compile(layer, fullgraph=True, backend="aot_eager")(x).backward(dout)

        assert_gradients(layer, inputs, [name for name in NAMES if name not in frozen], backward)

    def test_checkpointed(self, layer, inputs):
        def function(x):
            return checkpoint(layer, x, use_reentrant=False)

        for each in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
            assert_all_close(evaluate(layer, *inputs, each), evaluate(layer, *inputs))


class Scaled(Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class TestThePlainExpression:
    """Where a linear layer is more than a product, or the Function has no rule."""

    @pytest.fixture(autouse=True)
    def _no_function(self, monkeypatch):
        monkeypatch.delattr(swiglu, "swiglu")

    @pytest.fixture
    def x(self, inputs):
        return inputs[0]

    def test_without_gradients(self, layer, x):
        with torch.no_grad():
            assert not layer(x).requires_grad
        layer.requires_grad_(False)
        assert not layer(x).requires_grad

    def test_float64(self, layer, x):
        layer.double()
        x = x.double().requires_grad_()
        (gradient,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
        gradient.sum().backward()  # a second derivative
        with torch.autocast(x.device.type, torch.bfloat16):
            assert layer(x).dtype == torch.float64

    def test_dtypes_that_differ(self, layer, x):
        with pytest.raises(RuntimeError, match="dtype"):
            layer(x.bfloat16())

    @pytest.mark.parametrize("name", ["w1", "w2", "w3"])
    @pytest.mark.parametrize("hook", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
    def test_hooks(self, layer, x, name, hook):
        called = []
        getattr(getattr(layer, name), f"register_{hook}")(lambda *arguments: called.append(name))
        layer(x.requires_grad_()).sum().backward()
        assert called == [name]

    def test_another_module(self, layer, x):
        expected = layer.w2(F.silu(layer.w1(x)) * 2 * layer.w3(x))
        scaled = Scaled(16, 24, device=x.device)
        scaled.weight = layer.w3.weight
        layer.w3 = scaled
        torch.testing.assert_close(layer(x), expected)

    def test_tensor_subclasses(self, layer, x):
        subclass = type("Subclass", (torch.Tensor,), {})
        assert type(layer(x.as_subclass(subclass))) is subclass

    def test_transforms(self, layer, x):
        def loss(weights, rows):
            return torch.func.functional_call(layer, weights, (rows,)).sum()

        weights = {name: each.detach() for name, each in layer.named_parameters()}
        per_row = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
        assert_all_close({name: each.sum(0) for name, each in per_row.items()}, torch.func.grad(loss)(weights, x))
        assert torch.func.jvp(layer, (x,), (torch.ones_like(x),))[1].shape == x.shape

    def test_export(self, layer, x):
        exported = torch.export.export(layer, (x,)).module()
        torch.testing.assert_close(exported(x), layer.w2(F.silu(layer.w1(x)) * layer.w3(x)))

    def test_a_cpu(self):
        x = torch.randn(5, 16, requires_grad=True)
        weights = [torch.randn(shape) for shape in ((24, 16), (24, 16), (16, 24))]
        assert swiglu.can_be_fused(x, *weights)
        assert not FUSED(x, *weights)
