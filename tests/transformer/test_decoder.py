"""The decoder: its steps equal the model's logits for whole sequences, eager, compiled, and in CUDA graphs."""

from __future__ import annotations

import re

import pytest
import torch
import torch._inductor.config
import torch._inductor.decomposition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from cs336_systems.transformer import Decoder, Transformer, decoder, generate, stream

from .conftest import COMPILE_WARNINGS, PROMPTS

pytestmark = [COMPILE_WARNINGS]
COMPILER = decoder._compiler
MODES = [
    "eager",
    "uncompiled",  # what compile=True does, without the compiler
    pytest.param("compile", marks=pytest.mark.slow),
    *[pytest.param(mode, marks=pytest.mark.gpu) for mode in ("graph", "graph_and_compile")],
]


@pytest.fixture
def options(mode, monkeypatch):
    if mode == "uncompiled":
        monkeypatch.setattr(decoder, "_compiler", lambda single_row: decoder.next_logits)
    return {"graph": "graph" in mode, "compile": "compile" in mode}


@pytest.fixture
def where():
    """The GPU if there is one: all modes run there."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True, scope="module")
def _no_code_on_a_cpu():
    """On a CPU, compiled steps are one graph as well, but no C++ is generated."""
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            run = torch.compile(decoder.next_logits, fullgraph=True, backend="aot_eager")
            patch.setattr(decoder, "_compiler", lambda single_row: run)
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("changes", [{}, {"window": 3, "tie_embeddings": True}], ids=["plain", "window"])
@torch.no_grad()
def test_steps_equal_whole_sequences(tiny, where, mode, options, changes):
    model = Transformer(tiny(**changes), device=where)
    made = Decoder(model, 4, 24, **options)
    rows = [list(prompt) for prompt in PROMPTS]
    logits = made.prefill(PROMPTS)
    for _ in range(6):
        for row, actual in zip(rows, logits, strict=True):
            expected = model(torch.tensor([row], device=where))[0, -1]
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
        tokens = torch.randint(40, (4,), device=where)
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.append(token)
        logits = made.step(tokens)
    assert made.lengths == tuple(len(row) for row in rows)
    assert made.uses_graph == ("graph" in mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 3, "top_k": 9}], ids=["greedy", "random"])
def test_all_modes_generate_the_same_tokens(tiny, where, mode, options, sampling):
    model = Transformer(tiny(), device=where, dtype=torch.float64)
    new = generate(model, PROMPTS, 10, **sampling, **options)
    assert new == generate(model, PROMPTS, 10, use_cache=False, **sampling)
    stop = new[0][3]
    stopped = generate(model, PROMPTS, 10, stop_tokens=[stop], **sampling, **options)
    assert stopped == [row[: row.index(stop) + 1] if stop in row else row for row in new]
    streamed = [*stream(model, PROMPTS, 10, **sampling, **options)]
    assert streamed == [list(tokens) for tokens in zip(*new, strict=True)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tie_embeddings", [False, True])
@torch.no_grad()
def test_autocast_is_that_of_the_construction(tiny, where, mode, options, tie_embeddings):
    model = Transformer(tiny(tie_embeddings=tie_embeddings), device=where)
    with torch.autocast(where.type, torch.bfloat16):
        made, eager = Decoder(model, 4, 24, **options), Decoder(model, 4, 24, graph=False)
    logits, expected = made.prefill(PROMPTS), eager.prefill(PROMPTS)
    for _ in range(3):
        assert logits.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(logits, expected, atol=0.05, rtol=0.05)
        tokens = torch.randint(40, (4,), device=where)
        logits, expected = made.step(tokens), eager.step(tokens)


@torch.no_grad()
def test_only_weights_that_autocast_casts_are_copied(tiny, device):
    model = Transformer(tiny(tie_embeddings=True), device=device)
    cast = decoder.with_cast_weights(model, torch.bfloat16)
    original = dict(model.named_parameters())
    for name, parameter in cast.named_parameters():
        if "proj" in name or "ffn" in name or name == "lm_head.weight":
            source = original["token_embeddings.weight" if name == "lm_head.weight" else name]
            assert torch.equal(parameter, source.bfloat16())
        else:
            assert parameter is original[name]
    with torch.autocast(device.type, torch.bfloat16):
        tokens = torch.randint(40, (2, 9), device=device)
        assert torch.equal(cast(tokens), model(tokens))
    assert model.lm_head is None


@pytest.mark.gpu
def test_graphs_are_the_default_on_a_gpu(tiny):
    model = Transformer(tiny(), device="cuda")
    assert Decoder(model, 1, 8).uses_graph
    assert not Decoder(model, 1, 8, graph=False).uses_graph
    model.layers[0].register_forward_hook(lambda *_: None)
    assert not Decoder(model, 1, 8).uses_graph
    with pytest.raises(ValueError, match=r"^graph must be None or False here: .* does not call hooks; .* layers.0$"):
        Decoder(model, 1, 8, graph=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_steps_do_not_synchronise(tiny, dtype, waiting_forbidden):
    made = Decoder(Transformer(tiny(), device="cuda", dtype=dtype), 4, 24)
    made.step(made.prefill(PROMPTS).argmax(-1))
    tokens = torch.randint(40, (4,), device="cuda")
    with waiting_forbidden():
        for _ in range(3):
            made.step(tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
def test_a_larger_model_in_bfloat16(tiny, graph):
    """With "auto"'s kernels, several tiles and grouped heads."""
    config = tiny(context_length=700, d_model=256, d_ff=256, attn="auto")
    model = Transformer(config, device="cuda", dtype=torch.bfloat16)
    tokens = torch.randint(40, (2, 700), device="cuda")
    made = Decoder(model, 2, 700, graph=graph)
    made.prefill([tokens[0, :600].tolist(), tokens[1, :300].tolist()])
    with torch.no_grad():
        whole = model(tokens).float()
    for number in range(99):
        logits = made.step(torch.stack([tokens[0, 600 + number], tokens[1, 300 + number]])).float()
        expected = torch.stack([whole[0, 600 + number], whole[1, 300 + number]])
        torch.testing.assert_close(logits, expected, atol=0.06, rtol=0.06)


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_another_gpu(tiny):
    for name in ("cuda:0", "cuda:1"):
        model = Transformer(tiny(), device=name)
        assert generate(model, PROMPTS, 5, temperature=0) == generate(model, PROMPTS, 5, temperature=0, graph=False)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, len(PROMPTS)])
def test_inductor(tiny, device, monkeypatch, count):
    avx512 = device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX512"
    if avx512 and count == 1 and torch.__version__.startswith("2.11."):
        pytest.skip("Inductor of torch 2.11 generates C++ with an undeclared variable for one sequence with AVX-512")
    monkeypatch.setattr(decoder, "_compiler", COMPILER)
    model = Transformer(tiny(num_layers=1), device=device)
    new = generate(model, PROMPTS[:count], 5, temperature=0, compile=True, graph=False)
    assert new == generate(model, PROMPTS[:count], 5, temperature=0, graph=False)


def test_products_with_one_row_are_reductions_on_a_gpu():
    with torch._inductor.config.patch(coordinate_descent_tuning=True), FakeTensorMode():
        row, matrix = torch.empty(1, 8, device="cuda"), torch.empty(8, 4, device="cuda")
        decomposed = make_fx(torch.mm, torch._inductor.decomposition.decompositions)(row, matrix)
    assert torch.ops.aten.mm.default not in {node.target for node in decomposed.graph.nodes}


def refused(message, call):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call()


def test_invalid_arguments(tiny):
    model = Transformer(tiny())
    reason = "a CUDA graph needs a model on a CUDA GPU; got one on cpu"
    refused(f"graph must be None or False here: {reason}", lambda: Decoder(model, 1, 8, graph=True))
    for name in ("graph", "compile"):
        message = f"{name} must not be set with use_cache=False, where sequences grow; got True"
        refused(message, lambda name=name: generate(model, [[1]], 3, use_cache=False, **{name: True}))
    made = Decoder(model, 2, 4)
    full = "cache must have a capacity of at least 5 tokens per sequence; got 4"
    refused("tokens must come after prompts; got some first", lambda: made.step(torch.tensor([1, 2])))
    refused("prompts must be 2 sequences; got 1", lambda: made.prefill([[1, 2, 3]]))
    refused(full, lambda: made.prefill([[1], [2] * 5]))
    refused("prompts must have tokens from 0 to 39; got 40 in prompts[1]", lambda: made.prefill([[1], [40]]))
    made.prefill([[1, 2, 3], [4]])
    refused("tokens must have shape (2,); got (2, 1)", lambda: made.step(torch.zeros(2, 1, dtype=torch.long)))
    made.step(torch.tensor([1, 2]))
    refused(full, lambda: made.step(torch.tensor([1, 2])))
    refused("prompts must come first; got some after 4 tokens", lambda: made.prefill([[1], [2]]))
