"""Generation: with and without a cache, as a list and as a stream; and the cache itself."""

from __future__ import annotations

import re
from typing import cast

import numpy as np
import pytest
import torch

from cs336_systems.attention import Attention
from cs336_systems.transformer import KVCache, Transformer, generate, stream
from cs336_systems.transformer.cache import MAX_DECODE_TOKENS
from cs336_systems.transformer.model import TransformerBlock

from .conftest import PROMPTS

F64 = torch.float64


@pytest.fixture
def model(tiny, device):
    return Transformer(tiny(), device=device)


@pytest.mark.parametrize(
    "changes",
    [{}, {"window": 3}, {"num_kv_heads": 1, "tie_embeddings": True, "attn": "tiled"}, {"attn": "sdpa"}],
    ids=["plain", "window", "shared_and_tied", "sdpa"],
)
def test_the_cache_changes_no_tokens(tiny, device, changes):
    model = Transformer(tiny(**changes), device=device, dtype=F64)
    for prompts, options in ((PROMPTS, {"temperature": 0}), ([[1, 2], [3, 4]], {"seed": 1, "top_k": 5, "top_p": 0.8})):
        new = generate(model, prompts, 10, **options)
        assert [len(tokens) for tokens in new] == [10] * len(prompts)
        assert new == generate(model, prompts, 10, use_cache=False, **options)


@pytest.mark.parametrize("impl", ["flash"])
def test_the_cache_changes_no_tokens_with_the_kernels(tiny, device, impl):
    model = Transformer(tiny(attn=impl, num_layers=1), device=device)
    new = generate(model, [[5, 6, 7], [8]], 2, temperature=0)
    assert new == generate(model, [[5, 6, 7], [8]], 2, temperature=0, use_cache=False)


def test_greedy_tokens_are_the_most_likely_of_each_sequence(model, device):
    for prompt, new in zip(PROMPTS, generate(model, PROMPTS, 8, temperature=0), strict=True):
        sequence = torch.tensor([prompt + new], device=device)
        assert model(sequence).argmax(-1)[0, len(prompt) - 1 : -1].tolist() == new


@torch.no_grad()
@pytest.mark.parametrize(
    ("window", "steps"),
    [
        (4, [[4, 4], [3, 3], [2, 5], [4, 1], [1, 1], [3, 3]]),
        *[(window, [[3, 3], [20, 20], [20, 1], [18, 18]]) for window in (None, 11)],
    ],
    ids=["few_tokens", "many_tokens", "many_tokens_in_a_window"],
)
def test_cached_logits_are_those_of_the_whole_sequence(tiny, device, window, steps):
    """Several tokens per step, of sequences of one length and of several."""
    model = Transformer(tiny(context_length=80, window=window), device=device, dtype=F64)
    token_ids = torch.randint(40, (2, 80), device=device)
    whole, cache, lengths = model(token_ids), KVCache(2, 80), (0, 0)
    for counts in steps:
        new = torch.stack([token_ids[i, length : length + max(counts)] for i, length in enumerate(lengths)])
        logits = model(new, cache=cache)
        cache.advance(counts)
        for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            torch.testing.assert_close(logits[i, :count], whole[i, length : length + count])
        lengths = tuple(length + count for length, count in zip(lengths, counts, strict=True))
        assert cache.lengths == lengths


@pytest.mark.parametrize("length", [5, 30])
def test_scale_and_softcap_apply_in_every_step(tiny, device, length):
    """In a prefill, in chunks of few and of many tokens, and in single tokens."""
    model = Transformer(tiny(context_length=80), device=device, dtype=F64)
    for block in model.layers:
        cast(TransformerBlock, block).attn.attend = Attention(causal=True, scale=0.9, softcap=0.05, impl="naive")
    prompts = torch.randint(40, (2, length), device=device)
    new = generate(model, prompts, 4, temperature=0)
    assert new == generate(model, prompts, 4, temperature=0, use_cache=False)
    with torch.no_grad():
        whole, cache = model(prompts), KVCache(2, 80)
        for chunk in prompts.split([3, length - 3], 1):
            logits = model(chunk, cache=cache)
            cache.advance([chunk.shape[1]] * 2)
    torch.testing.assert_close(logits, whole[:, 3:])


@torch.no_grad()
def test_the_cache_is_allocated_once(model, device):
    cache, addresses = KVCache(2, 24), set()
    for _ in range(4):
        model(torch.zeros(2, 3, dtype=torch.long, device=device), cache=cache)
        cache.advance([3, 3])
        tensors = [tensor for layer in cache.layers.values() for tensor in layer]
        addresses.add(tuple(tensor.data_ptr() for tensor in tensors))
    assert len(addresses) == 1
    assert [tensor.shape for tensor in tensors] == [(2, 2, 24, 8)] * 4


def test_steps_of_one_token_read_lengths_on_the_device(device):
    """A captured step reads one tensor of lengths, and has no end that is a number of the host."""
    cache = KVCache(2, 64)
    tensor = cache.device_lengths = cache.device_lengths.to(device)
    for new, counts, end in ((3, [3, 3], 3), (1, [1, 1], None), (1, [1, 0], None), (17, [17, 17], None)):
        assert cache.begin(new, device).end == end
        cache.advance(counts)
        assert cache.device_lengths is tensor
        assert tuple(tensor.tolist()) == cache.lengths
    assert cache.lengths == (22, 21)
    even = KVCache(2, 64)
    many = MAX_DECODE_TOKENS + 1
    for new, end in ((3, 3), (MAX_DECODE_TOKENS, None), (many, 3 + MAX_DECODE_TOKENS + many)):
        assert even.begin(new, device).end == end
        even.advance([new, new])


@torch.no_grad()
def test_invalid_counts(tiny):
    model, cache = Transformer(tiny()), KVCache(2, 4)
    token_ids = torch.zeros(2, 3, dtype=torch.long)
    model(token_ids, cache=cache)
    for counts in ([1], [-1, 2], [3, 4]):
        with pytest.raises(ValueError, match=rf"^counts must be 2 numbers from 0 to 3; got {re.escape(str(counts))}$"):
            cache.advance(counts)
    cache.advance([1, 3])
    with pytest.raises(ValueError, match=r"^counts must be 2 numbers from 0 to 0; got \[1, 1\]$"):
        cache.advance([1, 1])
    with pytest.raises(ValueError, match=r"^cache must have a capacity of at least 5 tokens per sequence; got 4$"):
        model(token_ids[:, :2], cache=cache)


def test_prompts_and_stop_tokens_of_other_types(model, device):
    prompts = torch.tensor([[1, 2, 3], [4, 5, 6]], device=device)
    new = generate(model, prompts.tolist(), 5, seed=0)
    assert new == generate(model, prompts, 5, seed=0)
    assert new == generate(model, list(prompts.cpu().numpy().astype("uint16")), 5, seed=0)
    stops = [new[0][2], new[1][4]]
    expected = generate(model, prompts, 5, seed=0, stop_tokens=stops)
    for make in (torch.tensor, np.array, set):
        assert generate(model, prompts, 5, seed=0, stop_tokens=make(stops)) == expected


def test_seeds_repeat(model, device):
    first = generate(model, PROMPTS, 12, seed=7)
    torch.rand(5, device=device)
    assert generate(model, PROMPTS, 12, seed=7) == first
    assert generate(model, PROMPTS, 12, generator=torch.Generator(device).manual_seed(7)) == first
    assert generate(model, PROMPTS, 12, seed=8) != first
    default = []
    for _ in range(2):
        torch.manual_seed(7)
        default.append(generate(model, PROMPTS, 12))
    assert default[0] == default[1]
    for seed in (-(2**63), 2**64 - 1):
        assert generate(model, [[1]], 3, seed=seed) == generate(model, [[1]], 3, seed=seed)


def test_stop_tokens_end_their_sequence_alone_and_a_stream_computes_on_demand(model):
    whole = generate(model, PROMPTS, 6, temperature=0)
    stop = whole[1][2]
    expected = [row[: row.index(stop) + 1] if stop in row else row for row in whole]
    assert len(expected[1]) <= 3
    assert generate(model, PROMPTS, 6, temperature=0, stop_tokens=[stop]) == expected
    calls, steps = [], []
    model.register_forward_hook(lambda *_: calls.append(1))
    for tokens in stream(model, PROMPTS, 6, temperature=0, stop_tokens=[stop]):
        steps.append(tokens)
        assert len(calls) == len(steps)
        assert torch.is_grad_enabled()
    for row, new in zip(zip(*steps, strict=True), expected, strict=True):
        assert list(row) == [*new, *[None] * (len(steps) - len(new))]
    calls.clear()
    assert [len(tokens) for tokens in generate(model, PROMPTS, 12, seed=0, stop_tokens=range(40))] == [1] * 4
    assert len(calls) == 1  # generation ends with the last sequence


def test_the_whole_context_can_be_used(model):
    assert len(generate(model, [[1] * 20], 5, seed=0)[0]) == 5
    with pytest.raises(ValueError, match=r"context length, 24; got a prompt of 20 tokens and max_new_tokens=6$"):
        stream(model, [[1] * 20], 6)


TENSOR = r"prompts must be sequences of ints, or a tensor \(batch, length\)"
INVALID = [
    ([], {}, ValueError, "prompts must be at least one sequence; got none"),
    ([[1], []], {}, ValueError, r"prompts must have at least one token each; got none in prompts\[1\]"),
    ([[1, 40]], {}, ValueError, r"prompts must have tokens from 0 to 39; got 40 in prompts\[0\]"),
    ([[-1, 4]], {}, ValueError, r"prompts must have tokens from 0 to 39; got -1 in prompts\[0\]"),
    ([[2**70]], {}, ValueError, rf"prompts must have tokens from 0 to 39; got {2**70} in prompts\[0\]"),
    ([[1.0]], {}, TypeError, f"{TENSOR}: 'float' object .*"),
    ("text", {}, TypeError, f"{TENSOR}: 'str' object .*"),
    (torch.tensor([1, 2]), {}, TypeError, f"{TENSOR}: 'int' object .*"),
    ([[1]], {"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1; got 0"),
    ([[1]], {"max_new_tokens": 2.0}, TypeError, "max_new_tokens must be an int; got 2.0 of type float"),
    ([[1]], {"temperature": "hot"}, TypeError, "temperature must be a float; got 'hot' of type str"),
    ([[1]], {"stop_tokens": "ab"}, TypeError, "stop_tokens must be ints: 'str' object cannot be .*"),
    ([[1]], {"stop_tokens": 7}, TypeError, "stop_tokens must be ints: 'int' object is not iterable"),
    ([[1]], {"stop_tokens": [3, 40]}, ValueError, "stop_tokens must be from 0 to 39; got 40"),
    ([[1]], {"stop_tokens": [-1]}, ValueError, "stop_tokens must be from 0 to 39; got -1"),
    ([[1]], {"seed": 2**70}, ValueError, rf"seed must be from -2\*\*63 to 2\*\*64 - 1; got {2**70}"),
    ([[1]], {"seed": 1.5}, TypeError, "seed must be an int; got 1.5 of type float"),
    ([[1]], {"generator": 3}, TypeError, "generator must be a torch.Generator; got int"),
    ([[1]], {"seed": 1, "generator": torch.Generator()}, ValueError, "generator must be None .* seed .*; got both"),
]


@pytest.mark.parametrize(("prompts", "options", "error", "message"), INVALID)
def test_calls_raise_for_invalid_arguments(tiny, prompts, options, error, message):
    for call in (stream, generate):
        with pytest.raises(error, match=f"^{message}$"):
            call(Transformer(tiny()), prompts, **{"max_new_tokens": 3} | options)


@pytest.mark.gpu
def test_a_generator_on_another_device(tiny):
    with pytest.raises(ValueError, match=r"^generator must be on the model's device, cuda:0; got one on cpu$"):
        generate(Transformer(tiny(), device="cuda"), [[1]], 3, generator=torch.Generator())


def test_other_models():
    with pytest.raises(TypeError, match=r"^model must be a Transformer; got Linear$"):
        stream(torch.nn.Linear(2, 2), [[1]], 3)


def replace_logits(model, change):
    model.register_forward_hook(lambda module, inputs, logits: change(logits))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"top_k": 3}, {"stop_tokens": [0]}, {"use_cache": False}])
def test_logits_that_are_not_finite(model, options, value):
    replace_logits(model, lambda logits: torch.full_like(logits, value))
    with pytest.raises(FloatingPointError, match=r"finite logits; got NaN .* for new token 0 of prompts\[0\]$"):
        generate(model, PROMPTS, 3, **options)
    with pytest.raises(FloatingPointError):
        next(stream(model, PROMPTS, 3, **options))


def test_some_logits_may_be_minus_infinity_and_the_error_names_the_sequence(tiny, model, device):
    other = Transformer(tiny(), device=device)
    replace_logits(model, lambda logits: logits.index_fill(-1, torch.arange(39, device=device), -torch.inf))
    assert generate(model, PROMPTS, 3) == [[39] * 3] * 4
    with torch.no_grad():
        other.token_embeddings.weight[8] = torch.nan
    with pytest.raises(FloatingPointError, match=r"new token 0 of prompts\[1\]"):
        generate(other, PROMPTS, 6, temperature=0)


def test_logits_after_the_end_of_a_sequence_are_ignored(model):
    values = iter([1.0, torch.nan, torch.nan])

    def change(logits):
        logits = torch.zeros_like(logits)
        logits[0, ..., 3], logits[1, ..., 5] = next(values), 1.0
        return logits

    replace_logits(model, change)
    assert generate(model, [[1, 2, 3], [4, 5]], 3, temperature=0, stop_tokens=[3]) == [[3], [5, 5, 5]]
