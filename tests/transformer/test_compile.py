"""torch.compile: the model, its loss and their gradients as one graph."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.transformer import Transformer

# What is used of torch.compile beyond its own warnings.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch"),
    pytest.mark.usefixtures("compile_afresh"),
]


def assert_compiles(model, tokens, backend, **settings):
    """The same loss and the same gradients; `fullgraph` raises where the graph would break."""
    expected = model.loss(*tokens, **settings)
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(expected, tuple(parameters.values()))
    loss = torch.compile(model, fullgraph=True, backend=backend)(tokens[0], targets=tokens[1], **settings)
    torch.testing.assert_close(loss, expected)
    compiled = torch.autograd.grad(loss, tuple(parameters.values()))
    for name, gradient, other in zip(parameters, gradients, compiled, strict=True):
        torch.testing.assert_close(other, gradient, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("impl", ["auto", "naive", "tiled", "flash"])
def test_one_graph(tiny, device, tokens, impl):
    model = Transformer(tiny(num_layers=1, attn=impl), device=device)
    assert_compiles(model, [x[:1, :8] for x in tokens], "aot_eager")


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        pytest.param({"window": 5}, {}, id="window"),
        pytest.param({"tie_embeddings": True}, {"chunk": 10}, id="tied-loss_in_chunks"),
        pytest.param({"num_layers": 2, "checkpoint_every": 1}, {}, id="checkpointed"),
    ],
)
def test_one_graph_of_other_models(tiny, device, tokens, changes, settings):
    changes = {"num_layers": 1} | changes
    every = changes.pop("checkpoint_every", None)
    model = Transformer(tiny(**changes), checkpoint_every=every, device=device)
    assert_compiles(model, tokens, "aot_eager", **settings)


def test_one_graph_under_autocast(tiny, device, tokens):
    model = Transformer(tiny(num_layers=1, attn="auto"), device=device)
    with torch.autocast(device.type, torch.bfloat16):
        expected = model(tokens[0])
        logits = torch.compile(model, fullgraph=True, backend="aot_eager")(tokens[0])
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits, expected)


def test_other_lengths_compile_nothing_anew(tiny, device, tokens):
    compiled = torch.compile(
        Transformer(tiny(num_layers=1), device=device), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for length in (5, 11):
        with torch.compiler.set_stance("default" if length == 5 else "fail_on_recompile"):
            assert compiled(tokens[0][:, :length]).shape == (3, length, 40)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"window": 5}], ids=["torch's", "tiled"])
def test_generated_code(tiny, device, tokens, changes):
    """Also for a second length, for which code is generated that takes any."""
    model = Transformer(tiny(num_layers=1, attn="auto", **changes), device=device)
    for length in (12, 9) if changes else (12,):
        assert_compiles(model, [x[:, :length] for x in tokens], "inductor")
