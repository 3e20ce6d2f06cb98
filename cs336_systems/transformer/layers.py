"""The layers of a Transformer, without biases; each can be used alone."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.types import Device

from ..kernels.torch_names import CastAware, has_hooks
from . import swiglu
from .config import check_positive, check_size


def init_truncated_normal(weight: Tensor, std: float) -> None:
    """Fill with a normal distribution of mean 0, truncated at three standard deviations."""
    nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std)


def linear_std(d_in: int, d_out: int) -> float:
    """The initial standard deviation of a linear layer: Glorot and Bengio (2010)."""
    return math.sqrt(2 / (d_in + d_out))


class Linear(nn.Linear):
    """y = W x, without a bias.

    Args:
        d_in, d_out: widths of x and y.
        device, dtype: of ``weight`` (d_out, d_in).
    """

    def __init__(self, d_in: int, d_out: int, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(d_in, d_out, bias=False, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Initialise the weight: a truncated normal with `linear_std`."""
        init_truncated_normal(self.weight, linear_std(self.in_features, self.out_features))


class Embedding(nn.Embedding):
    """A vector for each token.

    Args:
        vocab_size, d_model: number and width of the vectors.
        std: standard deviation of the initial truncated normal.
        device, dtype: of ``weight`` (vocab_size, d_model).
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        std: float = 1.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.std = std  # before torch's constructor initialises the weight
        super().__init__(vocab_size, d_model, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Initialise the weight."""
        init_truncated_normal(self.weight, self.std)


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x²) + eps) · weight, over the last axis: Zhang and Sennrich (2019).

    Args:
        d_model: size of the last axis.
        eps: avoids a division by zero.
        device, dtype: of ``weight`` (d_model,).
    """

    def __init__(
        self, d_model: int, eps: float = 1e-5, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(d_model, eps, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The normalised x, in x's dtype, computed in float32 (float64 for float64 x)."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(dtype), self.normalized_shape, self.weight.to(dtype), self.eps).to(x.dtype)


class RotaryEmbedding(CastAware):
    """Rotary position embedding, RoPE: Su et al., "RoFormer" (2021).

    Rotates elements 2i and 2i + 1 of a vector at position p by the angle p · theta^(-2i / d_head), so that the product
    of a query and a key depends on their distance. (Llama in transformers pairs i with i + d_head / 2 instead: see
    `cs336_systems.transformer.weights`.)

    The cosines and sines are in ``table`` (3, context_length, d_head / 2), as cos, -sin, sin, in float32 (float64 if
    ``dtype`` is float64). The table is not in the state dict. It is computed again after every move or cast of the
    module, so neither a 16-bit dtype nor ``to_empty`` leaves wrong angles.

    Args:
        d_head: width of the vectors; even (ValueError otherwise).
        context_length: number of positions.
        theta: base of the wavelengths.
        device, dtype: of the model.
    """

    table: Tensor

    def __init__(
        self,
        d_head: int,
        context_length: int,
        theta: float = 10_000.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_size("d_head", d_head)
        check_size("context_length", context_length)
        check_positive("theta", theta)
        if d_head % 2:
            raise ValueError(f"d_head must be even; got {d_head}")
        self.theta = theta
        dtype = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        self._computed = torch.empty(3, context_length, d_head // 2, device=device, dtype=dtype)
        self.register_buffer("table", self._computed, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the table: in float64 on the CPU, then rounded to its dtype."""
        _, length, pairs = self.table.shape
        frequencies = self.theta ** -(torch.arange(pairs, dtype=torch.float64, device="cpu") / pairs)
        angles = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), frequencies)
        self.table.copy_(torch.stack((angles.cos(), -angles.sin(), angles.sin())).to(self.table.dtype))

    def after_cast(self) -> None:
        """Compute the table again if a move or a cast has replaced it, in float32 or float64."""
        if self.table is not self._computed:
            self._computed = self.table = self.table.to(torch.promote_types(self.table.dtype, torch.float32))
            self.reset_parameters()

    def forward(
        self, x: Float[Tensor, "*batch length d_head"], positions: Int[Tensor, "*batch length"] | None = None
    ) -> Float[Tensor, "*batch length d_head"]:
        """x rotated, in its dtype.

        Args:
            x: vectors; the second-to-last axis is the position.
            positions: from 0 to ``context_length`` - 1, of a shape that broadcasts to x's without d_head; 0, 1, 2, ...
                if None.

        Raises ValueError if x is longer than ``context_length``, or its width is not ``d_head``.
        """
        _, length, pairs = self.table.shape
        if x.shape[-1] != 2 * pairs:
            raise ValueError(f"x must have vectors of {2 * pairs} elements, d_head; got {x.shape[-1]}")
        if positions is None and x.shape[-2] > length:
            raise ValueError(f"x must have a length of at most {length}, the context length; got {x.shape[-2]}")
        table = self.table[:, : x.shape[-2]] if positions is None else self.table[:, positions]
        cos, sin = table[0].unsqueeze(-1), table[1:].movedim(0, -1)
        # Pointwise operations only: the result has the strides of x, a view of projections (batch, length, heads, d),
        # so attention's output has them too, and no tensor is copied in between.
        x_pairs = rearrange(x, "... (pair two) -> ... pair two", two=2)
        rotated = x_pairs * cos + x_pairs.flip(-1) * sin
        return rearrange(rotated, "... pair two -> ... (pair two)").to(x.dtype)


class SwiGLU(nn.Module):
    """w2 (silu(w1 x) ⊙ w3 x): Shazeer, "GLU variants improve Transformer" (2020).

    In training on CUDA, in float16, bfloat16 or float32, `cs336_systems.transformer.swiglu` computes it as one autograd
    Function, which saves w1 x and w3 x and no other tensor of width d_ff, and can be differentiated once. If w1, w2 or
    w3 has hooks or is not a plain `Linear`, such as an adapter, each of them is called instead.

    Args:
        d_model: width of the input and the output.
        d_ff: inner width.
        device, dtype: of the weights.
    """

    def __init__(self, d_model: int, d_ff: int, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.w1 = Linear(d_model, d_ff, device, dtype)
        self.w2 = Linear(d_ff, d_model, device, dtype)
        self.w3 = Linear(d_model, d_ff, device, dtype)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The output for each position, in x's dtype, or autocast's."""
        linears = self.w1, self.w3, self.w2
        if all(type(linear) is Linear and not has_hooks(linear) for linear in linears):
            weights = [linear.weight for linear in linears]
            if swiglu.fused(x, *weights):
                return swiglu.swiglu(x, *weights)
        return self.w2(F.silu(self.w1(x)) * self.w3(x))
