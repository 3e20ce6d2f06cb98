"""State dicts of the course's model, and Llama checkpoints."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import torch.nn.functional as F

from cs336_systems.transformer import Transformer, from_llama, llama_config, load_llama, load_weights

from .conftest import assert_all_close

SETTINGS = {
    "model_type": "llama",
    "vocab_size": 40,
    "max_position_embeddings": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 500.0,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": False,
}


def llama_tensors(**changes):
    """A checkpoint with random weights, norms included."""
    settings = SETTINGS | changes
    d, kv = 32, 8 * settings["num_key_value_heads"]
    layer = {
        "input_layernorm": (d,),
        "post_attention_layernorm": (d,),
        "self_attn.q_proj": (d, d),
        "self_attn.k_proj": (kv, d),
        "self_attn.v_proj": (kv, d),
        "self_attn.o_proj": (d, d),
        "mlp.gate_proj": (48, d),
        "mlp.up_proj": (48, d),
        "mlp.down_proj": (d, 48),
    }
    shapes = {"model.embed_tokens": (40, d), "model.norm": (d,)}
    shapes |= {f"model.layers.{number}.{name}": shape for number in range(2) for name, shape in layer.items()}
    if not settings["tie_word_embeddings"]:
        shapes["lm_head"] = (40, d)
    return {f"{name}.weight": torch.randn(shape, dtype=torch.float64) / 4 for name, shape in shapes.items()}


def llama(tensors, settings, token_ids):
    """Llama's logits by its definition, with RoPE on the halves of a head."""
    heads, kv_heads, length = settings["num_attention_heads"], settings["num_key_value_heads"], token_ids.shape[1]
    d = settings["hidden_size"] // heads

    def norm(x, name):
        return tensors[f"{name}.weight"] * x / (x.pow(2).mean(-1, keepdim=True) + settings["rms_norm_eps"]).sqrt()

    def linear(x, name):
        return x @ tensors[f"{name}.weight"].T

    def split(x, count):
        return x.view(*x.shape[:2], count, -1).transpose(1, 2)

    frequencies = settings["rope_theta"] ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * torch.cat((frequencies, frequencies))

    def rotate(x):
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()

    x = tensors["model.embed_tokens.weight"][token_ids]
    masked = torch.ones(length, length, dtype=torch.bool).triu(1)
    for number in range(settings["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        y, attn, mlp = norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn", f"{layer}.mlp"
        q = rotate(split(linear(y, f"{attn}.q_proj"), heads))
        k = rotate(split(linear(y, f"{attn}.k_proj"), kv_heads)).repeat_interleave(heads // kv_heads, dim=1)
        v = split(linear(y, f"{attn}.v_proj"), kv_heads).repeat_interleave(heads // kv_heads, dim=1)
        scores = (q @ k.mT / d**0.5).masked_fill(masked, -torch.inf)
        x = x + linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), f"{attn}.o_proj")
        y = norm(x, f"{layer}.post_attention_layernorm")
        x = x + linear(F.silu(linear(y, f"{mlp}.gate_proj")) * linear(y, f"{mlp}.up_proj"), f"{mlp}.down_proj")
    return linear(norm(x, "model.norm"), "lm_head" if "lm_head.weight" in tensors else "model.embed_tokens")


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 4}, {"tie_word_embeddings": True}])
def test_a_llama_checkpoint_has_llamas_logits(changes):
    settings = SETTINGS | changes
    tensors = llama_tensors(**changes)
    config = llama_config(settings)
    model = Transformer(config, dtype=torch.float64)
    load_weights(model, from_llama(tensors, config))
    token_ids = torch.randint(40, (2, 20))
    torch.testing.assert_close(model(token_ids), llama(tensors, settings, token_ids))


def test_a_folder_of_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = llama_tensors()
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    for number in range(2):
        part = dict(list(tensors.items())[number::2])
        safetensors.save_file(part, tmp_path / f"model-{number}-of-2.safetensors")
    model = load_llama(tmp_path, dtype=torch.float64, context_length=20, attn="tiled")
    assert (model.config.context_length, model.config.attn) == (20, "tiled")
    token_ids = torch.randint(40, (2, 20))
    torch.testing.assert_close(model(token_ids), llama(tensors, SETTINGS, token_ids))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert load_llama(tmp_path, dtype=torch.bfloat16).token_embeddings.weight.dtype == torch.bfloat16


@pytest.mark.filterwarnings("default")  # transformers' own warnings
@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_that_transformers_wrote(tmp_path, tied):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("safetensors")
    settings = {**SETTINGS, "tie_word_embeddings": tied, "rms_norm_eps": 1e-5}
    settings.pop("model_type")
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).eval()
    theirs.save_pretrained(tmp_path)
    model = load_llama(tmp_path)
    token_ids = torch.randint(40, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(model(token_ids), theirs(token_ids).logits, atol=1e-5, rtol=1e-4)


def test_without_a_checkpoint_or_safetensors(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "safetensors.torch", None)
        with pytest.raises(ImportError, match=r"^load_llama needs the package safetensors: pip install "):
            load_llama(tmp_path)
    pytest.importorskip("safetensors")
    with pytest.raises(ValueError, match=r"^folder must hold config.json and \*.safetensors; got "):
        load_llama(tmp_path)


def test_the_config_of_a_checkpoint():
    config = llama_config(SETTINGS, attn="naive")
    assert (config.vocab_size, config.context_length, config.d_model, config.d_ff) == (40, 24, 32, 48)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 4, 2)
    assert (config.rope_theta, config.norm_eps, config.tie_embeddings, config.attn) == (500.0, 1e-3, False, "naive")
    newer = {name: value for name, value in SETTINGS.items() if name != "rope_theta"}
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": 300.0}
    assert llama_config(newer).rope_theta == 300.0


LLAMA3 = {"rope_parameters": {"rope_type": "llama3"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type must be 'llama' or None; got 'gpt2'"),
        ({"rope_scaling": {"factor": 8}}, "rope_scaling must be None; got {'factor': 8}"),
        (LLAMA3, "rope_parameters must have the rope_type 'default'; got 'llama3'"),
        ({"attention_bias": True}, "attention_bias must be False or None; got True"),
        ({"mlp_bias": True}, "mlp_bias must be False or None; got True"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu' or None; got 'gelu'"),
        ({"head_dim": 16}, "head_dim must be hidden_size / num_attention_heads, 8; got 16"),
        ({"num_key_value_heads": 3}, "num_kv_heads must divide num_heads, 4; got 3"),
    ],
)
def test_unsupported_settings(changes, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        llama_config(SETTINGS | changes)
    with pytest.raises(ValueError, match=r"^settings must have vocab_size, .*; missing \['hidden_size'\]$"):
        llama_config({name: value for name, value in SETTINGS.items() if name != "hidden_size"})


def test_tensors_with_other_names():
    config = llama_config(SETTINGS)
    for name in ("transformer.wte.weight", "model.layers.0.self_attn.q_proj.bias", "model.layers.0.mlp.gate.weight"):
        with pytest.raises(ValueError, match=rf"^tensors must have the names of a Llama checkpoint; got '{name}'$"):
            from_llama({name: torch.zeros(3)}, config)
    assert from_llama({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}, config) == {}


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name,
        lambda name: f"module._orig_mod.{name}",
        lambda name: name.replace("layers.0.", "layers.0._orig_mod."),
    ],
    ids=["plain", "compiled_and_distributed", "compiled_blocks"],
)
def test_state_dicts_of_wrapped_models(tiny, rename):
    source = Transformer(tiny())
    for state in (source.state_dict(), torch.compile(source).state_dict()):
        model = Transformer(tiny())
        load_weights(model, {rename(name): tensor for name, tensor in state.items()})
        assert_all_close(model.state_dict(), source.state_dict(), atol=0, rtol=0)


def test_a_tied_head(tiny):
    state = Transformer(tiny()).state_dict()
    model = Transformer(tiny(tie_embeddings=True))
    with pytest.raises(ValueError, match=r"^lm_head.weight must equal token_embeddings.weight, .*; got other values$"):
        load_weights(model, state)
    load_weights(model, state | {"lm_head.weight": state["token_embeddings.weight"]})
    assert torch.equal(model.token_embeddings.weight, state["token_embeddings.weight"])


def test_other_state_dicts_leave_the_model_unchanged(tiny):
    model, state = Transformer(tiny()), Transformer(tiny()).state_dict()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    renamed = {("head" if name == "ln_final.weight" else name): tensor for name, tensor in state.items()}
    with pytest.raises(ValueError, match=r"got unknown \['head'\], missing \['ln_final.weight'\]$"):
        load_weights(model, renamed)
    with pytest.raises(ValueError, match=r"^lm_head.weight must have shape \(40, 32\); got \(41, 32\)$"):
        load_weights(model, state | {"lm_head.weight": torch.zeros(41, 32)})
    assert_all_close(model.state_dict(), before, atol=0, rtol=0)
