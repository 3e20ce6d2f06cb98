"""torch.compile: the model, its loss and their gradients as one graph."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.transformer import Transformer

from .conftest import COMPILE_WARNINGS, assert_all_close, gradients

pytestmark = [COMPILE_WARNINGS, pytest.mark.usefixtures("compile_afresh")]


def assert_compiles(model, tokens, backend="aot_eager", **options):
    """The same loss and gradients; `fullgraph` raises at a graph break."""
    expected = model.loss(*tokens, **options)
    loss = torch.compile(model, fullgraph=True, backend=backend)(tokens[0], targets=tokens[1], **options)
    torch.testing.assert_close(loss, expected)
    assert_all_close(gradients(model, loss), gradients(model, expected), atol=1e-5, rtol=1e-4)


def test_forward_is_one_graph(tiny, device, tokens):
    model = Transformer(tiny(num_layers=1, attn="sdpa"), device=device)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(tokens[0]), model(tokens[0]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "options"),
    [
        *[({"attn": impl}, {}) for impl in ("auto", "naive", "tiled", "flash")],
        ({"window": 5}, {}),
        ({"tie_embeddings": True}, {"chunk": 10}),
        ({"num_layers": 2, "checkpoint_every": 1}, {}),
    ],
    ids=str,
)
def test_loss_is_one_graph(tiny, device, tokens, changes, options):
    changes = {"num_layers": 1, "checkpoint_every": None} | changes
    every = changes.pop("checkpoint_every")
    assert_compiles(Transformer(tiny(**changes), checkpoint_every=every, device=device), tokens, **options)


@pytest.mark.slow
def test_one_graph_under_autocast(tiny, device, tokens):
    model = Transformer(tiny(num_layers=1, attn="auto"), device=device)
    with torch.autocast(device.type, torch.bfloat16):
        expected = model(tokens[0])
        logits = torch.compile(model, fullgraph=True, backend="aot_eager")(tokens[0])
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits, expected)


@pytest.mark.slow
def test_other_lengths_do_not_recompile(tiny, device, tokens):
    model = Transformer(tiny(num_layers=1), device=device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (5, 11):
        with torch.compiler.set_stance("default" if length == 5 else "fail_on_recompile"):
            assert compiled(tokens[0][:, :length]).shape == (3, length, 40)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"window": 5}], ids=["sdpa", "tiled"])
def test_inductor(tiny, device, tokens, changes):
    """Also for a second length, which compiles for all lengths."""
    model = Transformer(tiny(num_layers=1, attn="auto", **changes), device=device)
    for length in (12, 9) if changes else (12,):
        assert_compiles(model, [x[:, :length] for x in tokens], "inductor")
