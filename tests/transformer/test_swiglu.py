"""SwiGLU by its kernels: against the plain expression in float64, in what it keeps, and where it is not taken."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.profiling.saved import activation_bytes, saved_tensors
from cs336_systems.testing import compare
from cs336_systems.transformer import Linear, SwiGLU, swiglu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAMES = ("x", "w1", "w3", "w2")
FUSED = swiglu.fused


@pytest.fixture(autouse=True)
def by_kernels(monkeypatch):
    """Where kernels are interpreted the CPU counts as a GPU."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(swiglu, "fused", swiglu.can_be_fused)


@pytest.fixture
def plainly(monkeypatch):
    """Calls a function while SwiGLU is the plain expression."""

    def call(function, *arguments, **settings):
        with monkeypatch.context() as patched:
            patched.setattr(swiglu, "fused", lambda *tensors: False)
            return function(*arguments, **settings)

    return call


def weights_of(layer):
    return {"w1": layer.w1.weight, "w3": layer.w3.weight, "w2": layer.w2.weight}


def in_dtype(layer, dtype):
    copy = SwiGLU(layer.w1.weight.shape[1], layer.w1.weight.shape[0], layer.w1.weight.device, dtype)
    copy.load_state_dict(layer.state_dict())
    return copy


def results_of(layer, x, dout, function=None):
    """The output and the gradients of x and the weights."""
    x = x.detach().requires_grad_()
    out = layer(x) if function is None else function(x)
    inputs = {"x": x} | weights_of(layer)
    gradients = torch.autograd.grad(out, list(inputs.values()), dout.to(out.dtype))
    return {"out": out.detach(), **dict(zip(inputs, gradients, strict=True))}


def terms_of(layer, x, dout):
    """Of each result the root of the sum of the squares of what is added up to make it, in float64."""
    w1, w3, w2 = (weight.detach().double() for weight in weights_of(layer).values())
    rows, dy = x.double().flatten(0, -2), dout.double().flatten(0, -2)
    g, u = (rows @ w1.T).requires_grad_(), (rows @ w3.T).requires_grad_()
    h = F.silu(g) * u
    dg, du = torch.autograd.grad(h, (g, u), dy @ w2)
    h = h.detach()
    squares = {
        "out": (h.square() @ w2.square().T).view(x.shape),
        "x": (dg.square() @ w1.square() + du.square() @ w3.square()).view(x.shape),
        "w1": dg.square().T @ rows.square(),
        "w3": du.square().T @ rows.square(),
        "w2": dy.square().T @ h.square(),
    }
    # Twice, because what is multiplied here comes from products whose terms were rounded too.
    return {name: 2 * each.sqrt() for name, each in squares.items()}


def assert_within_budget(actual, exact, plain, terms):
    beyond = [finding for finding in compare(actual, exact, plain, terms) if not finding.holds]
    assert not beyond, "\n".join(map(str, beyond))


def inputs_of(shape, device, dtype=torch.float32):
    return torch.randn(shape, device=device, dtype=dtype), torch.randn(shape, device=device, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "d_ff"), [(1, 1), (3, 50), (37, 16), (5, 1024), (2, 1365), (3, 2064), (0, 8)])
def test_kernels(flash_device, rows, d_ff, dtype):
    gu = (3 * torch.randn(rows, 2 * d_ff, device=flash_device)).to(dtype)
    dh = torch.randn(rows, d_ff, device=flash_device).to(dtype)
    wide = gu.double().requires_grad_()
    g, u = wide.chunk(2, -1)
    expected = F.silu(g) * u
    (gradient,) = torch.autograd.grad(expected, wide, dh.double())
    # Rounded once, from float32.
    close = {"rtol": torch.finfo(dtype).eps / 2 + 2e-6, "atol": 1e-5}
    dgu, again = swiglu.gated_backward(dh, gu)
    assert dgu.dtype == again.dtype == dtype
    for h in (swiglu.gated(gu), again):
        torch.testing.assert_close(h.double(), expected.detach(), **close)
    torch.testing.assert_close(dgu.double(), gradient, **close)


def test_gates_that_are_open_or_shut(flash_device):
    g = torch.tensor([[-1e30, -1e4, -100.0, -0.0, 0.0, 100.0, 1e4, 1e30]], device=flash_device)
    gu = torch.cat((g, torch.full_like(g, 2.0)), 1)
    h, dgu = swiglu.gated(gu), swiglu.gated_backward(torch.ones_like(g), gu)[0]
    shut, open_ = torch.zeros_like(g[0, :3]), g[0, 5:]
    torch.testing.assert_close(h[0], torch.cat((shut, shut[:2], 2 * open_)))
    slopes = torch.cat((shut, torch.ones_like(shut[:2]), torch.full_like(open_, 2.0)))
    torch.testing.assert_close(dgu[0], torch.cat((slopes, h[0] / 2)))


def test_operands_need_not_be_contiguous(flash_device):
    gu = torch.randn(12, 5, device=flash_device).T
    dh = torch.ones((), device=flash_device).expand(5, 6)
    expected = swiglu.gated_backward(dh.contiguous(), gu.contiguous())
    for result, other in zip(swiglu.gated_backward(dh, gu), expected, strict=True):
        assert torch.equal(result, other)
    assert torch.equal(swiglu.gated(gu), expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "d_ff"), [((1, 16), 24), ((2, 9, 32), 50), ((3, 2, 5, 24), 64), ((16,), 24), ((0, 16), 24)], ids=str
)
def test_values_and_gradients(flash_device, plainly, shape, d_ff, dtype):
    exact_layer = SwiGLU(shape[-1], d_ff, device=flash_device).to(dtype).double()
    layer = in_dtype(exact_layer, dtype)
    x, dout = inputs_of(shape, flash_device, dtype)
    actual, plain = results_of(layer, x, dout), plainly(results_of, layer, x, dout)
    exact = results_of(exact_layer, x.double(), dout.double())
    assert {name: each.shape for name, each in actual.items()} == {name: each.shape for name, each in plain.items()}
    if x.numel():
        rows = (each.view(-1, shape[-1]) for each in (x, dout))
        terms = terms_of(exact_layer, *rows)
        terms |= {name: terms[name].view(shape) for name in ("out", "x")}
        assert_within_budget(actual, exact, plain, terms)


def test_x_need_not_be_contiguous(flash_device):
    layer = SwiGLU(16, 24, device=flash_device)
    x, dout = (each.transpose(0, 1) for each in inputs_of((3, 4, 16), flash_device))
    expected = results_of(layer, x.contiguous(), dout.contiguous())
    for name, each in results_of(layer, x, dout).items():
        torch.testing.assert_close(each, expected[name])


@pytest.mark.parametrize("wide", [True, False])
def test_under_autocast(flash_device, plainly, wide):
    """Products in bfloat16, gradients of float32 parameters in float32; x may come in either."""
    layer = SwiGLU(32, 50, device=flash_device)
    x, dout = inputs_of((2, 9, 32), flash_device)
    x = x if wide else x.bfloat16()

    def under_autocast(x):
        with torch.autocast(flash_device.type, torch.bfloat16):
            return layer(x)

    actual, plain = (call(results_of, layer, x, dout.bfloat16(), under_autocast) for call in (_called, plainly))
    assert actual["out"].dtype == torch.bfloat16
    assert actual["w1"].dtype == torch.float32
    assert actual["x"].dtype == x.dtype
    actual, plain = ({name: each.bfloat16() for name, each in found.items()} for found in (actual, plain))
    exact_layer = in_dtype(layer, torch.float64)
    exact = results_of(exact_layer, x.double(), dout.bfloat16().double())
    assert_within_budget(actual, exact, plain, terms_of(layer, x, dout))


def _called(function, *arguments):
    return function(*arguments)


def test_autocast_around_the_backward_pass_changes_nothing(flash_device):
    layer = SwiGLU(16, 24, device=flash_device)
    x, dout = inputs_of((5, 16), flash_device)
    expected = results_of(layer, x, dout)
    out = layer(x)
    with torch.autocast(flash_device.type, torch.bfloat16):
        out.backward(dout)
    assert torch.equal(layer.w1.weight.grad, expected["w1"])
    assert torch.equal(layer.w2.weight.grad, expected["w2"])


SOME = [names for count in range(1, 5) for names in itertools.combinations(NAMES, count)]


@pytest.mark.parametrize("wanted", SOME, ids="-".join)
def test_what_needs_no_gradient_costs_none(flash_device, wanted):
    layer = SwiGLU(16, 24, device=flash_device)
    x, dout = inputs_of((5, 16), flash_device)
    expected = results_of(layer, x, dout)
    inputs = {"x": x} | weights_of(layer)
    for name, each in inputs.items():
        each.requires_grad_(name in wanted)
    saved = saved_tensors(lambda: layer(x), layer, [x])
    assert sum(each.bytes for each in saved) == 5 * 2 * 24 * 4
    out = layer(x)
    with FlopCounterMode(display=False) as counter:
        out.backward(dout)
    products = {"x": 2, "w1": 1, "w3": 1, "w2": 1}
    count = sum(products[name] for name in wanted) + (wanted != ("w2",))
    assert counter.get_total_flops() == count * 2 * 5 * 16 * 24
    for name, each in inputs.items():
        if name in wanted:
            torch.testing.assert_close(each.grad, expected[name])
        else:
            assert each.grad is None


@pytest.mark.parametrize("autocast", [False, True])
def test_what_autograd_keeps(flash_device, autocast):
    layer = SwiGLU(32, 80, device=flash_device)
    x = torch.randn(6, 32, device=flash_device)

    def forward():
        with torch.autocast(flash_device.type, torch.bfloat16, enabled=autocast):
            return layer(x)

    saved = saved_tensors(forward, layer)
    assert activation_bytes(saved) == 6 * (2 * 80 + 32) * (2 if autocast else 4)
    assert sum(each.bytes for each in saved) == activation_bytes(saved)  # no copies of weights


@pytest.mark.usefixtures("compile_afresh")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch")
class TestCompiled:
    @pytest.mark.parametrize("autocast", [False, True])
    @pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
    def test_one_graph(self, flash_device, backend, autocast):
        layer = SwiGLU(16, 24, device=flash_device)
        x, dout = inputs_of((2, 3, 16), flash_device)
        compiled = torch.compile(layer, fullgraph=True, backend=backend)

        def call(function):
            with torch.autocast(flash_device.type, torch.bfloat16, enabled=autocast):
                return results_of(layer, x, dout, function)

        expected, actual = call(layer), call(compiled)
        close = {"rtol": 2e-2, "atol": 2e-2} if autocast else {"rtol": 1e-4, "atol": 1e-5}
        for name, each in actual.items():
            torch.testing.assert_close(each, expected[name], **close)

    @pytest.mark.parametrize("autocast", [False, True])
    def test_nothing_that_is_made_of_w1_and_w3_is_kept(self, flash_device, autocast):
        layer = SwiGLU(16, 24, device=flash_device)
        x = torch.randn(2, 16, device=flash_device)

        @torch.compile(fullgraph=True, backend="aot_eager")
        def compiled(x):
            return layer(x)

        def forward():
            with torch.autocast(flash_device.type, torch.bfloat16, enabled=autocast):
                return compiled(x)

        width = 2 if autocast else 4
        of_w2 = 16 * 24 * width if autocast else 0
        known = [weight.data_ptr() for weight in layer.parameters()]
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
            forward()
        sizes = {each.data_ptr(): each.untyped_storage().nbytes() for each in saved}
        kept = sum(size for address, size in sizes.items() if address not in known)
        # torch 2.13 keeps the cast w2; torch 2.15 casts it again in the backward pass.
        assert kept - 2 * (16 + 2 * 24) * width in (0, of_w2)

    def test_other_lengths_compile_nothing_anew(self, flash_device):
        layer = SwiGLU(16, 24, device=flash_device)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
        for length in (5, 11):
            x, dout = inputs_of((2, length, 16), flash_device)
            with torch.compiler.set_stance("default" if length == 5 else "fail_on_recompile"):
                actual = results_of(layer, x, dout, compiled)
            for name, each in results_of(layer, x, dout).items():
                torch.testing.assert_close(actual[name], each)

    @pytest.mark.parametrize("frozen", [("w1", "w3"), ("w1",), ("w2",), ("x", "w1", "w3")], ids="-".join)
    def test_what_is_frozen(self, flash_device, frozen):
        layer = SwiGLU(16, 24, device=flash_device)
        x, dout = inputs_of((5, 16), flash_device)
        expected = results_of(layer, x, dout)
        inputs = {"x": x} | weights_of(layer)
        for name, each in inputs.items():
            each.requires_grad_(name not in frozen)
        torch.compile(layer, fullgraph=True, backend="aot_eager")(x).backward(dout)
        for name, each in inputs.items():
            if name in frozen:
                assert each.grad is None
            else:
                torch.testing.assert_close(each.grad, expected[name])

    def test_checkpointed(self, flash_device):
        layer = SwiGLU(16, 24, device=flash_device)
        x, dout = inputs_of((5, 16), flash_device)

        @torch.compile(fullgraph=True, backend="aot_eager")
        def compiled(x):
            return checkpoint(layer, x, use_reentrant=False)

        actual = results_of(layer, x, dout, compiled)
        for name, each in results_of(layer, x, dout).items():
            torch.testing.assert_close(actual[name], each)


def test_checkpointed(flash_device):
    layer = SwiGLU(16, 24, device=flash_device)
    x, dout = inputs_of((5, 16), flash_device)
    actual = results_of(layer, x, dout, lambda x: checkpoint(layer, x, use_reentrant=False))
    for name, each in results_of(layer, x, dout).items():
        assert torch.equal(actual[name], each), name


def test_a_second_derivative_is_refused(flash_device):
    layer = SwiGLU(16, 24, device=flash_device)
    x = torch.randn(5, 16, device=flash_device, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="SwiGLU on CUDA can be differentiated once"):
        gradient.sum().backward()


class Scaled(Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class TestThePlainExpression:
    """Where something else than a product happens, or the Function has no rules."""

    @pytest.fixture
    def refused(self, monkeypatch):
        def refuse(*arguments):
            raise AssertionError("the Function was called")

        monkeypatch.setattr(swiglu, "swiglu", refuse)

    @pytest.fixture
    def layer(self, flash_device):
        return SwiGLU(16, 24, device=flash_device)

    @pytest.fixture
    def x(self, flash_device):
        return torch.randn(5, 16, device=flash_device)

    @pytest.mark.usefixtures("refused")
    def test_without_gradients(self, layer, x):
        with torch.no_grad():
            assert not layer(x).requires_grad
        layer.requires_grad_(False)
        assert not layer(x).requires_grad

    @pytest.mark.usefixtures("refused")
    def test_in_float64(self, layer, x):
        layer.double()
        x = x.double().requires_grad_()
        (gradient,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
        gradient.sum().backward()  # twice
        with torch.autocast(x.device.type, torch.bfloat16):
            assert layer(x).dtype == torch.float64

    @pytest.mark.usefixtures("refused")
    @pytest.mark.parametrize("name", ["w1", "w2", "w3"])
    @pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
    def test_hooks_are_called(self, layer, x, name, kind):
        called = []
        getattr(getattr(layer, name), f"register_{kind}")(lambda *arguments: called.append(name))
        layer(x.requires_grad_()).sum().backward()
        assert called == [name]

    @pytest.mark.usefixtures("refused")
    def test_another_linear_is_called(self, layer, x):
        expected = layer.w2(F.silu(layer.w1(x)) * 2 * layer.w3(x))
        scaled = Scaled(16, 24, device=x.device)
        scaled.weight = layer.w3.weight
        layer.w3 = scaled
        torch.testing.assert_close(layer(x), expected)

    @pytest.mark.usefixtures("refused")
    def test_subclasses_of_tensors(self, layer, x):
        class Own(torch.Tensor):
            pass

        assert type(layer(x.as_subclass(Own))) is Own

    @pytest.mark.usefixtures("refused")
    def test_transforms_of_functions(self, layer, x):
        def loss(weights, rows):
            return torch.func.functional_call(layer, weights, (rows,)).sum()

        weights = {name: each.detach() for name, each in layer.named_parameters()}
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
        whole = torch.func.grad(loss)(weights, x)
        torch.testing.assert_close(each["w1.weight"].sum(0), whole["w1.weight"])
        assert torch.func.jvp(layer, (x,), (torch.ones_like(x),))[1].shape == x.shape

    def test_dtypes_that_do_not_fit_are_refused_as_ever(self, layer, x):
        with pytest.raises(RuntimeError, match="dtype"):
            layer(x.bfloat16())


def test_on_a_cpu_it_is_the_plain_expression():
    x = torch.randn(5, 16, requires_grad=True)
    weights = [torch.randn(shape) for shape in ((24, 16), (24, 16), (16, 24))]
    assert swiglu.can_be_fused(x, *weights)
    assert not FUSED(x, *weights)
