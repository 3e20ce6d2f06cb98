"""SwiGLU for training on CUDA: one autograd Function that saves its input and two tensors of width d_ff.

For the plain expression autograd saves four tensors of that width: w1 x, silu(w1 x), w3 x, and the input of w2. The
Function saves the first and the third, concatenated as gu, and one kernel recomputes the others in the backward pass.
As their gradients are concatenated too, dw1 and dw3 are one matrix product, and dx is one product instead of a sum of
two.

The kernels are operators, ``cs336_systems::swiglu_forward`` and ``swiglu_backward``, so that torch.compile and dispatch
modes see them. They are imported when they first run: importing this package does not need Triton.
"""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention.derivatives import differentiable_once
from ..attention.op import transforming
from ..kernels.torch_names import exporting, in_forward_mode, must_dispatch

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TRITON_IS_INSTALLED = importlib.util.find_spec("triton") is not None
TWICE = "SwiGLU on CUDA can be differentiated once; in float64, or with a hook on w1, it can be twice"


@functools.cache
def kernels() -> ModuleType:
    """The module that launches the kernels."""
    from ..kernels import swiglu

    return swiglu


def silu_and_mul(gu: Float[Tensor, "tokens two_d_ff"]) -> Float[Tensor, "tokens d_ff"]:
    """h = silu(g) u, where g and u are the halves of each row of gu."""
    return torch.ops.cs336_systems.swiglu_forward(gu) if must_dispatch(gu) else kernels().forward(gu)


def silu_and_mul_backward(
    dh: Float[Tensor, "tokens d_ff"], gu: Float[Tensor, "tokens two_d_ff"]
) -> tuple[Float[Tensor, "tokens two_d_ff"], Float[Tensor, "tokens d_ff"]]:
    """The gradient of gu, from that of `silu_and_mul`'s result h, and h again."""
    return torch.ops.cs336_systems.swiglu_backward(dh, gu) if must_dispatch(dh, gu) else kernels().backward(dh, gu)


def concat_weights(
    w1: Float[Tensor, "d_ff d_model"],
    w3: Float[Tensor, "d_ff d_model"],
    dtype: torch.dtype,
    gradient: Tensor | None = None,
) -> Float[Tensor, "two_d_ff d_model"]:
    """w1 and w3 concatenated and cast.

    The backward pass passes a ``gradient``, unused, so that torch.compile does not save the forward pass's result,
    which is the same: FSDP would have gathered it for nothing.
    """
    function = torch.ops.cs336_systems.swiglu_weights if must_dispatch(w1, w3) else _concat_weights
    return function(w1, w3, dtype, gradient)


def _concat_weights(w1: Tensor, w3: Tensor, dtype: torch.dtype, gradient: Tensor | None) -> Tensor:
    both = _empty_weights(w1, w3, dtype, gradient)
    # Copies cast as well; torch.cat would need cast inputs.
    both[: len(w1)] = w1
    both[len(w1) :] = w3
    return both


def _empty_weights(w1: Tensor, w3: Tensor, dtype: torch.dtype, gradient: Tensor | None) -> Tensor:
    return w1.new_empty(2 * w1.shape[0], w1.shape[1], dtype=dtype)


def _empty_h(gu: Tensor) -> Tensor:
    return gu.new_empty(gu.shape[0], gu.shape[1] // 2)


_library = torch.library.Library("cs336_systems", "FRAGMENT")


def _define(schema: str, function: Any, fake: Any) -> None:
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cs336_systems::{name}", fake, lib=_library)


_define("swiglu_forward(Tensor gu) -> Tensor", lambda gu: kernels().forward(gu), _empty_h)
_define(
    "swiglu_backward(Tensor dh, Tensor gu) -> (Tensor, Tensor)",
    lambda dh, gu: kernels().backward(dh, gu),
    lambda dh, gu: (gu.new_empty(gu.shape), _empty_h(gu)),
)
_define(
    "swiglu_weights(Tensor w1, Tensor w3, ScalarType dtype, Tensor? gradient) -> Tensor",
    _concat_weights,
    _empty_weights,
)


class SwiGLUFunction(torch.autograd.Function):
    """``SwiGLUFunction.apply(x, w1, w3, w2)``: w2 (silu(w1 x) ⊙ w3 x), in x's dtype; x is (tokens, d_model).

    Saves x, gu, and the weights themselves: copies of them would keep alive what FSDP has gathered.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
        """The output, (tokens, d_model)."""
        gu = x @ concat_weights(w1, w3, x.dtype).t()
        needs_x = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        ctx.save_for_backward(x if needs_x else None, gu, w1, w3, w2)
        return silu_and_mul(gu) @ w2.to(x.dtype).t()

    @staticmethod
    @functools.partial(differentiable_once, message=TWICE)
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients that are needed."""
        x, gu, w1, w3, w2 = ctx.saved_tensors
        needs_x, needs_w1, needs_w3, needs_w2 = ctx.needs_input_grad
        dx = dw1 = dw3 = dw2 = None
        # Without autocast, which would cast what the forward pass computed in float32.
        with torch.autocast(gu.device.type, enabled=False):
            if not (needs_x or needs_w1 or needs_w3):
                return None, None, None, (dy.t() @ silu_and_mul(gu)).to(w2.dtype)
            dgu, h = silu_and_mul_backward(dy @ w2.to(gu.dtype), gu)
            if needs_w2:
                dw2 = (dy.t() @ h).to(w2.dtype)
            del h
            if needs_w1 and needs_w3:
                dw1, dw3 = (dgu.t() @ x).chunk(2)
            elif needs_w1:
                dw1 = dgu[:, : len(w1)].t() @ x
            elif needs_w3:
                dw3 = dgu[:, len(w1) :].t() @ x
            if needs_x:
                dx = dgu @ concat_weights(w1, w3, gu.dtype, dgu)
        return dx, None if dw1 is None else dw1.to(w1.dtype), None if dw3 is None else dw3.to(w3.dtype), dw2


def fused(x: Tensor, *weights: Tensor) -> bool:
    """Whether `swiglu` replaces the plain expression."""
    return x.device.type == "cuda" and TRITON_IS_INSTALLED and can_be_fused(x, *weights)


def can_be_fused(x: Tensor, *weights: Tensor) -> bool:
    """Whether the Function is equivalent to the plain expression: in training, in the kernels' dtypes.

    It does not support tensor subclasses, `torch.func` transforms, forward-mode differentiation and export.
    """
    tensors = (x, *weights)
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return False
    if not all(type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device == x.device for tensor in tensors):
        return False
    # While torch.compile traces, it handles transforms itself.
    if exporting() or (not torch.compiler.is_compiling() and (transforming() or in_forward_mode())):
        return False
    autocast = _autocast_dtype(x)
    if autocast is None:
        return x.dtype in DTYPES and all(weight.dtype == x.dtype for weight in weights)
    return autocast in DTYPES and all(tensor.dtype in DTYPES for tensor in tensors)


def swiglu(
    x: Float[Tensor, "*batch d_model"],
    w1: Float[Tensor, "d_ff d_model"],
    w3: Float[Tensor, "d_ff d_model"],
    w2: Float[Tensor, "d_model d_ff"],
) -> Float[Tensor, "*batch d_model"]:
    """w2 (silu(w1 x) ⊙ w3 x) by the kernels, in x's dtype, or autocast's."""
    rows = x.to(_autocast_dtype(x) or x.dtype).reshape(-1, x.shape[-1])
    out: Tensor = SwiGLUFunction.apply(rows, w1, w3, w2)
    return out.view(x.shape)


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
