"""The layers of a Transformer without biases, each usable alone."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..kernels.torch_names import ToldOfCasts, has_hooks
from . import swiglu
from .config import check_positive, check_size

Place = torch.device | str | None
"""Where a new parameter lies; None for torch's default."""

STANDARD_DEVIATIONS = 3
"""Where normal distributions are cut off."""


def draw_truncated_normal(weight: Tensor, std: float) -> None:
    """Fill with a normal distribution of mean 0, cut off at three standard deviations."""
    nn.init.trunc_normal_(weight, std=std, a=-STANDARD_DEVIATIONS * std, b=STANDARD_DEVIATIONS * std)


def linear_std(d_in: int, d_out: int) -> float:
    """Glorot and Bengio (2010): between what keeps the variance forward, 1 / d_in, and backward, 1 / d_out."""
    return math.sqrt(2 / (d_in + d_out))


class Linear(nn.Module):
    """y = W x, without a bias.

    Args:
        d_in, d_out: the widths of x and y.
        device, dtype: of ``weight`` (d_out, d_in), which is drawn by `reset_parameters`.

    Raises:
        TypeError, ValueError: a width is not a positive int.
    """

    def __init__(self, d_in: int, d_out: int, device: Place = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        check_size("d_in", d_in)
        check_size("d_out", d_out)
        self.weight = nn.Parameter(torch.empty(d_out, d_in, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight anew: a truncated normal of `linear_std`."""
        d_out, d_in = self.weight.shape
        draw_truncated_normal(self.weight, linear_std(d_in, d_out))

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """W x, in x's dtype, or autocast's."""
        return F.linear(x, self.weight)

    def extra_repr(self) -> str:
        """The widths, for printing."""
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}"


class Embedding(nn.Module):
    """A vector for each token.

    Args:
        vocab_size, d_model: how many vectors, and how wide.
        std: of the truncated normal that `reset_parameters` draws from.
        device, dtype: of ``weight`` (vocab_size, d_model).

    Raises:
        TypeError, ValueError: a size is not a positive int, or ``std`` not a positive number.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        std: float = 1.0,
        device: Place = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_size("vocab_size", vocab_size)
        check_size("d_model", d_model)
        check_positive("std", std)
        self.std = std
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight anew."""
        draw_truncated_normal(self.weight, self.std)

    def forward(self, token_ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch d_model"]:
        """The vectors of these tokens; they are from 0 up to ``vocab_size``, or torch raises."""
        return F.embedding(token_ids, self.weight)

    def extra_repr(self) -> str:
        """The sizes, for printing."""
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}, std={self.std:.3g}"


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight, over the last axis: Zhang and Sennrich (2019).

    Args:
        d_model: the length of that axis.
        eps: keeps a vector of zeros from being divided by zero.
        device, dtype: of ``weight`` (d_model,).

    Raises:
        TypeError, ValueError: ``d_model`` is not a positive int, or ``eps`` not a positive number.
    """

    def __init__(self, d_model: int, eps: float = 1e-5, device: Place = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        check_size("d_model", d_model)
        check_positive("eps", eps)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(d_model, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to ones."""
        nn.init.ones_(self.weight)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The normalised x in x's dtype, computed in float32, or float64 where x has it."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        """The width and eps, for printing."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


class RotaryEmbedding(ToldOfCasts):
    """Rotary position embedding, RoPE: Su et al., "RoFormer" (2021).

    Elements 2i and 2i + 1 of a vector at position p are rotated by the angle p · theta^(-2i / d_head), so that the
    product of a query and a key depends on their distance. (Llama in transformers pairs i with i + d_head / 2 instead:
    see `cs336_systems.transformer.weights`.)

    Args:
        d_head: the width of the vectors; even.
        context_length: how many positions there are.
        theta: the base of the wavelengths.
        device, dtype: of cos, -sin and sin, in ``table`` (3, context_length, d_head / 2): float32, or float64 for a
            model of that dtype. It is no part of the state dict. Whatever the module is moved or cast to, the table
            is computed anew, so that neither a narrow dtype nor ``to_empty`` leaves wrong angles in it.

    Raises:
        TypeError, ValueError: a size is not a positive int, ``d_head`` is odd, or ``theta`` not a positive number.
    """

    table: Tensor

    def __init__(
        self,
        d_head: int,
        context_length: int,
        theta: float = 10_000.0,
        device: Place = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_size("d_head", d_head)
        check_size("context_length", context_length)
        check_positive("theta", theta)
        if d_head % 2:
            raise ValueError(f"d_head must be even; got {d_head}")
        self.theta = theta
        wide = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        table = torch.empty(3, context_length, d_head // 2, device=device, dtype=wide)
        self.register_buffer("table", table, persistent=False)
        self._made = table
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the table anew, in float64 on the CPU whatever its own dtype and device."""
        _, positions, pairs = self.table.shape
        frequencies = self.theta ** -(torch.arange(pairs, dtype=torch.float64, device="cpu") / pairs)
        angles = torch.outer(torch.arange(positions, dtype=torch.float64, device="cpu"), frequencies)
        self.table.copy_(torch.stack((angles.cos(), -angles.sin(), angles.sin())).to(self.table.dtype))

    def after_cast(self) -> None:
        """Compute a table that was replaced anew, in float32 at least."""
        if self.table is not self._made:
            self._made = self.table = self.table.to(torch.promote_types(self.table.dtype, torch.float32))
            self.reset_parameters()

    def forward(
        self, x: Float[Tensor, "*batch length d_head"], positions: Int[Tensor, "*batch length"] | None = None
    ) -> Float[Tensor, "*batch length d_head"]:
        """x rotated, in its dtype.

        Args:
            x: vectors, the axis before the last one being the position.
            positions: from 0 up to ``context_length``, of any shape that broadcasts; 0, 1, 2, ... if None.

        Raises:
            ValueError: x is longer than ``context_length``, or of another width than ``d_head``.
        """
        _, most, pairs = self.table.shape
        if x.shape[-1] != 2 * pairs:
            raise ValueError(f"x must have vectors of {2 * pairs} elements, d_head; got {x.shape[-1]}")
        if positions is None and x.shape[-2] > most:
            raise ValueError(f"x must have a length of at most {most}, the context length; got {x.shape[-2]}")
        table = self.table[:, : x.shape[-2]] if positions is None else self.table[:, positions]
        couples = rearrange(x, "... (pair two) -> ... pair two", two=2)
        # By operations of single elements alone, the result lies in memory as x does, where heads and positions may
        # have changed places: attention's output then does, too, and none of them is copied on its way.
        cos, sines = table[0].unsqueeze(-1), table[1:].movedim(0, -1)
        rotated = couples * cos + couples.flip(-1) * sines
        return rearrange(rotated, "... pair two -> ... (pair two)").to(x.dtype)

    def extra_repr(self) -> str:
        """The sizes and theta, for printing."""
        return f"{2 * self.table.shape[2]}, context_length={self.table.shape[1]}, theta={self.theta}"


class SwiGLU(nn.Module):
    """w2 (silu(w1 x) ⊙ w3 x): Shazeer, "GLU variants improve Transformer" (2020).

    In training on CUDA, in float16, bfloat16 or float32, it is one autograd Function, which keeps w1 x and w3 x for the
    backward pass and no other tensor of that width; see `cs336_systems.transformer.swiglu`. It cannot be differentiated
    twice. Where w1, w2 or w3 is another module than a `Linear`, or has hooks, each is called by itself instead.

    Args:
        d_model: the width of what comes in and goes out.
        d_ff: the inner width.
        device, dtype: of the three weights.

    Raises:
        TypeError, ValueError: a width is not a positive int.
    """

    def __init__(self, d_model: int, d_ff: int, device: Place = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.w1 = Linear(d_model, d_ff, device, dtype)
        self.w2 = Linear(d_ff, d_model, device, dtype)
        self.w3 = Linear(d_model, d_ff, device, dtype)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Each position by itself, in x's dtype, or autocast's."""
        linears = self.w1, self.w3, self.w2
        if all(map(_is_bare, linears)):
            weights = [linear.weight for linear in linears]
            if swiglu.fused(x, *weights):
                return swiglu.swiglu(x, *weights)
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def _is_bare(linear: nn.Module) -> bool:
    """Whether a product with its weight is all that happens when a module is called."""
    return type(linear) is Linear and not has_hooks(linear)
