"""torch.compile: one graph, forward and backward, for fixed and for dynamic sizes; the operators behind it."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cs336_systems.attention import Attention, attention
from cs336_systems.attention import ops as operators
from cs336_systems.kernels.settings import Settings
from cs336_systems.testing import (
    LAYOUTS,
    Shapes,
    assert_within_budget,
    evaluate,
    make_inputs,
)

SHAPES = Shapes.of(2, q_len=5, k_len=9, d=16, dv=8, q_heads=4, kv_heads=2)

# What is used of torch.compile beyond its own warnings.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch"),
    pytest.mark.usefixtures("compile_afresh"),
]


def compiled(backend="aot_eager", dynamic=None, **settings):
    """`attention` with these settings, as one graph."""
    return torch.compile(
        lambda q, k, v: attention(q, k, v, **settings), fullgraph=True, backend=backend, dynamic=dynamic
    )


SETTINGS = {
    "causal": {"causal": True},
    "log_sum_exp": {"causal": True, "return_lse": True},
    "scaled": {"causal": "top_left", "scale": -0.5},
}


# What "auto" chooses on a CPU is torch's own, and with the log-sum-exp tiled.
@pytest.mark.parametrize(
    ("impl", "settings"),
    [
        pytest.param(impl, SETTINGS[name], id=f"{impl}-{name}")
        for impl, names in {
            "flash": SETTINGS,
            "tiled": ["log_sum_exp"],
            "naive": ["log_sum_exp"],
            "auto": ["causal", "scaled"],
        }.items()
        for name in names
    ],
)
def test_one_graph_computes_what_eager_does(impl, device, settings):
    inputs = make_inputs(SHAPES, dtype=torch.float32 if impl == "naive" else torch.float16, device=device)
    results = evaluate(compiled(impl=impl, **settings), inputs)
    eager = evaluate(partial(attention, impl=impl, **settings), inputs)
    assert results.keys() == eager.keys()
    for name, x in eager.items():
        torch.testing.assert_close(results[name], x, msg=lambda text, name=name: f"{name}: {text}")


# What is generated for tiled is long, and slow to compile for a CPU.
TILED = pytest.param("tiled", marks=[pytest.mark.slow, pytest.mark.gpu])


@pytest.mark.parametrize("impl", ["flash", TILED, "compiled"])
def test_code_generated_from_the_graph(impl, device):
    inputs = make_inputs(SHAPES, device=device)
    settings = {"causal": True, "return_lse": True}
    if impl == "compiled":  # compiles itself, and with code of its own
        results = evaluate(partial(attention, impl=impl, **settings), inputs)
    else:
        results = evaluate(compiled("inductor", impl=impl, **settings), inputs)
    assert_within_budget(results, inputs, causal=True)


@pytest.mark.parametrize(("impl", "return_lse"), [("flash", True), ("naive", True), ("tiled", True), ("auto", False)])
def test_one_graph_for_all_sizes(impl, device, return_lse):
    """Batch, heads and lengths vary and nothing is compiled again."""
    attend = compiled(dynamic=True, causal=True, return_lse=return_lse, impl=impl)
    # No two sizes are equal: torch takes sizes that are for one and the same.
    for batch, kv_heads, q_len, k_len in ((3, 2, 5, 10), (5, 3, 8, 24)):
        shapes = Shapes.of(batch, q_len=q_len, k_len=k_len, d=16, q_heads=2 * kv_heads, kv_heads=kv_heads)
        inputs = make_inputs(shapes, dtype=torch.float32 if impl == "naive" else torch.float16, device=device)
        with torch.compiler.set_stance("default" if batch == 3 else "fail_on_recompile"):
            results = evaluate(attend, inputs)
        assert_within_budget(results, inputs, causal=True)


def test_a_length_marked_as_dynamic(flash_device):
    attend = compiled(causal=True, return_lse=True, impl="flash")
    for length in (6, 17):
        inputs = make_inputs(Shapes.of(2, q_len=length, d=16), device=flash_device)
        for x in inputs[:3]:
            torch._dynamo.mark_dynamic(x, 1)
        with torch.compiler.set_stance("default" if length == 6 else "fail_on_recompile"):
            results = evaluate_leaves(attend, inputs)
        assert_within_budget(results, inputs, causal=True)


def evaluate_leaves(attend, inputs):
    """As `evaluate`, on the tensors themselves, which may be marked."""
    for x in inputs[:3]:
        x.requires_grad_()
    out, lse = attend(*inputs[:3])
    gradients = torch.autograd.grad((out, lse), inputs[:3], (inputs.dout, inputs.dlse))
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *gradients), strict=True))


@pytest.mark.parametrize("impl", ["flash", "auto"])
def test_a_module_in_a_compiled_model(impl, device):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(16, 48)
            self.attend = Attention(causal=True, impl=impl)

        def forward(self, x):
            q, k, v = self.project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            return self.attend(q, k, v).transpose(1, 2).flatten(2)

    model = Model().to(device)
    x = torch.randn(2, 7, 16, device=device)
    (eager,) = torch.autograd.grad(model(x).square().sum(), model.project.weight)
    graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    (gradient,) = torch.autograd.grad(graph(x).square().sum(), model.project.weight)
    torch.testing.assert_close(gradient, eager)


def test_the_compiled_implementation_outlasts_the_limit_on_recompiling(device):
    """It is one function, which torch compiles anew for each combination of settings, up to a limit."""
    with torch._dynamo.config.patch(recompile_limit=1):
        for d, causal in ((4, False), (8, "top_left")):
            q = torch.randn(1, 3, d, device=device)
            expected = attention(q, q, q, causal=causal, impl="naive")
            torch.testing.assert_close(attention(q, q, q, causal=causal, impl="compiled"), expected)


FORWARD = torch.ops.cs336_systems.flash_forward.default
BACKWARD = torch.ops.cs336_systems.flash_backward.default
CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
OPERATOR_SHAPES = {
    "heads": SHAPES,
    "no_heads": Shapes.of(2, q_len=5, d=16),
    "five_axes": Shapes.of(1, 2, q_len=5, d=16, q_heads=2, kv_heads=1),
    "no_keys": Shapes.of(2, q_len=5, k_len=0, d=16),
    "no_queries": Shapes.of(2, q_len=0, k_len=5, d=16),
}
SHAPE_PARAMS = [pytest.param(shapes, id=name) for name, shapes in OPERATOR_SHAPES.items()]


def forward_arguments(inputs, causal="bottom_right"):
    return (*inputs[:3], 0.25, Settings(causal).text, [], [])


def backward_arguments(inputs, causal="bottom_right", with_dlse=True):
    out, lse = operators.flash_forward(*forward_arguments(inputs, causal))
    dlse = inputs.dlse if with_dlse else None
    return (*inputs[:3], out, lse, inputs.dout, dlse, 0.25, Settings(causal).text, [], [], [])


@pytest.mark.parametrize("shapes", SHAPE_PARAMS)
def test_the_forward_operator_is_sound(flash_device, shapes):
    inputs = make_inputs(shapes, dtype=torch.float16, device=flash_device)
    torch.library.opcheck(FORWARD, forward_arguments(inputs), test_utils=CHECKS)


@pytest.mark.parametrize("shapes", SHAPE_PARAMS)
def test_the_backward_operator_is_sound(flash_device, shapes):
    inputs = make_inputs(shapes, dtype=torch.float16, device=flash_device)
    torch.library.opcheck(BACKWARD, backward_arguments(inputs), test_utils=CHECKS)


def metadata(results):
    return [(x.shape, x.dtype, x.stride(), x.device) for x in tensors_of(results)]


def tensors_of(results):
    """Of an operator or of `attention`, in one list."""
    return [x for result in results for x in (result if isinstance(result, list) else [result])]


def test_the_operators_are_sound_in_float32_and_without_a_gradient_of_the_log_sum_exp(flash_device):
    inputs = make_inputs(Shapes.of(1, q_len=3, d=16), device=flash_device)
    torch.library.opcheck(FORWARD, forward_arguments(inputs), test_utils=CHECKS)
    torch.library.opcheck(BACKWARD, backward_arguments(inputs, with_dlse=False), test_utils=CHECKS)


LAID_OUT = [(layout, name) for layout in LAYOUTS for name in ("heads", "no_heads")]
LAID_OUT += [("contiguous", name) for name in ("five_axes", "no_keys", "no_queries")]


@pytest.mark.parametrize(("layout", "name"), LAID_OUT)
def test_fake_results_look_like_real_ones(flash_device, layout, name):
    """Shape, dtype and strides: compiled code addresses the real ones by what the fake ones said."""
    shapes = OPERATOR_SHAPES[name]
    if layout == "packed":
        shapes = shapes._replace(k=(*shapes.k[:-2], *shapes.q[-2:]), v=(*shapes.v[:-2], shapes.q[-2], shapes.v[-1]))
    inputs = make_inputs(shapes, dtype=torch.float16, device=flash_device, layout=layout)
    for operator, arguments in ((FORWARD, forward_arguments(inputs)), (BACKWARD, backward_arguments(inputs))):
        with FakeTensorMode(allow_non_fake_inputs=False) as mode:
            fake = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments]
            fake_results = operator(*fake)
        assert metadata(fake_results) == metadata(operator(*arguments))


def test_fake_tensors_go_through_attention(flash_device):
    inputs = make_inputs(SHAPES, dtype=torch.float16, device=flash_device)
    real = attention(*inputs[:3], impl="flash", return_lse=True)
    with FakeTensorMode() as mode:
        fake = attention(*[mode.from_tensor(x) for x in inputs[:3]], impl="flash", return_lse=True)
    assert metadata(fake) == metadata(real)


def test_operators_agree_with_the_functions_they_stand_for(flash_device):
    """`ops.flash_forward` skips the dispatcher where it may."""
    inputs = make_inputs(SHAPES, dtype=torch.float16, device=flash_device)
    for direct, operator, arguments in (
        (operators.flash_forward, FORWARD, forward_arguments(inputs)),
        (operators.flash_backward, BACKWARD, backward_arguments(inputs)),
    ):
        for x, y in zip(tensors_of(direct(*arguments)), tensors_of(operator(*arguments)), strict=True):
            assert torch.equal(x, y)


def test_modes_and_subclasses_see_the_operators(flash_device):
    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    seen: list[object] = []
    inputs = make_inputs(SHAPES, dtype=torch.float16, device=flash_device)
    with Record():
        evaluate(partial(attention, impl="flash"), inputs)
    assert FORWARD in seen
    assert BACKWARD in seen


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_vmap_over_a_batch_of_calls(flash_device):
    inputs = make_inputs(Shapes.of(3, 2, q_len=5, d=16), device=flash_device)
    out = torch.vmap(partial(attention, impl="flash"))(*inputs[:3])
    expected = torch.stack([attention(*[x[i] for x in inputs[:3]], impl="flash") for i in range(3)])
    torch.testing.assert_close(out, expected)


def test_rows_that_see_nothing_stay_so_in_a_graph(flash_device):
    inputs = make_inputs(Shapes.of(1, q_len=5, k_len=2, d=16), device=flash_device)
    results = evaluate(compiled(causal=True, return_lse=True, impl="flash"), inputs)
    assert (results["lse"][:, :3] == -math.inf).all()
    assert_within_budget(results, inputs, causal=True)
