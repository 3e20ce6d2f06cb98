"""Weights from elsewhere: state dicts of the course's BasicsTransformerLM, and checkpoints of Hugging Face's Llama.

How such a checkpoint becomes a state dict of `Transformer`:

| in the checkpoint | here |
|---|---|
| ``model.embed_tokens.weight`` | ``token_embeddings.weight`` |
| ``model.layers.N.input_layernorm.weight`` | ``layers.N.ln1.weight`` |
| ``model.layers.N.self_attn.q_proj.weight``, ``k_proj`` | ``layers.N.attn.q_proj.weight``, ``k_proj``; rows reordered |
| ``model.layers.N.self_attn.v_proj.weight``, ``o_proj`` | ``layers.N.attn.v_proj.weight``, ``output_proj`` |
| ``model.layers.N.post_attention_layernorm.weight`` | ``layers.N.ln2.weight`` |
| ``model.layers.N.mlp.gate_proj.weight``, ``down_proj``, ``up_proj`` | ``layers.N.ffn.w1.weight``, ``w2``, ``w3`` |
| ``model.norm.weight`` | ``ln_final.weight`` |
| ``lm_head.weight`` | ``lm_head.weight``; not there if the embedding is tied |

There, RoPE turns elements i and i + d_head / 2 of a head together; here, 2i and 2i + 1. So the rows of q_proj and
k_proj that make these elements change places. Queries and keys change in the same way, and their products do not.
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

from ..attention.validation import shape_of
from ..kernels.torch_names import COMPILED
from .config import TransformerConfig
from .layers import Place
from .model import Transformer

WRAPPERS = (COMPILED, "module")
"""What torch.compile and DistributedDataParallel put into names."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_OF_A_LAYER = {
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
_OF_THE_MODEL = {
    "model.embed_tokens.weight": "token_embeddings.weight",
    "model.norm.weight": "ln_final.weight",
    "lm_head.weight": "lm_head.weight",
}
_TURNED = ("attn.q_proj", "attn.k_proj")

_REFUSED = {
    "rope_scaling": (None,),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", None),
    "model_type": ("llama", None),
}
"""Settings of Llama that must be one of these, because this model has no others."""


def load_weights(model: Transformer, state: Mapping[str, Tensor]) -> None:
    """Copy a state dict of the course's BasicsTransformerLM, or of `Transformer`, into the model.

    Args:
        model: of the same sizes; tensors are cast to the dtype of its parameters, and copied to their device.
        state: names as `cs336_systems.transformer.model` lists them, also with what torch.compile and
            DistributedDataParallel put into them. A model with tied embeddings takes a head that equals them.

    Raises:
        ValueError: names are missing or unknown, shapes differ, or the head is not the embedding it should be tied to.
            The model is then as it was.
    """
    given = {_unwrapped(name): tensor for name, tensor in state.items()}
    if model.lm_head is None:
        given = _without_tied_head(given)
    expected = model.state_dict()
    unknown, missing = sorted(given.keys() - expected.keys()), sorted(expected.keys() - given.keys())
    if unknown or missing:
        raise ValueError(
            f"state must have the names of the model's parameters; got unknown {unknown or 'none'}, missing "
            f"{missing or 'none'}"
        )
    for name, tensor in expected.items():
        if given[name].shape != tensor.shape:
            raise ValueError(f"{name} must have shape {shape_of(tensor)}; got {shape_of(given[name])}")
    model.load_state_dict(given)


def llama_config(settings: Mapping[str, Any], **changes: Any) -> TransformerConfig:
    """The config for a checkpoint of Llama, from what its ``config.json`` says.

    Args:
        settings: ``vocab_size``, ``max_position_embeddings``, ``hidden_size``, ``intermediate_size``,
            ``num_hidden_layers`` and ``num_attention_heads``; and, where they are not the defaults of Llama,
            ``num_key_value_heads``, ``rope_theta`` (also within ``rope_parameters``), ``rms_norm_eps`` and
            ``tie_word_embeddings``.
        changes: attributes of `TransformerConfig` that are to be others, such as a shorter ``context_length``.

    Raises:
        ValueError: a setting is missing, or asks for what `Transformer` does not have: biases, another activation,
            scaled RoPE, heads of another width than hidden_size / num_attention_heads.
    """
    needed = {
        "vocab_size": "vocab_size",
        "context_length": "max_position_embeddings",
        "d_model": "hidden_size",
        "d_ff": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
    }
    missing = [name for name in needed.values() if name not in settings]
    if missing:
        raise ValueError(f"settings must have {', '.join(needed.values())}; missing {missing}")
    for name, allowed in _REFUSED.items():
        if settings.get(name) not in allowed:
            raise ValueError(f"{name} must be {' or '.join(map(repr, allowed))}; got {settings[name]!r}")
    rope = settings.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rope_parameters must have the rope_type 'default'; got {rope['rope_type']!r}")
    width = settings["hidden_size"] // settings["num_attention_heads"]
    if (settings.get("head_dim") or width) != width:
        raise ValueError(f"head_dim must be hidden_size / num_attention_heads, {width}; got {settings['head_dim']}")
    values: dict[str, Any] = {ours: settings[theirs] for ours, theirs in needed.items()}
    values["num_kv_heads"] = settings.get("num_key_value_heads")
    values["rope_theta"] = rope.get("rope_theta", settings.get("rope_theta", 10_000.0))
    values["norm_eps"] = settings.get("rms_norm_eps", 1e-6)
    values["tie_embeddings"] = settings.get("tie_word_embeddings", False)
    return TransformerConfig(**values | changes)


def from_llama(tensors: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """A checkpoint of Llama as a state dict for `load_weights`; the module's text has the mapping.

    Args:
        tensors: by their names in the checkpoint. Tables of RoPE's frequencies, which old ones hold, are left out.
        config: of the model, as `llama_config` gives it.

    Raises:
        ValueError: a name is not one of Llama's.
    """
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("rotary_emb.inv_freq"):
            continue
        in_layer = _LAYER.fullmatch(name)
        if in_layer is not None and in_layer[2] in _OF_A_LAYER:
            part = _OF_A_LAYER[in_layer[2]]
            turned = _pairs_side_by_side(tensor, config.d_head) if part in _TURNED else tensor
            state[f"layers.{in_layer[1]}.{part}.weight"] = turned
        elif name in _OF_THE_MODEL:
            state[_OF_THE_MODEL[name]] = tensor
        else:
            raise ValueError(f"tensors must have the names of a Llama checkpoint; got {name!r}")
    return state


def load_llama(
    folder: str | os.PathLike[str], *, device: Place = None, dtype: torch.dtype | None = None, **changes: Any
) -> Transformer:
    """The model in a folder as Hugging Face lays it out: ``config.json`` and one or more ``*.safetensors``.

    >>> model = load_llama("Llama-2-7b-hf", device="cuda", dtype=torch.bfloat16, context_length=2048)

    Args:
        folder: where they are.
        device, dtype: of the weights.
        changes: attributes of `TransformerConfig` that are to be others.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: the folder has no such files, or they hold another kind of model; see `llama_config`, `from_llama`
            and `load_weights`.
    """
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise ImportError("load_llama needs the package safetensors: pip install 'cs336_systems[hf]'") from error

    settings, files = Path(folder) / "config.json", sorted(Path(folder).glob("*.safetensors"))
    if not settings.is_file() or not files:
        raise ValueError(f"folder must hold config.json and *.safetensors; got {folder}")
    config = llama_config(json.loads(settings.read_text(encoding="utf-8")), **changes)
    # Nothing is drawn that would be overwritten.
    model = Transformer(config, device="meta", dtype=dtype).to_empty(device=device or torch.get_default_device())
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    load_weights(model, from_llama(tensors, config))
    return model


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _without_tied_head(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict less a head that is the embedding once more."""
    head, embedding = state.get("lm_head.weight"), state.get("token_embeddings.weight")
    if head is not None and embedding is not None and not torch.equal(head, embedding):
        raise ValueError("lm_head.weight must equal token_embeddings.weight, to which the model ties it; it differs")
    return {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}


def _pairs_side_by_side(weight: Tensor, d_head: int) -> Tensor:
    """Rows i and i + d_head / 2 of every head next to each other."""
    return rearrange(weight, "(heads two pair) d_model -> (heads pair two) d_model", two=2, pair=d_head // 2)
