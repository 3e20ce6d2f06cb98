"""Weights of other models: state dicts of the course's BasicsTransformerLM, and Hugging Face checkpoints of Llama.

Llama's RoPE rotates elements i and i + d_head / 2 of a head; `RotaryEmbedding` rotates 2i and 2i + 1. So the rows of
q_proj and k_proj are reordered, which permutes queries and keys alike and leaves their products unchanged.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.types import Device

from ..kernels.torch_names import COMPILED
from .config import TransformerConfig
from .model import Transformer

WRAPPERS = (COMPILED, "module")
"""Components that torch.compile and DistributedDataParallel add to parameter names."""

# Llama's names and ours.
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_LAYER_NAMES = {
    "input_layernorm": "ln1",
    "self_attn.q_proj": "attn.q_proj",
    "self_attn.k_proj": "attn.k_proj",
    "self_attn.v_proj": "attn.v_proj",
    "self_attn.o_proj": "attn.output_proj",
    "post_attention_layernorm": "ln2",
    "mlp.gate_proj": "ffn.w1",
    "mlp.down_proj": "ffn.w2",
    "mlp.up_proj": "ffn.w3",
}
_MODEL_NAMES = {
    "model.embed_tokens.weight": "token_embeddings.weight",
    "model.norm.weight": "ln_final.weight",
    "lm_head.weight": "lm_head.weight",
}
# Our names and Llama's.
_SIZES = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
_SUPPORTED = {
    "rope_scaling": (None,),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", None),
    "model_type": ("llama", None),
}
"""The values of Llama's settings that `Transformer` implements."""


def load_weights(model: Transformer, state: Mapping[str, Tensor]) -> None:
    """Copy a state dict of the course's BasicsTransformerLM, or of `Transformer`, into a model.

    Args:
        model: of the same sizes; tensors are cast and moved to its parameters' dtype and device.
        state: names as in `cs336_systems.transformer.model`, with or without the components that torch.compile and
            DistributedDataParallel add. For a model with tied embeddings it may hold a head that equals the embedding.

    Raises ValueError if names are missing or unknown, shapes differ, or the head does not equal the embedding to which
    the model ties it. The model is then unchanged.
    """
    state = {".".join(x for x in name.split(".") if x not in WRAPPERS): tensor for name, tensor in state.items()}
    if model.lm_head is None and "lm_head.weight" in state:
        head, embedding = state.pop("lm_head.weight"), state.get("token_embeddings.weight")
        if embedding is not None and not torch.equal(head, embedding):
            raise ValueError(
                "lm_head.weight must equal token_embeddings.weight, to which the model ties it; got other values"
            )
    expected = model.state_dict()
    unknown, missing = sorted(state.keys() - expected.keys()), sorted(expected.keys() - state.keys())
    if unknown or missing:
        raise ValueError(
            f"state must have the names of the model's parameters; got unknown {unknown}, missing {missing}"
        )
    for name, tensor in expected.items():
        if state[name].shape != tensor.shape:
            raise ValueError(f"{name} must have shape {tuple(tensor.shape)}; got {tuple(state[name].shape)}")
    model.load_state_dict(state)


def llama_config(settings: Mapping[str, Any], **changes: Any) -> TransformerConfig:
    """The config of a Llama checkpoint.

    Args:
        settings: the contents of its ``config.json``: ``vocab_size``, ``max_position_embeddings``, ``hidden_size``,
            ``intermediate_size``, ``num_hidden_layers``, ``num_attention_heads``; optionally ``num_key_value_heads``,
            ``rope_theta`` (or in ``rope_parameters``), ``rms_norm_eps`` and ``tie_word_embeddings``.
        changes: attributes of `TransformerConfig` to change, such as a shorter ``context_length``.

    Raises ValueError if a setting is missing, or `Transformer` does not implement it: biases, another activation,
    scaled RoPE, a head width other than hidden_size / num_attention_heads.
    """
    missing = [name for name in _SIZES.values() if name not in settings]
    if missing:
        raise ValueError(f"settings must have {', '.join(_SIZES.values())}; missing {missing}")
    for name, allowed in _SUPPORTED.items():
        if settings.get(name) not in allowed:
            raise ValueError(f"{name} must be {' or '.join(map(repr, allowed))}; got {settings[name]!r}")
    rope = settings.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rope_parameters must have the rope_type 'default'; got {rope['rope_type']!r}")
    width = settings["hidden_size"] // settings["num_attention_heads"]
    if (settings.get("head_dim") or width) != width:
        raise ValueError(f"head_dim must be hidden_size / num_attention_heads, {width}; got {settings['head_dim']}")
    values: dict[str, Any] = {name: settings[llama_name] for name, llama_name in _SIZES.items()}
    values["num_kv_heads"] = settings.get("num_key_value_heads")
    values["rope_theta"] = rope.get("rope_theta", settings.get("rope_theta", 10_000.0))
    values["norm_eps"] = settings.get("rms_norm_eps", 1e-6)
    values["tie_embeddings"] = settings.get("tie_word_embeddings", False)
    return TransformerConfig(**values | changes)


def from_llama(tensors: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """A Llama checkpoint as a state dict for `load_weights`.

    Args:
        tensors: by their names in the checkpoint. The RoPE tables of old checkpoints are ignored.
        config: of the model, as `llama_config` returns it.

    Raises ValueError if a name is not Llama's.
    """
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _LAYER.fullmatch(name)
        if name in _MODEL_NAMES:
            state[_MODEL_NAMES[name]] = tensor
        elif match is not None and match[2] in _LAYER_NAMES:
            ours = _LAYER_NAMES[match[2]]
            if ours in ("attn.q_proj", "attn.k_proj"):
                tensor = rearrange(
                    tensor, "(heads two pair) d_model -> (heads pair two) d_model", two=2, pair=config.d_head // 2
                )
            state[f"layers.{match[1]}.{ours}.weight"] = tensor
        elif not name.endswith("rotary_emb.inv_freq"):
            raise ValueError(f"tensors must have the names of a Llama checkpoint; got {name!r}")
    return state


def load_llama(
    folder: str | os.PathLike[str], *, device: Device = None, dtype: torch.dtype | None = None, **changes: Any
) -> Transformer:
    """The model in a Hugging Face checkpoint's folder: ``config.json`` and one or more ``*.safetensors``.

    >>> model = load_llama("Llama-2-7b-hf", device="cuda", dtype=torch.bfloat16, context_length=2048)

    Args:
        folder: of the checkpoint.
        device, dtype: of the weights.
        changes: attributes of `TransformerConfig` to change.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: the folder lacks these files, or they hold another model; see `llama_config`, `from_llama` and
            `load_weights`.
    """
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise ImportError("load_llama needs the package safetensors: pip install 'cs336_systems[hf]'") from error

    settings, files = Path(folder) / "config.json", sorted(Path(folder).glob("*.safetensors"))
    if not settings.is_file() or not files:
        raise ValueError(f"folder must hold config.json and *.safetensors; got {folder}")
    config = llama_config(json.loads(settings.read_text(encoding="utf-8")), **changes)
    # On the "meta" device first, where no weights are initialised only to be overwritten.
    device = torch.get_default_device() if device is None else device
    model = Transformer(config, device="meta", dtype=dtype).to_empty(device=device)
    load_weights(model, from_llama({name: x for file in files for name, x in load_file(file).items()}, config))
    return model
