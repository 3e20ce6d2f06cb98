"""The decoder: its steps give what whole sequences do, recorded, compiled, or neither, under autocast too."""

from __future__ import annotations

import re

import pytest
import torch
import torch._inductor.config
import torch._inductor.decomposition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from cs336_systems.transformer import Decoder, Transformer, decoder, generate, stream

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [1, 2, 3]]

COMPILER = decoder._compiler

RECORDED = ("graph", "graph_and_compile")
MODES = ["eager", "compile", *[pytest.param(mode, marks=pytest.mark.gpu) for mode in RECORDED]]

# What is used of torch.compile beyond its own warnings.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch"),
    pytest.mark.usefixtures("compile_afresh"),
]


def settings_of(mode):
    return {"graph": "graph" in mode, "compile": "compile" in mode}


@pytest.fixture
def place(mode):
    """Where a mode is tested: on a GPU if it is recorded."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _no_code_on_a_cpu(monkeypatch):
    """What is compiled there is one graph as anywhere, but run as it is: no C++ is generated."""
    if not torch.cuda.is_available():
        run = torch.compile(decoder.next_logits, fullgraph=True, backend="aot_eager")
        monkeypatch.setattr(decoder, "_compiler", lambda by_reductions: run)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("changes", [{}, {"window": 3, "tie_embeddings": True}], ids=["plain", "window"])
@torch.no_grad()
def test_steps_give_the_logits_of_whole_sequences(tiny, place, mode, changes):
    model = Transformer(tiny(**changes), device=place)
    made = Decoder(model, 4, 24, **settings_of(mode))
    rows = [list(prompt) for prompt in PROMPTS]
    logits = made.prefill(PROMPTS)
    for _ in range(6):
        for row, own in zip(rows, logits, strict=True):
            whole = model(torch.tensor([row], device=place))[0, -1]
            torch.testing.assert_close(own, whole, atol=1e-5, rtol=1e-4)
        tokens = torch.randint(40, (4,), device=place)
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.append(token)
        logits = made.step(tokens)
    assert made.lengths == tuple(len(row) for row in rows)
    assert made.recorded == ("graph" in mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("settings", [{"temperature": 0}, {"seed": 3, "top_k": 9}], ids=["greedy", "drawn"])
def test_the_same_tokens_in_every_mode(tiny, place, mode, settings):
    model = Transformer(tiny(), device=place, dtype=torch.float64)
    new = generate(model, PROMPTS, 10, **settings, **settings_of(mode))
    assert new == generate(model, PROMPTS, 10, use_cache=False, **settings)
    stop = new[0][3]
    stopped = generate(model, PROMPTS, 10, stop_tokens=[stop], **settings, **settings_of(mode))
    assert stopped == [row[: row.index(stop) + 1] if stop in row else row for row in new]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tie_embeddings", [False, True])
@torch.no_grad()
def test_autocast_computes_the_same_with_weights_that_were_cast_before(tiny, place, mode, tie_embeddings):
    model = Transformer(tiny(tie_embeddings=tie_embeddings), device=place)
    with torch.autocast(place.type, torch.bfloat16):
        made = Decoder(model, 4, 24, **settings_of(mode))
        usual = Decoder(model, 4, 24, graph=False)
    # Autocast is as it was when they were made.
    logits, expected = made.prefill(PROMPTS), usual.prefill(PROMPTS)
    for _ in range(3):
        assert logits.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(logits, expected, atol=0.05, rtol=0.05)
        tokens = torch.randint(40, (4,), device=place)
        logits, expected = made.step(tokens), usual.step(tokens)


@torch.no_grad()
def test_cast_weights_are_the_only_copies(tiny, device):
    model = Transformer(tiny(tie_embeddings=True), device=device)
    cast = decoder.with_cast_weights(model, torch.bfloat16)
    own = dict(model.named_parameters())
    for name, parameter in cast.named_parameters():
        if name == "lm_head.weight":
            assert torch.equal(parameter, own["token_embeddings.weight"].bfloat16())
        elif "proj" in name or "ffn" in name:
            assert torch.equal(parameter, own[name].bfloat16())
        else:
            assert parameter is own[name]
    with torch.autocast(device.type, torch.bfloat16):
        tokens = torch.randint(40, (2, 9), device=device)
        assert torch.equal(cast(tokens), model(tokens))
    assert model.lm_head is None


@pytest.mark.gpu
def test_a_graph_is_what_none_chooses_on_a_gpu(tiny):
    model = Transformer(tiny(), device="cuda")
    assert Decoder(model, 1, 8).recorded
    assert not Decoder(model, 1, 8, graph=False).recorded
    model.layers[0].register_forward_hook(lambda *_: None)
    assert not Decoder(model, 1, 8).recorded
    with pytest.raises(ValueError, match=r"^graph must be None or False here: hooks would .*; got some of layers.0$"):
        Decoder(model, 1, 8, graph=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_recorded_steps_wait_for_nothing(tiny, dtype, waiting_forbidden):
    model = Transformer(tiny(), device="cuda", dtype=dtype)
    made = Decoder(model, 4, 24)
    made.step(made.prefill(PROMPTS).argmax(-1))
    tokens = torch.randint(40, (4,), device="cuda")
    with waiting_forbidden():
        for _ in range(3):
            made.step(tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
def test_steps_of_a_larger_model_in_bfloat16(tiny, graph):
    """With the kernels that a GPU takes; beyond several tiles, and with groups of heads."""
    config = tiny(context_length=700, d_model=256, d_ff=256, num_heads=4, num_kv_heads=2, attn="auto")
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
def test_a_model_on_another_gpu(tiny):
    for place in ("cuda:0", "cuda:1"):
        model = Transformer(tiny(), device=place)
        assert generate(model, PROMPTS, 5, temperature=0) == generate(model, PROMPTS, 5, temperature=0, graph=False)


def test_streams_take_both(tiny):
    model = Transformer(tiny())
    calls = [{"graph": False}, {"compile": True}]
    first, second = ([*stream(model, PROMPTS, 4, temperature=0, **settings)] for settings in calls)
    assert first == second


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, len(PROMPTS)])
def test_generated_code(tiny, device, monkeypatch, count):
    wide = device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX512"
    if wide and count == 1 and torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.11 writes C++ for one sequence that has an undeclared variable, where there is AVX-512")
    monkeypatch.setattr(decoder, "_compiler", COMPILER)
    model = Transformer(tiny(num_layers=1), device=device)
    new = generate(model, PROMPTS[:count], 5, temperature=0, compile=True, graph=False)
    assert new == generate(model, PROMPTS[:count], 5, temperature=0, graph=False)


def test_products_with_one_row_are_reductions_on_a_gpu():
    with torch._inductor.config.patch(coordinate_descent_tuning=True), FakeTensorMode():
        row, matrix = torch.empty(1, 8, device="cuda"), torch.empty(8, 4, device="cuda")
        decomposed = make_fx(torch.mm, torch._inductor.decomposition.decompositions)(row, matrix)
    assert torch.ops.aten.mm.default not in {node.target for node in decomposed.graph.nodes}


def test_what_a_decoder_refuses(tiny):
    model = Transformer(tiny())
    with pytest.raises(ValueError, match=r"^graph must be None or False here: a CUDA graph needs .*; got one on cpu$"):
        Decoder(model, 1, 8, graph=True)
    for settings in ({"graph": True}, {"compile": True}):
        (name,) = settings
        with pytest.raises(ValueError, match=f"^{name} must not be asked for without a cache: .*; got True$"):
            generate(model, [[1]], 3, use_cache=False, **settings)
    made = Decoder(model, 2, 4)
    refused = {
        "tokens must come after prompts; got some first": lambda: made.step(torch.tensor([1, 2])),
        "prompts must be 2 sequences of at least one token; got lengths [3]": lambda: made.prefill([[1, 2, 3]]),
        "prompts must be 2 sequences of at least one token; got lengths [3, 0]": lambda: made.prefill([[1, 2, 3], []]),
        "cache must have room for 5 tokens a sequence; got a capacity of 4": lambda: made.prefill([[1], [2] * 5]),
        "prompts must have tokens from 0 up to 40; got 40 in prompts[1]": lambda: made.prefill([[1], [40]]),
    }
    for message, call in refused.items():
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            call()
    made.prefill([[1, 2, 3], [4]])
    with pytest.raises(ValueError, match=r"^tokens must have shape \(2,\); got \(2, 1\)$"):
        made.step(torch.zeros(2, 1, dtype=torch.long))
    made.step(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"^cache must have room for 5 tokens a sequence; got a capacity of 4$"):
        made.step(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"^prompts must come first; got some after 4 tokens$"):
        made.prefill([[1], [2]])
