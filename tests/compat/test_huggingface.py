"""Small models of transformers with random weights: this library's attention against "eager"."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace

import pytest
import torch

from cs336_systems.attention import attention
from cs336_systems.compat import huggingface
from cs336_systems.compat.huggingface import NAME, attention_forward, attention_mask

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("default")  # transformers' own warnings

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, **SLIDING}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 4}),
    "gemma2": ("Gemma2Config", {"attn_logit_softcapping": 1.0, **SLIDING}),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 2, "num_experts_per_tok": 1, **SLIDING}),
}
LENGTH, PADDED = 10, 3


@pytest.fixture(autouse=True)
def _registered():
    transformers.utils.logging.set_verbosity(logging.ERROR)
    huggingface.register()


@pytest.fixture(params=MODELS)
def model(request, device):
    name, own = MODELS[request.param]
    made = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, name)(**SIZES, **own), attn_implementation=NAME, experts_implementation="eager"
    ).to(device)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # large enough for attention to affect the logits
    return made.eval()


@pytest.fixture
def calls(monkeypatch):
    """The arguments of each call of `attention`."""
    seen = []

    def record(q, k, v, **options):
        seen.append({"q_len": q.shape[-2], "k_len": k.shape[-2], **options})
        return attention(q, k, v, **options)

    monkeypatch.setattr(huggingface, "attention", record)
    return seen


def prompts(device, padded=False):
    """Tokens (2, LENGTH) and their attention mask; the second prompt may have padding on the left."""
    ids = torch.randint(1, 64, (2, LENGTH), device=device)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :PADDED] = 0
    return ids, mask


def with_both(model, compute):
    """The results with this library's attention, and with the model's own."""
    results = []
    for name in (NAME, "eager"):
        model.set_attn_implementation(name)
        assert model.config._attn_implementation == name
        results.append(compute())
    return results


@pytest.mark.parametrize("padded", [False, True])
def test_logits_and_gradients(model, device, padded):
    ids, mask = prompts(device, padded)
    # The first token after padding has no defined logits before it.
    labels = ids.masked_fill(mask.cumsum(-1) <= 1, -100)

    def compute():
        model.train()
        result = model(ids, attention_mask=mask if padded else None, labels=labels)
        gradients = torch.autograd.grad(result.loss, list(model.parameters()), allow_unused=True)
        return result.logits[mask.bool()], [x for x in gradients if x is not None]

    (logits, gradients), (expected, expected_gradients) = with_both(model, compute)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-5)
    assert len(gradients) == len(expected_gradients) > 10
    for actual, each in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(actual, each, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("padded", [False, True])
def test_generation(model, device, padded):
    ids, mask = prompts(device, padded)

    def compute():
        return model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)

    tokens, expected = with_both(model, compute)
    assert tokens.shape == (2, LENGTH + 6)
    assert torch.equal(tokens, expected)


def test_a_prompt_in_parts(model, device):
    """Several queries at a time after keys from the cache."""
    ids, _ = prompts(device)
    whole = model(ids).logits
    first = model(ids[:, :6], use_cache=True)
    second = model(ids[:, 6:], past_key_values=first.past_key_values)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("model", ["llama", "gpt_oss"], indirect=True)
def test_generation_with_a_static_cache(model, device):
    ids, mask = prompts(device, True)

    def compute():
        settings = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
        return model.generate(ids, attention_mask=mask, **settings)

    tokens, expected = with_both(model, compute)
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_packed_sequences(model, device):
    """Position ids that start anew separate what is in a row."""
    ids, _ = prompts(device)
    positions = torch.tensor([[*range(4), *range(6)]], device=device)
    packed = model(ids[:1], position_ids=positions, use_cache=False).logits
    alone = [model(part, use_cache=False).logits for part in (ids[:1, :4], ids[:1, 4:])]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-4, atol=2e-5)


def test_an_encoder_and_a_decoder_with_position_biases(device):
    """T5: layers that are not causal, padding on the right, and queries of one tensor with keys of another."""
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).to(device).eval()
    ids, mask = prompts(device, True)

    def compute():
        return model(input_ids=ids, attention_mask=mask.flip(1), decoder_input_ids=ids[:, :6]).logits

    logits, expected = with_both(model, compute)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("model", ["gpt_oss"], indirect=True)
def test_no_mask_of_all_pairs_is_made(model, device, calls):
    """`attention` gets the window and the causal mask as such, and padding as a mask of keys."""
    for padded in (False, True):
        ids, mask = prompts(device, padded)
        model(ids, attention_mask=mask)
    assert [(call["causal"], call["window"]) for call in calls] == [(True, (3, 0)), (True, None)] * 2
    assert [call["mask"] for call in calls[:2]] == [None] * 2
    assert [call["mask"].shape for call in calls[2:]] == [(2, 1, 1, LENGTH)] * 2
    assert all(call["sinks"] is not None for call in calls)


@pytest.mark.parametrize("model", ["gpt_oss"], indirect=True)
def test_no_mask_is_made_while_a_cache_grows(model, device, calls):
    ids, mask = prompts(device)
    model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    assert [(call["q_len"], call["k_len"]) for call in calls[2:]] == [(1, 4), (1, 11), (1, 4), (1, 12)]
    assert all(call["mask"] is None for call in calls)


def test_a_window_applies_to_one_query_with_a_full_cache(device):
    q, k, v = (torch.randn(1, 2, length, 4, device=device) for length in (1, 9, 9))
    mask = attention_mask(1, 1, 9, q_offset=8, local_size=3)
    assert mask is None
    out, weights = attention_forward(SimpleNamespace(is_causal=True), q, k, v, mask, sliding_window=3)
    expected = attention(q, k[:, :, -3:], v[:, :, -3:])
    assert weights is None
    torch.testing.assert_close(out, expected.transpose(1, 2))


LAYER = SimpleNamespace(is_causal=True)


@pytest.fixture
def qkv(device):
    return torch.randn(3, 1, 2, 5, 4, device=device).unbind()


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_with_rows_is_complete(device, qkv, kind):
    visible = torch.eye(5, dtype=torch.bool, device=device).roll(1, 1)[None, None]  # not causal
    mask = visible if kind == "bool" else torch.zeros(1, 1, 5, 5, device=device).masked_fill(~visible, -1e30)
    out, _ = attention_forward(LAYER, *qkv, mask, sliding_window=2)
    torch.testing.assert_close(out, qkv[2].roll(-1, 2).transpose(1, 2))


@pytest.mark.parametrize(
    ("layer", "is_causal", "expected"), [(True, None, True), (False, None, False), (True, False, False)]
)
def test_the_argument_is_causal_precedes_the_layers(qkv, layer, is_causal, expected):
    out, _ = attention_forward(SimpleNamespace(is_causal=layer), *qkv, None, is_causal=is_causal, sliding_window=9)
    torch.testing.assert_close(out, attention(*qkv, causal=expected).transpose(1, 2))


def test_a_position_bias_is_added_to_scores_and_to_a_mask(device, qkv):
    bias, mask = (torch.randn(1, heads, 5, 5, device=device) for heads in (2, 1))
    out, _ = attention_forward(LAYER, *qkv, None, position_bias=bias)
    torch.testing.assert_close(out, attention(*qkv, causal=True, bias=bias).transpose(1, 2))
    out, _ = attention_forward(LAYER, *qkv, mask, position_bias=bias)
    torch.testing.assert_close(out, attention(*qkv, bias=bias + mask).transpose(1, 2))


def test_dropout(device):
    q = torch.randn(1, 2, 200, 4, device=device)
    eye = torch.eye(200, device=device).expand(1, 2, -1, -1)  # the output is the probabilities
    out, _ = attention_forward(SimpleNamespace(is_causal=False), q, q, eye, None, dropout=0.25)
    assert (out == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)


def test_other_masks_are_those_of_transformers(device):
    """Unused slots of a static cache, other mask functions, and padding before a single query."""
    from transformers.masking_utils import sdpa_mask, sliding_window_causal_mask_function

    padded = {"q_offset": 3, "attention_mask": torch.tensor([[False, True, True, True]], device=device)}
    for arguments in (
        {"q_length": 3, "kv_length": 8, "q_offset": torch.tensor(2, device=device)},
        {"q_length": 3, "kv_length": 8, "q_offset": 0},
        {"q_length": 4, "kv_length": 4, "allow_is_causal_skip": False},
        {"q_length": 1, "kv_length": 4, "mask_function": sliding_window_causal_mask_function(2), **padded},
    ):
        mask = attention_mask(1, **arguments, device=device)
        expected = sdpa_mask(batch_size=1, **arguments | {"allow_is_causal_skip": False}, device=device)
        assert torch.equal(mask, expected)


def test_padding_of_a_cache_with_an_offset(device):
    padding = torch.tensor([[False, False, False, True, True, True]], device=device)
    mask = attention_mask(1, 2, 4, q_offset=4, kv_offset=2, attention_mask=padding)
    assert mask is not None
    assert mask.tolist() == [[[[False, True, True, True]]]]
    assert attention_mask(1, 2, 3, q_offset=4, kv_offset=3, attention_mask=padding) is None


def refused(message, call):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call()


def test_unsupported_features(qkv):
    instead = "use attn_implementation='eager' instead"
    for name, value in (("output_attentions", True), ("cache", object())):
        message = f"{name} must be None or False; got {type(value).__name__}: {instead}"
        refused(message, lambda name=name, value=value: attention_forward(LAYER, *qkv, None, **{name: value}))
    layer = SimpleNamespace(is_causal=True, config=SimpleNamespace(sliding_window=3))
    message = f"sliding_window must be passed by SimpleNamespace, whose model has 3; got none: {instead}"
    refused(message, lambda: attention_forward(layer, *qkv, None))
    attention_forward(layer, *qkv, None, sliding_window=None)
    for wrong in ("cs336_flash", "", None):
        message = f"name must be a string without 'flash', which transformers treats specially; got {wrong!r}"
        refused(message, lambda wrong=wrong: huggingface.register(wrong))


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_a_fixed_implementation(model, device, calls):
    with pytest.raises(ValueError, match=r"^impl must be one of .*; got 'fast'$"):
        huggingface.register(impl="fast")
    huggingface.register("naive", impl="naive")
    model.set_attn_implementation("naive")
    model(prompts(device)[0])
    assert [call["impl"] for call in calls] == ["naive"] * 2
