"""torch.compile: one graph, forward and backward, for fixed and for dynamic sizes, with and without features."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import cs336_systems.attention
from cs336_systems.attention import attention
from cs336_systems.testing import Shapes, assert_within_budget, evaluate, make_inputs

from .features import Maker
from .helpers import COMPILES, EVERY, FLOAT, HALF, assert_same, compiled_once, named, one_graph, sizes_of, slow
from .traced import CALLS, FAR_WINDOWS, AttendPacked, assert_alike, module_of, packed_tensors, tensors_for

SHAPES = Shapes.of(2, q_len=5, k_len=9, d=16, dv=8, q_heads=4, kv_heads=2)
pytestmark = COMPILES

SOME = ("causal", "rules", "by_distance", "everything")
ONE_GRAPH = [
    *[("flash", name) for name in CALLS],
    *[(impl, name) for impl in ("tiled", "naive") for name in SOME],
    # What "auto" chooses on a CPU is torch's own, and naive for what that does not compute.
    *[("auto", name) for name in ("causal", "top_left", "everything")],
]
FAST = [("flash", "slopes_and_sinks"), ("auto", "top_left")]
FAST += [("tiled", name) for name in SOME[1:]]


@pytest.mark.parametrize(
    ("impl", "name"), [pytest.param(*call, marks=[slow] * (call not in FAST)) for call in ONE_GRAPH]
)
def test_one_graph_computes_what_eager_does(impl, device, name):
    """Also where some queries see no key."""
    module, further = module_of(name, impl, device)
    lengths, dtype = (5, 3) if name == "causal" else (5, 9), HALF if impl == "flash" else FLOAT
    assert_alike(one_graph(module), module, tensors_for(*lengths, device, further, dtype=dtype))


GENERATED = [
    *[(impl, {"causal": True, "return_lse": True}, (9,)) for impl in ("flash", "tiled", "compiled")],
    # Its random numbers are computed once, and not again for each weight that they are part of.
    *[(impl, {"dropout_p": 0.3, "seed": 7}, (32,)) for impl in ("naive", "tiled", "auto")],
    # Tiled's loops over tiles are no part of the graph, so one serves all lengths from the third on.
    ("tiled", {"window": (5, 0), "return_lse": True}, (33, 47, 60)),
]


@slow
@pytest.mark.parametrize(("impl", "settings", "lengths"), GENERATED)
def test_code_generated_from_the_graph(impl, settings, lengths, device):
    """Other backends than the default one do not see what code generation takes."""
    attend = partial(attention, impl=impl, **settings)
    run = attend if impl == "compiled" else one_graph(attend, backend="inductor")  # which compiles itself
    features = {name: value for name, value in settings.items() if name not in ("causal", "return_lse")}
    for number, length in enumerate(lengths):
        inputs = make_inputs(Shapes.of(1, q_len=length, d=16, q_heads=2), device=device)
        with compiled_once(number == 2):
            results = evaluate(run, inputs)
        assert_within_budget(results, inputs, causal=settings.get("causal", False), features=features)


@pytest.mark.parametrize(("dtype", "heads", "tiled"), [(FLOAT, 2, False), (HALF, 2, True), (FLOAT, 64, True)])
def test_auto_on_a_cpu_is_naive_while_scores_are_few(dtype, heads, tiled):
    """As in eager code; 64 heads have 64 MiB of scores."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    q, k = (torch.randn(1, heads, length, 8, dtype=dtype) for length in (64, 4096))
    one_graph(partial(attention, window=(9, None)), backend=backend)(q, k, k)
    (graph,) = graphs
    assert any("tiled_forward" in str(node.target) for node in graph.graph.nodes) == tiled


FAST_DYNAMIC = [("tiled", name) for name in ("causal", *FAR_WINDOWS)]
DYNAMIC = [
    *[(impl, "causal") for impl in ("flash", "tiled", "naive")],
    *[("flash", name) for name in ("by_distance", "everything")],
    *[("auto", name) for name in ("top_left", "by_distance")],
    *[(impl, name) for impl in ("flash", "tiled") for name in FAR_WINDOWS],
    # Far sides are made near ones before an implementation sees them; naive's graph takes longest.
    ("naive", "far_sides"),
]


@pytest.mark.parametrize(
    ("impl", "name"), [pytest.param(*call, marks=[slow] * (call not in FAST_DYNAMIC)) for call in DYNAMIC]
)
def test_one_graph_for_all_sizes(impl, device, name):
    """Batch, heads and lengths vary and nothing is compiled again; also with the last query at the last key."""
    module, further = module_of(name, impl, device)
    compiled = one_graph(module, dynamic=True)
    # No two sizes are equal: torch takes sizes that are for one and the same.
    sizes = ((3, 2, 5, 10), (5, 2 if [*module.parameters(), *further] else 3, 8, 24))
    for number, (batch, kv_heads, q_len, k_len) in enumerate(sizes):
        tensors = tensors_for(q_len, k_len, device, further, batch=batch, kv_heads=kv_heads)
        with compiled_once(number):
            assert_alike(compiled, module, tensors)


@slow
def test_a_length_marked_as_dynamic(flash_device):
    attend = one_graph(partial(attention, causal=True, impl="flash"))
    for number, length in enumerate((6, 17)):
        inputs = make_inputs(Shapes.of(2, q_len=length, d=16), device=flash_device)
        for x in inputs[:3]:
            torch._dynamo.mark_dynamic(x.requires_grad_(), 1)
        with compiled_once(number):
            out = attend(*inputs[:3])
        gradients = torch.autograd.grad(out, inputs[:3], inputs.dout)
        results = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))
        assert_within_budget(results, inputs, causal=True)


@slow
@pytest.mark.parametrize("impl", EVERY)
def test_packed_sequences(impl, device):
    module, dynamic = AttendPacked(impl).to(device), None if impl == "tiled" else True
    compiled = one_graph(module, dynamic=dynamic)
    for number, lengths in enumerate(([(3, 5), (6, 8)], [(8, 11), (22, 30)], [(7, 9), (7, 3), (9, 50)])):
        with compiled_once(number if dynamic else 0):
            assert_alike(compiled, module, packed_tensors(lengths, device))


@slow
def test_the_compiled_implementation_takes_features(device):
    inputs, make = make_inputs(SHAPES, device=device), Maker(sizes_of(SHAPES), FLOAT, device)
    features = make.tensors("bias", "alibi_slopes", "sinks", "mask") | make.dropout(0.3, 7) | {"window": (6, 2)}
    results = evaluate(partial(attention, impl="compiled", return_lse=True), inputs, features)
    assert_within_budget(results, inputs, features=features)


@slow
def test_the_compiled_implementation_outlasts_the_limit_on_recompiling(device):
    """It is one function, which torch compiles anew for each combination of settings, up to a limit."""
    with torch._dynamo.config.patch(recompile_limit=1):
        for d, causal in ((4, False), (8, "top_left")):
            q = torch.randn(1, 3, d, device=device)
            expected = attention(q, q, q, causal=causal, impl="naive")
            torch.testing.assert_close(attention(q, q, q, causal=causal, impl="compiled"), expected)


@slow
def test_a_graph_draws_anew_in_each_call(flash_device):
    q = torch.randn(1, 2, 9, 16, device=flash_device)
    attend = one_graph(partial(attention, dropout_p=0.5, impl="flash"))
    assert not torch.equal(attend(q, q, q), attend(q, q, q))


@pytest.mark.parametrize("strided", named(["expanded", "transposed"], []))
def test_gradients_of_a_bias_with_any_strides(flash_device, strided):
    inputs = make_inputs(SHAPES, dtype=HALF, device=flash_device)
    bias = torch.randn(1, 4, 5, 1).expand(2, 4, 5, 9) if strided == "expanded" else torch.randn(2, 4, 9, 5).mT
    features = {"bias": bias.to(flash_device).detach().requires_grad_()}
    attend = partial(attention, impl="flash", return_lse=True)
    assert_same(evaluate(one_graph(attend), inputs, features), evaluate(attend, inputs, features))


def test_the_function_as_an_attribute_of_its_module(device):
    """The module's class is one of this library's."""
    q = torch.randn(1, 2, 5, 8, device=device)
    compiled = one_graph(lambda q: cs336_systems.attention.attention(q, q, q, causal=True))
    torch.testing.assert_close(compiled(q), attention(q, q, q, causal=True))
