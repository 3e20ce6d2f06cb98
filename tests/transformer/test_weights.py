"""State dicts of the course's model and checkpoints of Llama, and what is no such thing."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import torch.nn.functional as F

from cs336_systems.transformer import Transformer, from_llama, llama_config, load_llama, load_weights

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
    """A checkpoint of these settings, its weights random and its norms no ones."""
    settings = SETTINGS | changes
    d, kv = 32, 8 * settings["num_key_value_heads"]
    shapes = {"model.embed_tokens": (40, d), "model.norm": (d,), "lm_head": (40, d)}
    for number in range(2):
        of_layer = {
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
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in of_layer.items()}
    if settings["tie_word_embeddings"]:
        del shapes["lm_head"]
    return {f"{name}.weight": torch.randn(shape, dtype=torch.float64) / 4 for name, shape in shapes.items()}


def llama(tensors, settings, token_ids):
    """Llama's logits, written from its definition: RoPE turns the halves of a head."""
    heads, kv_heads, length = settings["num_attention_heads"], settings["num_key_value_heads"], token_ids.shape[1]
    d = settings["hidden_size"] // heads

    def norm(x, name):
        variance = x.pow(2).mean(-1, keepdim=True)
        return tensors[f"{name}.weight"] * x / (variance + settings["rms_norm_eps"]).sqrt()

    def project(x, name, count):
        return (x @ tensors[f"{name}.weight"].T).view(*x.shape[:2], count, -1).transpose(1, 2)

    frequencies = settings["rope_theta"] ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * torch.cat((frequencies, frequencies))

    def turned(x):
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()

    x = tensors["model.embed_tokens.weight"][token_ids]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    for number in range(settings["num_hidden_layers"]):
        at = f"model.layers.{number}"
        y = norm(x, f"{at}.input_layernorm")
        q, k = (
            turned(project(y, f"{at}.self_attn.q_proj", heads)),
            turned(project(y, f"{at}.self_attn.k_proj", kv_heads)),
        )
        v = project(y, f"{at}.self_attn.v_proj", kv_heads)
        k, v = (z.repeat_interleave(heads // kv_heads, dim=1) for z in (k, v))
        scores = (q @ k.mT / d**0.5).masked_fill(hidden, -torch.inf)
        out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + out @ tensors[f"{at}.self_attn.o_proj.weight"].T
        y = norm(x, f"{at}.post_attention_layernorm")
        gated = F.silu(y @ tensors[f"{at}.mlp.gate_proj.weight"].T) * (y @ tensors[f"{at}.mlp.up_proj.weight"].T)
        x = x + gated @ tensors[f"{at}.mlp.down_proj.weight"].T
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    return norm(x, "model.norm") @ head.T


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 4}, {"tie_word_embeddings": True}])
def test_a_checkpoint_of_llama_gives_llama_s_logits(changes):
    settings = SETTINGS | changes
    tensors = llama_tensors(**changes)
    config = llama_config(settings)
    model = Transformer(config, dtype=torch.float64)
    load_weights(model, from_llama(tensors, config))
    token_ids = torch.randint(40, (2, 20))
    torch.testing.assert_close(model(token_ids), llama(tensors, settings, token_ids))


@pytest.mark.parametrize("files", [1, 2])
def test_a_folder_of_safetensors(tmp_path, files):
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = llama_tensors()
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    for number in range(files):
        part = dict(list(tensors.items())[number::files])
        safetensors.save_file(part, tmp_path / f"model-{number}-of-{files}.safetensors")
    model = load_llama(tmp_path, dtype=torch.float64, context_length=20, attn="tiled")
    assert (model.config.context_length, model.config.attn) == (20, "tiled")
    token_ids = torch.randint(40, (2, 20))
    torch.testing.assert_close(model(token_ids), llama(tensors, SETTINGS, token_ids))
    # Weights are trained on after loading, in whatever dtype was asked for.
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert load_llama(tmp_path, dtype=torch.bfloat16).token_embeddings.weight.dtype == torch.bfloat16


@pytest.mark.filterwarnings("default")  # what transformers warns of is its own affair
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


def test_folders_that_are_no_checkpoint(tmp_path):
    pytest.importorskip("safetensors")
    with pytest.raises(ValueError, match=r"^folder must hold config.json and \*.safetensors; got "):
        load_llama(tmp_path)


def test_without_safetensors(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"^load_llama needs the package safetensors: pip install "):
        load_llama(tmp_path)


def test_the_config_of_a_checkpoint():
    config = llama_config(SETTINGS, attn="naive")
    assert (config.vocab_size, config.context_length, config.d_model, config.d_ff) == (40, 24, 32, 48)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 4, 2)
    assert (config.rope_theta, config.norm_eps, config.tie_embeddings, config.attn) == (500.0, 1e-3, False, "naive")
    newer = {name: value for name, value in SETTINGS.items() if name != "rope_theta"}
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": 300.0}
    assert llama_config(newer).rope_theta == 300.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type must be 'llama' or None; got 'gpt2'"),
        ({"rope_scaling": {"factor": 8}}, "rope_scaling must be None; got {'factor': 8}"),
        (
            {"rope_parameters": {"rope_type": "llama3"}},
            "rope_parameters must have the rope_type 'default'; got 'llama3'",
        ),
        ({"attention_bias": True}, "attention_bias must be False or None; got True"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu' or None; got 'gelu'"),
        ({"head_dim": 16}, "head_dim must be hidden_size / num_attention_heads, 8; got 16"),
        ({"num_key_value_heads": 3}, "num_kv_heads must divide num_heads, 4; got 3"),
    ],
)
def test_checkpoints_of_other_models(changes, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        llama_config(SETTINGS | changes)


def test_settings_that_are_missing():
    with pytest.raises(ValueError, match=r"^settings must have vocab_size, .*; missing \['hidden_size'\]$"):
        llama_config({name: value for name, value in SETTINGS.items() if name != "hidden_size"})


def test_tensors_of_other_models():
    config = llama_config(SETTINGS)
    for name in ("transformer.wte.weight", "model.layers.0.self_attn.q_proj.bias", "model.layers.0.mlp.gate.weight"):
        with pytest.raises(ValueError, match=rf"^tensors must have the names of a Llama checkpoint; got '{name}'$"):
            from_llama({name: torch.zeros(3)}, config)
    assert from_llama({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}, config) == {}


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name,
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module._orig_mod.{name}",
        lambda name: name.replace("layers.0.", "layers.0._orig_mod."),
    ],
    ids=["plain", "compiled", "distributed", "compiled_blocks"],
)
def test_a_state_dict_of_the_course(tiny, rename):
    source, model = Transformer(tiny()), Transformer(tiny())
    load_weights(model, {rename(name): tensor for name, tensor in source.state_dict().items()})
    for name, tensor in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_the_state_dict_of_a_compiled_model(tiny):
    source, model = Transformer(tiny()), Transformer(tiny())
    load_weights(model, torch.compile(source).state_dict())
    assert torch.equal(model.token_embeddings.weight, source.token_embeddings.weight)


def test_a_tied_head(tiny):
    state = Transformer(tiny()).state_dict()
    model = Transformer(tiny(tie_embeddings=True))
    with pytest.raises(ValueError, match=r"^lm_head.weight must equal token_embeddings.weight, .*; it differs$"):
        load_weights(model, state)
    load_weights(model, state | {"lm_head.weight": state["token_embeddings.weight"]})
    assert torch.equal(model.token_embeddings.weight, state["token_embeddings.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: {("head" if name == "ln_final.weight" else name): x for name, x in state.items()},
            r"state must have the names .*; got unknown \['head'\], missing \['ln_final.weight'\]",
        ),
        (
            lambda state: state | {"lm_head.weight": torch.zeros(41, 32)},
            r"lm_head.weight must have shape \(40, 32\); got \(41, 32\)",
        ),
    ],
)
def test_state_dicts_that_do_not_fit(tiny, change, message):
    model = Transformer(tiny())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"^{message}$"):
        load_weights(model, change(Transformer(tiny()).state_dict()))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
