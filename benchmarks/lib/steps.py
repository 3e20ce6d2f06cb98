"""One training step of a model, in this process: its model, its tokens, and its phases."""

from __future__ import annotations

import importlib.util
import math
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.lib import flags
from benchmarks.lib.comparison import time_columns
from benchmarks.lib.harness import Row
from benchmarks.lib.models import BLOCKS, CUDNN, FORWARD, LLAMA, PHASES_OF, TORCH, WHOLE, ModelCase
from cs336_systems.attention import explain
from cs336_systems.profiling.timing import RoundTimes
from cs336_systems.training.config import TrainingConfig
from cs336_systems.training.optimizer import adamw, update
from cs336_systems.transformer import Transformer, TransformerConfig

LEARNING_RATE = 1e-4
"""Low enough for the first steps of the largest model. The time of a step does not depend on it."""
_MORE_STEPS = 5


def step_columns(times: RoundTimes, prefix: str = "") -> Row:
    """The columns of `time_columns` over steps, with the coefficient of variation, and the time of each step."""
    columns = time_columns(times) | {"cv": times.coefficient_of_variation}
    columns["steps_ms"] = columns.pop("round_ms")
    del columns["rounds"]
    return {prefix + name: value for name, value in columns.items()}


def finite_loss(loss: Tensor, dtype: str) -> float | None:
    """The loss; None if it is not finite in float16, whose gradients are not scaled here.

    Raises FloatingPointError if it is not finite in another dtype.
    """
    value = float(loss)
    if math.isfinite(value):
        return value
    if dtype != "float16":
        raise FloatingPointError(f"the loss of every step must be finite; got {value}")
    return None


def require_supported(case: ModelCase, device: torch.device) -> None:
    """Raise NotImplementedError if the provider cannot compute the case on this device."""
    if case.provider == LLAMA and importlib.util.find_spec("transformers") is None:
        raise NotImplementedError("the package transformers is not installed")
    if case.provider == CUDNN and device.type != "cuda":
        raise NotImplementedError("cuDNN needs a CUDA device")
    if case.provider in (LLAMA, TORCH, CUDNN):
        return
    x = torch.empty(1, 1, 1, case.config.d_head, dtype=flags.DTYPES[case.dtype], device=device)
    try:
        explain(x, x, x, causal=True, impl=case.config.attn)
    except ValueError as error:
        raise NotImplementedError(str(error)) from None


def most_steps_of(options: Namespace) -> int:
    """--most-steps, by default five times --steps on a GPU and --steps elsewhere."""
    most = options.most_steps or options.steps * (_MORE_STEPS if options.device.type == "cuda" else 1)
    return max(options.steps, most)


class TrainingStep:
    """One training step: the loss, its gradients, and the optimizer's update, as in `cs336_systems.training`.

    Attributes:
        forward: computes the loss.
        model: whose parameters are updated.
        optimizer: fused AdamW, without state until its first update.
    """

    def __init__(self, forward: Callable[[], Float[Tensor, ""]], model: nn.Module) -> None:
        self.forward, self.model = forward, model
        betas, decay = (TrainingConfig.beta1, TrainingConfig.beta2), TrainingConfig.weight_decay
        self.optimizer = adamw(model, learning_rate=LEARNING_RATE, betas=betas, weight_decay=decay)

    def update(self) -> None:
        """Clip the gradients, update the parameters, and set the gradients to None."""
        update(self.optimizer, self.model, TrainingConfig.grad_clip)

    def phases(self, mode: str, losses: list[Tensor] | None = None) -> dict[str, Callable[[], None]]:
        """What a mode measures, by phase, in order. Each loss is appended to ``losses``, without its graph.

        Gradients of mode "forward+backward" are left.
        """
        graph: list[Tensor] = []

        def forward() -> None:
            with torch.set_grad_enabled(mode != FORWARD):
                loss = self.forward()
            if losses is not None:
                losses.append(loss.detach())
            if mode != FORWARD:
                graph.append(loss)

        phases = {"forward": forward, "backward": lambda: graph.pop().backward(), "optimizer": self.update}
        return {name: phases[name] for name in PHASES_OF[mode]}

    def run(self, mode: str, phase: Callable[[str], AbstractContextManager[object]] = nullcontext) -> None:
        """Run what a mode measures, each phase in a context."""
        for name, function in self.phases(mode).items():
            with phase(name):
                function()


def make_batch(
    config: TransformerConfig, batch: int, device: torch.device, seed: int
) -> tuple[Int[Tensor, "batch length"], Int[Tensor, "batch length"]]:
    """Random tokens, and the token after each."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (batch, config.context_length + 1), generator=generator).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def autocast(device: torch.device, dtype: str) -> torch.autocast:
    """Autocast to a 16-bit dtype; with "float32" it is disabled. Parameters are float32 in any case."""
    return torch.autocast(device.type, flags.DTYPES[dtype], enabled=dtype != "float32")


def make_step(
    case: ModelCase, device: torch.device, seed: int, *, recompute_every: int | None = None
) -> tuple[TrainingStep, tuple[Tensor, Tensor]]:
    """The step of a case, of which nothing has run, and its tokens and targets.

    Raises NotImplementedError if the provider cannot compute the case on this device.
    """
    require_supported(case, device)
    torch.manual_seed(seed)
    model = make_model(case, device, recompute_every)
    called = compiled(model, case.compile)
    tokens, targets = make_batch(case.config, case.batch, device, seed)

    def forward() -> Tensor:
        with autocast(device, case.dtype):
            loss: Tensor = called(tokens, targets=targets, count=float(targets.numel()))
        return loss

    return TrainingStep(forward, model), (tokens, targets)


def make_model(case: ModelCase, device: torch.device, recompute_every: int | None = None) -> nn.Module:
    """The provider's model with float32 parameters. It is called as `Transformer`, and has its blocks in ``layers``."""
    if case.provider == LLAMA:
        return Llama(case.config, device)
    model = Transformer(case.config, checkpoint_every=recompute_every, device=device, dtype=torch.float32)
    if case.provider in (TORCH, CUDNN):
        layers: Any = model.layers
        for block in layers:
            block.attn.attend = TorchAttention(cudnn_alone=case.provider == CUDNN)
    return model


def compiled(model: nn.Module, how: str) -> Any:
    """The model compiled as `COMPILE` says; with "blocks" its blocks are replaced."""
    if how == WHOLE:
        return torch.compile(model)
    layers: Any = model.layers
    for block in layers if how == BLOCKS else ():
        block.forward = torch.compile(block.forward)
    return model


class TorchAttention(nn.Module):
    """Causal ``scaled_dot_product_attention``, by any of torch's kernels or by cuDNN's alone.

    ``attn="sdpa"`` excludes cuDNN's kernel from compiled models, where it cannot check the alignment of addresses.
    Here all tensors are aligned.
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
        """The output, in the dtype of q. Raises RuntimeError if cuDNN's kernel is required and cannot compute it."""
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]) if self.cudnn_alone else nullcontext():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Llama(nn.Module):
    """``LlamaForCausalLM`` of transformers with the sizes of a config, called as `Transformer`."""

    def __init__(self, config: TransformerConfig, device: torch.device) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        llama_config = LlamaConfig(
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
            self.model = LlamaForCausalLM(llama_config)

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
