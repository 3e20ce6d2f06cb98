"""torch.compile, operators, vmap and autocast of calls with windows, caps, biases, masks, rules, sinks and dropout."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cs336_systems.attention import attention
from cs336_systems.attention import ops as operators
from cs336_systems.attention.features import Features, assemble
from cs336_systems.attention.rules import score_rule
from cs336_systems.attention.sizes import Sizes
from cs336_systems.attention.spec import AttentionSpec, Causal
from cs336_systems.attention.variants import document, prefix, relative_bias
from cs336_systems.attention.variants import window as window_rule
from cs336_systems.kernels.language import at, tanh, tl
from cs336_systems.testing import Shapes, assert_within_budget, evaluate, make_inputs

SHAPES = Shapes.of(2, q_len=5, k_len=9, d=16, dv=8, q_heads=4, kv_heads=2)

# What is used of torch.compile beyond its own warnings.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning:torch",
        "ignore::FutureWarning:torch",
        "ignore:The .grad attribute of a Tensor:UserWarning",  # torch hides it, where warnings are no errors
    ),
    pytest.mark.usefixtures("compile_afresh"),
]


@score_rule(steepest=2.0)
def bent(score, batch, head, row, column, rates):
    return score + tanh(score) * at(rates, (batch, head))


@bent.derivative
def _(score, batch, head, row, column, rates):
    bend = tanh(score)
    return 1.0 + (1.0 - bend * bend) * at(rates, (batch, head))


@bent.gradient("rates", axes="batch head")
def _(score, batch, head, row, column, rates):
    return tanh(score)


def parameters(device, dtype=torch.float32, batch=2, q_len=5, k_len=9, heads=4):
    """Tensors for features, as arguments of what is compiled."""
    return {
        "bias": torch.randn(heads, q_len, k_len, device=device, dtype=dtype).requires_grad_(),
        "alibi_slopes": torch.rand(heads, device=device, dtype=dtype).requires_grad_(),
        "sinks": torch.randn(heads, device=device, dtype=dtype).requires_grad_(),
        "mask": torch.rand(batch, 1, 1, k_len, device=device) < 0.7,
    }


FEATURES = {
    "cap_and_slopes": (["alibi_slopes"], {"softcap": 1.5, "causal": True}),
    "bias_and_mask": (["bias", "mask"], {}),
    "everything": (
        ["bias", "alibi_slopes", "sinks", "mask"],
        {"window": (6, 2), "softcap": 1.5, "dropout_p": 0.3, "seed": 7},
    ),
}


def compiled(dynamic=None, **settings):
    """`attention` with these settings, as one graph."""
    return torch.compile(partial(attention, **settings), fullgraph=True, backend="aot_eager", dynamic=dynamic)


def assert_same(results, expected):
    assert results.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(results[name], x, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    ("impl", "name"), [*[("flash", name) for name in FEATURES], ("tiled", "everything"), ("naive", "everything")]
)
def test_one_graph_computes_what_eager_does(impl, device, name):
    names, settings = FEATURES[name]
    settings = settings | {"impl": impl, "return_lse": True}
    inputs, tensors = make_inputs(SHAPES, device=device), parameters(device)
    features = {name: tensors[name] for name in names}
    results = evaluate(compiled(**settings), inputs, features)
    assert_same(results, evaluate(partial(attention, **settings), inputs, features))


@pytest.mark.parametrize("impl", ["flash", "tiled", "naive"])
def test_rules_made_in_a_graph(impl, device):
    """Of tensors and numbers that come into it."""

    def attend(q, k, v, rates, ids, lengths, before):
        mask = document(ids[:, : q.shape[-2]], ids) | prefix(lengths) & window_rule(before, 1)
        return attention(q, k, v, mask=mask, scores=bent(rates) + bent(rates), impl=impl, return_lse=True)

    inputs = make_inputs(SHAPES, device=device)
    ids = torch.tensor([[0] * 4 + [1] * 5, [2] * 9], device=device)
    lengths = torch.tensor([3, 0], device=device)
    results = []
    for run in (torch.compile(attend, fullgraph=True, backend="aot_eager"), attend):
        rates = torch.rand(2, 4, device=device, generator=torch.Generator(device).manual_seed(1)).requires_grad_()
        features = {"rates": rates, "ids": ids, "lengths": lengths, "before": 2}
        results.append(evaluate(run, inputs, features))
    assert_same(*results)


@pytest.mark.parametrize("impl", ["flash", "naive"])
def test_masks_are_inverted_in_a_graph(impl, device):
    """By a name: torch.compile traces no ~ of a class."""

    def attend(q, k, v, ids, lengths):
        mask = document(ids[:, : q.shape[-2]], ids).inverted() & (prefix(lengths) | window_rule(1, 1)).inverted()
        return attention(q, k, v, mask=mask, impl=impl, return_lse=True)

    inputs = make_inputs(SHAPES, device=device)
    ids = torch.tensor([[0] * 4 + [1] * 5, [2] * 3 + [3] * 6], device=device)
    lengths = torch.tensor([3, 0], device=device)
    expected = ~document(ids[:, :5], ids) & ~(prefix(lengths) | window_rule(1, 1))
    results = evaluate(
        torch.compile(attend, fullgraph=True, backend="aot_eager"), inputs, {"ids": ids, "lengths": lengths}
    )
    assert_same(results, evaluate(partial(attention, mask=expected, impl=impl, return_lse=True), inputs))


@score_rule
def clipped(score, batch, head, row, column, rates, reach):
    return score * at(rates, (head, tl.minimum(tl.maximum(column - row, -reach), reach) + reach))


@pytest.mark.parametrize(("impl", "dynamic"), [("flash", None), ("tiled", None), ("naive", None), ("flash", True)])
def test_biases_by_distance_in_a_graph(impl, device, dynamic):
    """Made of buckets there; with dynamic sizes one graph serves all lengths."""

    def attend(q, k, v, weights):
        distances = torch.arange(1 - q.shape[-2], k.shape[-2], device=q.device)
        scores = relative_bias(weights[:, distances.clamp(-3, 3) + 3], q.shape[-2] - 1)
        return attention(q, k, v, causal=True, scores=scores, impl=impl, return_lse=True)

    run = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for number, (batch, q_len, k_len) in enumerate(((3, 5, 10), (5, 8, 24))[: 2 if dynamic else 1]):
        inputs = make_inputs(Shapes.of(batch, q_len=q_len, k_len=k_len, d=16, q_heads=4, kv_heads=2), device=device)
        weights = torch.randn(4, 7, device=device).requires_grad_()
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            results = evaluate(run, inputs, {"weights": weights})
        assert_same(results, evaluate(attend, inputs, {"weights": weights}))


@pytest.mark.parametrize("impl", ["tiled", "naive"])
def test_rules_without_derivatives_in_a_graph(impl, device):
    def attend(q, k, v, rates):
        return attention(q, k, v, scores=clipped(rates, 3), impl=impl, return_lse=True)

    inputs, rates = make_inputs(SHAPES, device=device), torch.randn(4, 7, device=device).requires_grad_()
    run = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert_same(*[evaluate(one, inputs, {"rates": rates}) for one in (run, attend)])


def test_the_compiled_implementation_takes_features(device):
    inputs, tensors = make_inputs(SHAPES, device=device), parameters(device)
    attend = partial(attention, impl="compiled", return_lse=True)
    features = tensors | {"window": (6, 2), "softcap": 1.5, "dropout_p": 0.3, "seed": 7}
    assert_within_budget(evaluate(attend, inputs, features), inputs, features=features)


@pytest.mark.parametrize(("impl", "window"), [("flash", (6, None)), ("flash", None)])
def test_one_graph_for_all_lengths(impl, device, window):
    """Also with the last query aligned with the last key, where rules hold the difference of lengths."""
    settings = {"causal": True, "window": window, "softcap": 2.0}
    attend = compiled(dynamic=True, impl=impl, return_lse=True, **settings)
    # No two sizes are equal: torch takes sizes that are for one and the same.
    for batch, q_len, k_len in ((3, 5, 10), (5, 8, 24)):
        shapes = Shapes.of(batch, q_len=q_len, k_len=k_len, d=16, q_heads=4, kv_heads=2)
        inputs = make_inputs(shapes, device=device)
        tensors = parameters(device, batch=batch, q_len=q_len, k_len=k_len)
        with torch.compiler.set_stance("default" if batch == 3 else "fail_on_recompile"):
            results = evaluate(attend, inputs, tensors)
        asked = {name: value for name, value in settings.items() if name != "causal"}
        assert_within_budget(results, inputs, causal=True, features=tensors | asked)


def test_a_graph_draws_anew_in_each_call(flash_device):
    q = torch.randn(1, 2, 9, 16, device=flash_device)
    attend = compiled(dropout_p=0.5, impl="flash")
    first, second = attend(q, q, q), attend(q, q, q)
    assert not torch.equal(first, second)


FORWARD = torch.ops.cs336_systems.flash_forward.default
BACKWARD = torch.ops.cs336_systems.flash_backward.default
CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


def operator_arguments(inputs):
    """Of both operators, with an extra of each kind; wanted are sinks, slopes, bias and rates."""
    device, dtype = inputs.q.device, inputs.q.dtype
    tensors = parameters(device, dtype)
    rates = torch.rand(2, 4, device=device, dtype=dtype)
    features = Features(**tensors, softcap=2.0, scores=bent(rates), dropout_p=0.25, seed=5)
    with torch.no_grad():
        made = assemble(features, Sizes((2,), 4, 5, 9), "bottom_right", (7, None), device)
    spec = AttentionSpec(Causal.BOTTOM_RIGHT, 0.25, (7, None), made.mask, made.scores, made.sinks, made.dropout)
    _, *settings = spec.operands
    varied = (0.25, *settings, [x.detach() for x in made.extras])
    out, lse = operators.flash_forward(*inputs[:3], *varied)
    wanted = [0, 3, 4, 5]
    assert len(made.extras) == 6
    return (*inputs[:3], *varied), (*inputs[:3], out, lse, inputs.dout, inputs.dlse, *varied, wanted)


def test_the_operators_are_sound_with_extras(flash_device):
    inputs = make_inputs(SHAPES, dtype=torch.float16, device=flash_device)
    forward, backward = operator_arguments(inputs)
    torch.library.opcheck(FORWARD, forward, test_utils=CHECKS)
    torch.library.opcheck(BACKWARD, backward, test_utils=CHECKS)


def flat(results):
    return [x for result in results for x in (result if isinstance(result, list) else [result])]


def fake_of(mode, argument):
    if isinstance(argument, list):
        return [fake_of(mode, item) for item in argument]
    return mode.from_tensor(argument) if isinstance(argument, torch.Tensor) else argument


def test_fake_results_look_like_real_ones(flash_device):
    """Shape, dtype and strides: compiled code addresses the real ones by what the fake ones said."""
    inputs = make_inputs(SHAPES, dtype=torch.float16, device=flash_device, layout="length_before_heads")
    for operator, arguments in zip((FORWARD, BACKWARD), operator_arguments(inputs), strict=True):
        with FakeTensorMode(allow_non_fake_inputs=False) as mode:
            fake = operator(*[fake_of(mode, argument) for argument in arguments])
        looks = [[(x.shape, x.dtype, x.stride()) for x in flat(results)] for results in (fake, operator(*arguments))]
        assert looks[0] == looks[1]


@pytest.mark.parametrize("strided", ["expanded", "transposed"])
def test_fake_gradients_of_a_bias_look_like_real_ones(flash_device, strided):
    inputs = make_inputs(SHAPES, dtype=torch.float16, device=flash_device)
    bias = torch.randn(1, 4, 5, 1).expand(2, 4, 5, 9) if strided == "expanded" else torch.randn(2, 4, 9, 5).mT
    bias = bias.to(flash_device)
    features = {"bias": bias.detach().requires_grad_()}
    attend = partial(attention, impl="flash", return_lse=True)
    assert_same(
        evaluate(torch.compile(attend, fullgraph=True, backend="aot_eager"), inputs, features),
        evaluate(attend, inputs, features),
    )


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", [None, *FEATURES])
@pytest.mark.parametrize("impl", ["flash", "tiled", "naive"])
def test_vmap_over_calls(impl, device, name):
    names, settings = ([], {}) if name is None else FEATURES[name]
    attend = partial(attention, impl=impl, return_lse=True, **settings)
    inputs = make_inputs(Shapes.of(3, 2, q_len=5, k_len=9, d=16, q_heads=4, kv_heads=2), device=device)
    made = [{name: x.detach() for name, x in parameters(device).items() if name in names} for _ in range(3)]
    stacked = {key: torch.stack([one[key] for one in made]) for key in names}
    results = torch.vmap(lambda q, k, v, tensors: attend(q, k, v, **tensors))(*inputs[:3], stacked)
    calls = [attend(*[x[i] for x in inputs[:3]], **made[i]) for i in range(3)]
    for result, parts in zip(results, zip(*calls, strict=True), strict=True):
        torch.testing.assert_close(result, torch.stack(parts))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", [None, "bias_and_mask"])
def test_vmap_over_some_arguments(flash_device, name):
    tensors = {key: x.detach() for key, x in parameters(flash_device).items() if name and key in FEATURES[name][0]}
    inputs = make_inputs(Shapes.of(3, 2, q_len=5, k_len=9, d=16, q_heads=4, kv_heads=2), device=flash_device)
    q, k, v = inputs.q, inputs.k[0], inputs.v.movedim(0, 2)
    attend = partial(attention, impl="flash", **tensors)
    out = torch.vmap(attend, in_dims=(0, None, 2))(q, k, v)
    torch.testing.assert_close(out, torch.stack([attend(q[i], k, v[:, :, i]) for i in range(3)]))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_vmap_over_the_backward(flash_device):
    batches = [make_inputs(SHAPES, dtype=torch.float16, device=flash_device) for _ in range(2)]
    calls = [operator_arguments(inputs)[1] for inputs in batches]
    tensors = [torch.stack(parts) for parts in zip(*[call[:7] for call in calls], strict=True)]
    scale, settings, numbers, extras, wanted = calls[0][7:]
    stacked = [torch.stack([x, x]) for x in extras]

    def backward(q, k, v, out, lse, dout, dlse, extras):
        return BACKWARD(q, k, v, out, lse, dout, dlse, scale, settings, numbers, extras, wanted)

    results = torch.vmap(backward)(*tensors, stacked)
    expected = [flat(BACKWARD(*call[:7], scale, settings, numbers, extras, wanted)) for call in calls]
    for result, parts in zip(flat(results), zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(result, torch.stack(parts))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("impl", ["flash", "tiled", "naive"])
def test_gradients_by_torch_func(impl, device):
    """`torch.func.grad` gives what autograd gives, and vmap of it the gradients of each call."""
    inputs = make_inputs(Shapes.of(3, 2, q_len=5, k_len=9, d=16, q_heads=4, kv_heads=2), device=device)

    def loss(q, k, v, dout):
        return (attention(q, k, v, causal=True, impl=impl) * dout).sum()

    gradients = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(inputs.q, inputs.k, inputs.v, inputs.dout)
    for i in range(3):
        tensors = [x[i].detach().requires_grad_() for x in inputs[:3]]
        expected = torch.autograd.grad(loss(*tensors, inputs.dout[i]), tensors)
        for gradient, x in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient[i], x)


@pytest.mark.parametrize("impl", ["flash", "tiled", "naive"])
def test_autocast_leaves_parameters_in_their_dtype(impl, device):
    """Only q, k and v are cast; gradients come in the dtype that each tensor has."""
    inputs, tensors = make_inputs(SHAPES, device=device), parameters(device)
    half = inputs.to(torch.float16)._replace(dlse=inputs.dlse)
    attend = partial(attention, impl=impl, softcap=2.0, return_lse=True)

    def under_autocast(q, k, v, **features):
        with torch.autocast(device.type, torch.float16):
            return attend(q, k, v, **features)

    results = evaluate(under_autocast, inputs._replace(dout=half.dout), tensors)
    expected = evaluate(attend, half, tensors)
    assert {name: x.dtype for name, x in results.items()} == {
        name: torch.float16 if name == "out" else torch.float32 for name in results
    }
    for name, x in results.items():
        torch.testing.assert_close(x, expected[name].to(x.dtype))
