"""Small models of each family of transformers with random weights, and "eager" to compare with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cs336_systems.compat.huggingface import NAME

transformers = pytest.importorskip("transformers")
is_new = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)
"""Older versions let some models and continuous batching have their own implementations alone."""

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
DECODERS = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, **SLIDING}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 4}),
    "gemma2": ("Gemma2Config", {"attn_logit_softcapping": 1.0, **SLIDING}),
    "gemma3": ("Gemma3TextConfig", {"query_pre_attn_scalar": 8, **SLIDING}),
    "phi3": ("Phi3Config", {}),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 2, "num_experts_per_tok": 1, **SLIDING}),
}
IMAGES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 8}
SPEECH: dict[str, Any] = {
    "conv_dim": (32, 32),
    "conv_stride": (2, 2),
    "conv_kernel": (3, 3),
    "num_feat_extract_layers": 2,
}
SPEECH |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0}
DROPOUTS = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODERS = {
    "bert": ("BertConfig", {**SIZES, **DROPOUTS}, "ids"),
    "roberta": ("RobertaConfig", {**SIZES, **DROPOUTS}, "ids"),
    "modernbert": ("ModernBertConfig", {**SIZES, "local_attention": 8, "global_attn_every_n_layers": 2}, "ids"),
    "vit": ("ViTConfig", {**IMAGES, **DROPOUTS, "patch_size": 2}, "pixels"),
    "siglip": ("SiglipVisionConfig", {**IMAGES, "patch_size": 2}, "pixels"),
    "clip": ("CLIPVisionConfig", {**IMAGES, "patch_size": 2}, "pixels"),
    "clip_text": ("CLIPTextConfig", {**SIZES, "eos_token_id": 2}, "ids"),
    "wav2vec2": ("Wav2Vec2Config", {**SIZES, **SPEECH, "apply_spec_augment": False}, "sound"),
}
BART: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 1, "dropout": 0.0}
TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
BOTH = {
    "t5": ("T5Config", "T5ForConditionalGeneration", {**TOKENS, **T5, "decoder_start_token_id": 0}),
    "bart": ("BartConfig", "BartForConditionalGeneration", {**TOKENS, **BART, "forced_eos_token_id": None}),
    "whisper": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {**TOKENS, **BART, "num_mel_bins": 8, "max_source_positions": 10, "begin_suppress_tokens": None},
    ),
}
LENGTH, PADDED = 10, 3


def config_of(name, options):
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, name)(**options)


def with_large_weights(model, device):
    """Attention affects what it returns."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.to(device).eval()


def prompts(device, padded="no"):
    """Tokens (2, LENGTH) and their attention mask; the second prompt may have padding."""
    ids = torch.randint(1, 64, (2, LENGTH), device=device)
    mask = torch.ones_like(ids)
    padding = {"no": [], "left": range(PADDED), "right": range(LENGTH - PADDED, LENGTH), "between": [2, 5]}[padded]
    mask[1, list(padding)] = 0
    return ids, mask


def with_both(model, compute, name=NAME):
    """The results with this library's attention, and with the model's own."""
    results = []
    for each in (name, "eager"):
        model.set_attn_implementation(each)
        if model.config._attn_implementation != each and not is_new:
            pytest.skip(f"with transformers {transformers.__version__} {type(model).__name__} takes no {each}")
        assert model.config._attn_implementation == each
        results.append(compute())
    return results


def assert_same(model, compute):
    """What compute() returns, and its gradients, with both."""

    parameters = [x for x in model.parameters() if x.requires_grad]

    def all_of():
        values = compute()
        weights = torch.cos(torch.arange(values.numel(), device=values.device)).view(values.shape)
        gradients = torch.autograd.grad((values * weights).sum(), parameters, allow_unused=True)
        return values.detach(), [x for x in gradients if x is not None]

    (values, gradients), (expected, expected_gradients) = with_both(model, all_of)
    torch.testing.assert_close(values, expected, rtol=2e-4, atol=1e-4)
    assert len(gradients) == len(expected_gradients) > 10
    for actual, each in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(actual, each, rtol=1e-3, atol=1e-5 + 1e-4 * each.abs().max().item())


def assert_generates_the_same(model, *inputs, name=NAME, **options):
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, **options}
    tokens, expected = with_both(model, lambda: model.generate(*inputs, **settings), name)
    assert tokens.shape[1] >= 6
    assert torch.equal(tokens, expected)
