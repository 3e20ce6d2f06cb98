"""The models whose training step is measured: this library's, with one attention or another, and Llama of transformers.

All take tokens and targets, and return the loss: the mean cross-entropy, from logits in float32.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from cs336_systems.attention import explain
from cs336_systems.kernels.torch_names import COMPILER
from cs336_systems.training.config import TINY, TINY_SIZES
from cs336_systems.transformer import PRESETS, Transformer, TransformerConfig, preset

FLASH, SDPA, CUDNN, COMPILED_NAIVE, NAIVE, LLAMA = "flash", "sdpa", "cudnn", "compiled-naive", "naive", "llama"
MODELS = {
    FLASH: "this library's Transformer with its Triton kernels",
    SDPA: "the same model with torch's scaled_dot_product_attention, which chooses among all its kernels",
    CUDNN: "the same, with cuDNN's kernel alone",
    COMPILED_NAIVE: "the same model with attention as it is written on paper, compiled with the rest",
    NAIVE: "the same without torch.compile, whatever --compile says: plain PyTorch throughout",
    LLAMA: "transformers' LlamaForCausalLM of the same sizes, with its default attention",
}
"""By name, what each is."""
WHOLE, BLOCKS, NOTHING = "model", "blocks", "none"
COMPILE = (WHOLE, BLOCKS, NOTHING)
"""What torch.compile is given: the model, each block by itself, or nothing."""
_TRANSFORMERS = ("transformers.models.llama.modeling_llama",)
CUDNN_ALONE = [SDPBackend.CUDNN_ATTENTION]


def names_of(suite: str) -> tuple[str, ...]:
    """The names that sizes can have, of a suite of `PRESETS`."""
    return (TINY, *PRESETS[suite])


def start_seconds(how: str, layers: int) -> float:
    """What a row takes on a GPU before its second step, roughly, as `COMPILE` says it: as seen of 12 to 36 layers."""
    return {WHOLE: 3.0 + 2.0 * layers, BLOCKS: 8.0, NOTHING: 2.0}[how]


def config_of(name: str, suite: str, attn: str = "auto", **sizes: int) -> TransformerConfig:
    """The config of a name: a preset, or the training command's tiny one.

    Raises:
        TypeError, ValueError: as `preset` raises them.
    """
    if name == TINY:
        settings: dict[str, Any] = TINY_SIZES._asdict() | sizes
        return TransformerConfig(**settings, attn=attn)
    return preset(name, suite, attn=attn, **sizes)


def modules_for(models: Iterable[str], how: Iterable[str]) -> tuple[str, ...]:
    """What models, compiled in one of these ways, import when they are made and first called."""
    compiler = COMPILER if {*how} - {NOTHING} else ()
    there = LLAMA in models and importlib.util.find_spec("transformers") is not None
    return (*compiler, *(_TRANSFORMERS if there else ()))


def attn_of(model: str) -> str:
    """What computes attention in a model of this library, as its config says it."""
    return {FLASH: "flash", SDPA: "sdpa", CUDNN: "sdpa"}.get(model, "naive")


def why_not(model: str, config: TransformerConfig, device: torch.device) -> str | None:
    """Why a model cannot be measured here; None if it can."""
    if model == LLAMA and importlib.util.find_spec("transformers") is None:
        return "the package transformers is not installed"
    if model == CUDNN and device.type != "cuda":
        return "cuDNN needs a CUDA device"
    return refusal(config, torch.bfloat16, device) if model == FLASH else None


def refusal(config: TransformerConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why what a config names cannot compute attention in this dtype here; None if it can."""
    x = torch.empty(1, 1, 1, config.d_head, dtype=dtype, device=device)
    try:
        explain(x, x, x, causal=True, impl=config.attn)
    except ValueError as error:
        return str(error)
    return None


def make_model(model: str, config: TransformerConfig, device: torch.device) -> nn.Module:
    """A model with float32 parameters on the device, drawn from torch's generator.

    It is called with token_ids (batch, length), ``targets`` of the same shape, and ``count``, how many these are; its
    blocks are in ``layers``.
    """
    if model == LLAMA:
        return Llama(config, device)
    made = Transformer(config, device=device, dtype=torch.float32)
    if model in (SDPA, CUDNN):
        layers: Any = made.layers
        for block in layers:
            block.attn.attend = TorchAttention(cudnn_alone=model == CUDNN)
    return made


def compiled(model: nn.Module, how: str) -> nn.Module:
    """The model, given to torch.compile as `COMPILE` says it; by blocks, these are changed in it."""
    if how == WHOLE:
        return cast("nn.Module", torch.compile(model))
    if how == BLOCKS:
        blocks: Any = model.layers
        for block in blocks:
            block.forward = torch.compile(block.forward)
    return model


class TorchAttention(nn.Module):
    """Causal ``scaled_dot_product_attention`` as torch itself computes it, by any of its kernels or by cuDNN's.

    This library's ``attn="sdpa"`` keeps torch from cuDNN's kernel in what is compiled, where it cannot know that
    addresses are such as cuDNN needs. In this model they are, so that torch may choose.
    """

    def __init__(self, cudnn_alone: bool = False) -> None:
        super().__init__()
        self.cudnn_alone = cudnn_alone

    def forward(
        self,
        q: Float[Tensor, "batch heads length d"],
        k: Float[Tensor, "batch heads length d"],
        v: Float[Tensor, "batch heads length d"],
    ) -> Float[Tensor, "batch heads length d"]:
        """The output, in the dtype of q. Raises RuntimeError where cuDNN's kernel has to compute it and cannot."""
        with sdpa_kernel(CUDNN_ALONE) if self.cudnn_alone else nullcontext():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Llama(nn.Module):
    """Llama as transformers has it, of a config's sizes, called as `Transformer` is."""

    def __init__(self, config: TransformerConfig, device: torch.device) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        theirs = LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.d_ff,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.context_length,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tie_embeddings,
            use_cache=False,
        )
        with device:
            self.model = LlamaForCausalLM(theirs)

    @property
    def layers(self) -> Any:
        """Its blocks."""
        return self.model.model.layers

    def forward(
        self, token_ids: Int[Tensor, "batch length"], *, targets: Int[Tensor, "batch length"], count: float
    ) -> Float[Tensor, ""]:
        """The sum of the targets' cross-entropies, divided by ``count``."""
        logits = self.model(input_ids=token_ids).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum") / count
