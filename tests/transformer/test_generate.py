"""Generation: with and without a cache, of prompts of different lengths, as a stream."""

from __future__ import annotations

import re
from typing import cast

import numpy as np
import pytest
import torch

from cs336_systems.attention import Attention
from cs336_systems.transformer import KVCache, Transformer, generate, stream
from cs336_systems.transformer.cache import FEW
from cs336_systems.transformer.model import TransformerBlock

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [1, 2, 3]]


@pytest.fixture
def model(tiny, device):
    return Transformer(tiny(), device=device)


@pytest.mark.parametrize(
    "settings", [{"temperature": 0}, {"seed": 1, "top_k": 5, "top_p": 0.8}], ids=["greedy", "drawn"]
)
@pytest.mark.parametrize("prompts", [PROMPTS, [[1, 2], [3, 4]]], ids=["of_different_lengths", "of_one_length"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"window": 3}, {"num_kv_heads": 1, "tie_embeddings": True, "attn": "tiled"}, {"attn": "sdpa"}],
    ids=["plain", "window", "shared_and_tied", "sdpa"],
)
def test_the_same_tokens_as_without_a_cache(tiny, device, changes, prompts, settings):
    model = Transformer(tiny(**changes), device=device, dtype=torch.float64)
    new = generate(model, prompts, 10, **settings)
    assert [len(tokens) for tokens in new] == [10] * len(prompts)
    assert new == generate(model, prompts, 10, use_cache=False, **settings)


@pytest.mark.parametrize("impl", ["flash"])
def test_the_same_tokens_with_the_kernels(tiny, device, impl):
    model = Transformer(tiny(attn=impl, num_layers=1), device=device)
    new = generate(model, PROMPTS, 3, temperature=0)
    assert new == generate(model, PROMPTS, 3, temperature=0, use_cache=False)


def test_greedy_tokens_are_the_likeliest(model, device):
    (new,) = generate(model, [[1, 2, 3]], 8, temperature=0)
    sequence = torch.tensor([[1, 2, 3, *new]], device=device)
    assert model(sequence).argmax(-1)[0, 2:-1].tolist() == new


def test_others_in_the_batch_change_nothing(model):
    together = generate(model, PROMPTS, 10, temperature=0)
    assert together == [generate(model, [prompt], 10, temperature=0)[0] for prompt in PROMPTS]


@torch.no_grad()
def test_cached_logits_are_those_of_the_whole_sequence(tiny, device):
    """Several tokens at a time, and sequences of different lengths."""
    model = Transformer(tiny(window=4), device=device, dtype=torch.float64)
    token_ids = torch.randint(40, (2, 20), device=device)
    cache = KVCache(2, 20)
    whole = model(token_ids)
    lengths = [0, 0]
    for counts in ([4, 4], [3, 3], [2, 5], [4, 1], [1, 1], [3, 3]):
        new = max(counts)
        part = torch.stack([token_ids[i, length : length + new] for i, length in enumerate(lengths)])
        logits = model(part, cache=cache)
        cache.advance(counts)
        for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            torch.testing.assert_close(logits[i, :count], whole[i, length : length + count])
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
    assert cache.lengths == tuple(lengths) == (17, 17)


@pytest.mark.parametrize("length", [5, 30])
def test_attention_with_a_scale_and_a_softcap_has_them_in_every_step(tiny, device, length):
    """As a whole prompt, as one that is continued, of few tokens and of many, and as single tokens."""
    model = Transformer(tiny(context_length=80), device=device, dtype=torch.float64)
    for block in model.layers:
        cast(TransformerBlock, block).attn.attend = Attention(causal=True, scale=0.9, softcap=0.05, impl="naive")
    prompts = torch.randint(40, (2, length), device=device)
    new = generate(model, prompts, 4, temperature=0)
    assert new == generate(model, prompts, 4, temperature=0, use_cache=False)
    with torch.no_grad():
        whole, cache = model(prompts), KVCache(2, 80)
        for part in prompts.split([3, length - 3], 1):
            logits = model(part, cache=cache)
            cache.advance([part.shape[1]] * 2)
    torch.testing.assert_close(logits, whole[:, 3:])


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 11])
def test_many_tokens_at_a_time(tiny, device, window):
    """More than are few: of sequences of one length, and of different ones, both after others."""
    model = Transformer(tiny(context_length=80, window=window), device=device, dtype=torch.float64)
    token_ids = torch.randint(40, (2, 80), device=device)
    whole = model(token_ids)
    cache = KVCache(2, 80)
    lengths = [0, 0]
    for counts in ([3, 3], [20, 20], [20, 1], [18, 18]):
        part = torch.stack([token_ids[i, length : length + max(counts)] for i, length in enumerate(lengths)])
        logits = model(part, cache=cache)
        cache.advance(counts)
        for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            torch.testing.assert_close(logits[i, :count], whole[i, length : length + count])
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]


@torch.no_grad()
def test_the_cache_is_allocated_once(model, device):
    cache = KVCache(2, 24)
    token_ids = torch.zeros(2, 3, dtype=torch.long, device=device)
    places = set()
    for _ in range(4):
        model(token_ids, cache=cache)
        cache.advance([3, 3])
        tensors = [tensor for layer in cache.layers.values() for tensor in layer]
        places.add(tuple(tensor.data_ptr() for tensor in tensors))
    assert len(places) == 1
    assert [tensor.shape for tensor in tensors] == [(2, 2, 24, 8)] * 4


def test_a_tensor_of_prompts(model, device):
    prompts = torch.tensor([[1, 2, 3], [4, 5, 6]], device=device)
    new = generate(model, prompts, 5, seed=0)
    assert new == generate(model, prompts.tolist(), 5, seed=0)
    assert new == generate(model, list(prompts.cpu().numpy().astype("uint16")), 5, seed=0)


def test_seeds_repeat(model, device):
    first = generate(model, PROMPTS, 12, seed=7)
    torch.rand(5, device=device)
    assert generate(model, PROMPTS, 12, seed=7) == first
    assert generate(model, PROMPTS, 12, generator=torch.Generator(device).manual_seed(7)) == first
    assert generate(model, PROMPTS, 12, seed=8) != first
    torch.manual_seed(7)
    unseeded = generate(model, PROMPTS, 12)
    torch.manual_seed(7)
    assert generate(model, PROMPTS, 12) == unseeded


def test_stop_tokens_end_their_sequence_alone(model):
    whole = generate(model, PROMPTS, 12, temperature=0)
    stop = {whole[0][2], whole[2][4]}
    expected = []
    for tokens in whole:
        ends = [place for place, token in enumerate(tokens) if token in stop]
        expected.append(tokens[: ends[0] + 1] if ends else tokens)
    assert len(expected[0]) <= 3
    assert generate(model, PROMPTS, 12, temperature=0, stop_tokens=stop) == expected


def test_nothing_is_computed_after_all_have_ended(model):
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    new = generate(model, PROMPTS, 12, seed=0, stop_tokens=range(40))
    assert [len(tokens) for tokens in new] == [1] * 4
    assert len(calls) == 1


def test_a_stream_gives_tokens_as_they_come(model):
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    whole = generate(model, PROMPTS, 6, temperature=0)
    stop = whole[1][2]
    calls.clear()
    streamed = [[] for _ in PROMPTS]
    for number, tokens in enumerate(stream(model, PROMPTS, 6, temperature=0, stop_tokens=[stop])):
        assert len(calls) == number + 1
        for row, token in zip(streamed, tokens, strict=True):
            row.append(token)
    assert streamed[1][:3] == whole[1][: whole[1].index(stop) + 1] + [None] * (2 - whole[1].index(stop))
    assert streamed[1][3:] == [None] * (len(streamed[1]) - 3)
    assert [[token for token in row if token is not None] for row in streamed] == generate(
        model, PROMPTS, 6, temperature=0, stop_tokens=[stop]
    )


def test_a_stream_leaves_gradients_on_for_others(model):
    steps = stream(model, [[1]], 3)
    next(steps)
    assert torch.is_grad_enabled()
    assert not any(parameter.grad is not None for parameter in model.parameters())


def test_the_whole_context_can_be_used(model):
    assert len(generate(model, [[1] * 20], 5, seed=0)[0]) == 5
    with pytest.raises(ValueError, match=r"context length, 24; got a prompt of 20 tokens and max_new_tokens=6$"):
        stream(model, [[1] * 20], 6)


def test_generation_under_autocast(model, device):
    with torch.autocast(device.type, torch.bfloat16):
        new = generate(model, PROMPTS, 4, temperature=0)
    assert [len(tokens) for tokens in new] == [4] * 4


@pytest.mark.parametrize(
    ("prompts", "settings", "error", "message"),
    [
        ([], {}, ValueError, "prompts must be at least one sequence; got none"),
        ([[1], []], {}, ValueError, r"prompts must have at least one token each; got none in prompts\[1\]"),
        ([[1, 40]], {}, ValueError, r"prompts must have tokens from 0 up to 40; got 40 in prompts\[0\]"),
        ([[-1, 4]], {}, ValueError, r"prompts must have tokens from 0 up to 40; got -1 in prompts\[0\]"),
        (
            [[1.0]],
            {},
            TypeError,
            r"prompts must be sequences of ints, or a tensor \(batch, length\): 'float' object .*",
        ),
        ("text", {}, TypeError, r"prompts must be sequences of ints, or a tensor \(batch, length\): 'str' object .*"),
        (torch.tensor([1, 2]), {}, TypeError, r"prompts must be sequences of ints, or .*: 'int' object .*"),
        ([[1]], {"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1; got 0"),
        ([[1]], {"top_k": -1}, ValueError, "top_k must be at least 1; got -1"),
        (
            [[1]],
            {"seed": 1, "generator": torch.Generator()},
            ValueError,
            "generator must be None where seed is given; got both",
        ),
        ([[1]], {"max_new_tokens": -3}, ValueError, "max_new_tokens must be at least 1; got -3"),
        ([[1]], {"max_new_tokens": 2.0}, TypeError, "max_new_tokens must be an int; got 2.0 of type float"),
        ([[2**70]], {}, ValueError, rf"prompts must have tokens from 0 up to 40; got {2**70} in prompts\[0\]"),
        ([[1]], {"temperature": float("nan")}, ValueError, "temperature must be positive and finite; got nan"),
        ([[1]], {"temperature": "hot"}, TypeError, "temperature must be a float; got 'hot' of type str"),
        ([[1]], {"top_p": float("nan")}, ValueError, "top_p must be positive and finite; got nan"),
        ([[1]], {"stop_tokens": "ab"}, TypeError, "stop_tokens must be ints: 'str' object cannot be .*"),
        ([[1]], {"stop_tokens": 7}, TypeError, "stop_tokens must be ints: 'int' object is not iterable"),
        ([[1]], {"stop_tokens": [None]}, TypeError, "stop_tokens must be ints: 'NoneType' object .*"),
        ([[1]], {"stop_tokens": [3, 40]}, ValueError, "stop_tokens must be from 0 up to 40; got 40"),
        ([[1]], {"stop_tokens": [-1]}, ValueError, "stop_tokens must be from 0 up to 40; got -1"),
        ([[1]], {"seed": 2**70}, ValueError, rf"seed must be from -2\*\*63 to 2\*\*64 - 1; got {2**70}"),
        ([[1]], {"seed": 1.5}, TypeError, "seed must be an int; got 1.5 of type float"),
        ([[1]], {"generator": 3}, TypeError, "generator must be a torch.Generator; got int"),
    ],
)
def test_what_is_refused_at_the_call(tiny, prompts, settings, error, message):
    for call in (stream, generate):
        with pytest.raises(error, match=f"^{message}$"):
            call(Transformer(tiny()), prompts, **{"max_new_tokens": 3} | settings)


@pytest.mark.parametrize("call", [stream, generate])
def test_what_is_no_model(call):
    for wrong in (None, torch.nn.Linear(2, 2)):
        with pytest.raises(TypeError, match=f"^model must be a Transformer; got {type(wrong).__name__}$"):
            call(wrong, [[1]], 3)


def test_the_first_and_the_last_seed(model):
    for seed in (-(2**63), 2**64 - 1):
        assert generate(model, [[1]], 3, seed=seed) == generate(model, [[1]], 3, seed=seed)


def test_stop_tokens_of_other_kinds(model):
    whole = generate(model, PROMPTS, 12, temperature=0)
    expected = generate(model, PROMPTS, 12, temperature=0, stop_tokens=[whole[0][2], whole[2][4]])
    for make in (torch.tensor, np.array, set):
        assert generate(model, PROMPTS, 12, temperature=0, stop_tokens=make([whole[0][2], whole[2][4]])) == expected


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0}, {"top_k": 3}, {"stop_tokens": [0]}, {"use_cache": False}])
def test_logits_that_are_no_numbers(model, settings, value):
    """They gave token 0 for ever."""
    with torch.no_grad():
        model.lm_head.weight.fill_(value)
    with pytest.raises(
        FloatingPointError, match=r"finite logits; got NaN or infinity where new token 0 of prompts\[0\]"
    ):
        generate(model, PROMPTS, 3, **settings)
    with pytest.raises(FloatingPointError):
        next(stream(model, PROMPTS, 3, **settings))


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0}])
def test_logits_that_are_infinite(model, settings, value):
    model.register_forward_hook(lambda *arguments: torch.full_like(arguments[-1], value))
    with pytest.raises(FloatingPointError, match=r"new token 0 of prompts\[0\]"):
        generate(model, PROMPTS, 3, **settings)


def test_logits_of_some_tokens_may_be_minus_infinity(model):
    model.register_forward_hook(
        lambda *arguments: arguments[-1].index_fill(-1, torch.arange(39, device=arguments[-1].device), -torch.inf)
    )
    assert generate(model, PROMPTS, 3) == [[39] * 3] * 4


def test_logits_of_one_sequence_that_are_no_numbers(model):
    with torch.no_grad():
        model.token_embeddings.weight[8] = torch.nan
    with pytest.raises(FloatingPointError, match=r"new token 0 of prompts\[1\]"):
        generate(model, PROMPTS, 6, temperature=0)


def test_what_follows_the_end_of_a_sequence_does_not_count(model, device):
    """Its tokens are drawn all the same, from logits that may be anything."""
    whole = generate(model, [[1, 2, 3], [4, 5]], 6, temperature=0)
    stop = whole[0][0]
    if stop in whole[1]:
        pytest.skip("both sequences have the token")
    with torch.no_grad():
        model.token_embeddings.weight[stop] = torch.nan
    assert generate(model, [[1, 2, 3], [4, 5]], 6, temperature=0, stop_tokens=[stop]) == [[stop], whole[1]]


@torch.no_grad()
def test_the_longest_sequence_has_to_fit(tiny):
    model, cache = Transformer(tiny()), KVCache(2, 4)
    model(torch.zeros(2, 3, dtype=torch.long), cache=cache)
    cache.advance([1, 3])
    with pytest.raises(ValueError, match=r"^cache must have room for 5 tokens a sequence; got a capacity of 4$"):
        model(torch.zeros(2, 2, dtype=torch.long), cache=cache)


def test_steps_that_are_recorded_depend_on_no_number_of_the_host(device):
    """A recorded step reads the count of tokens where it was, and attends to all slots."""
    cache = KVCache(2, 64)
    place = cache.filled = cache.filled.to(device)
    for new, counts, together in ((3, [3, 3], 3), (1, [1, 1], None), (1, [1, 0], None), (17, [17, 17], None)):
        assert cache.begin(new, device).together == together
        cache.advance(counts)
        assert cache.filled is place
        assert tuple(cache.filled.tolist()) == cache.lengths
    assert cache.lengths == (22, 21)
    even = KVCache(2, 64)
    for new, together in ((3, 3), (FEW, None), (FEW + 1, 3 + FEW + FEW + 1)):
        assert even.begin(new, device).together == together
        even.advance([new, new])


@torch.no_grad()
def test_counts_that_do_not_fit(tiny):
    cache = KVCache(2, 4)
    Transformer(tiny())(torch.zeros(2, 3, dtype=torch.long), cache=cache)
    for counts in ([1], [-1, 2], [3, 4]):
        with pytest.raises(ValueError, match=rf"^counts must be 2 numbers from 0 to 3; got {re.escape(str(counts))}$"):
            cache.advance(counts)
    cache.advance([3, 2])
    with pytest.raises(ValueError, match=r"^counts must be 2 numbers from 0 to 0; got \[1, 1\]$"):
        cache.advance([1, 1])
