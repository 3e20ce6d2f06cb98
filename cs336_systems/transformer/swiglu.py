"""SwiGLU for training on CUDA: one autograd Function around its three products, which keeps x and two of its widths.

Autograd keeps four tensors of width d_ff of the plain expression: w1 x, silu(w1 x), w3 x, and the input of w2. The
Function keeps the first and the third, side by side in one, and computes the others again where their gradient is
computed, by one kernel. With the gradients side by side too, the gradients of w1 and w3 are one product, of as many
tiles as both have, so that the last of them leave less of a GPU idle; and that of x is one product without a sum.

``cs336_systems::swiglu_forward`` and ``swiglu_backward`` are what the kernels compute. They are imported when the first
real tensor arrives, so that a machine without Triton can import this package. ``cs336_systems::swiglu_weights`` lays
w1 and w3 together.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention import ops
from ..attention.dispatch import TRITON_IS_INSTALLED
from ..attention.derivatives import differentiable_once
from ..attention.precision import autocast_dtype, without_autocast
from ..kernels.torch_names import exporting, in_forward_mode

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TWICE = "SwiGLU on CUDA can be differentiated once; in float64, or with a hook on w1, it can be twice"

_FORWARD = "swiglu_forward(Tensor gu) -> Tensor"
_BACKWARD = "swiglu_backward(Tensor dh, Tensor gu) -> (Tensor, Tensor)"
_WEIGHTS = "swiglu_weights(Tensor w1, Tensor w3, ScalarType dtype, Tensor? after) -> Tensor"

for _schema in (_FORWARD, _BACKWARD, _WEIGHTS):
    ops.library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


@functools.cache
def kernels() -> ModuleType:
    """The module that launches the kernels."""
    from ..kernels import swiglu

    return swiglu


def _forward(gu: Tensor) -> Tensor:
    return kernels().forward(gu)


def _backward(dh: Tensor, gu: Tensor) -> tuple[Tensor, Tensor]:
    return kernels().backward(dh, gu)


def _weights(w1: Tensor, w3: Tensor, dtype: torch.dtype, after: Tensor | None) -> Tensor:
    # Cast on the way, which torch.cat does not do.
    both = _fake_weights(w1, w3, dtype, after)
    both[: len(w1)] = w1
    both[len(w1) :] = w3
    return both


for _device in ("CUDA", "CPU"):
    ops.library.impl("swiglu_forward", _forward, _device)
    ops.library.impl("swiglu_backward", _backward, _device)
    ops.library.impl("swiglu_weights", _weights, _device)


@torch.library.register_fake(f"{ops.NAMESPACE}::swiglu_forward", lib=ops.library)  # type: ignore[untyped-decorator]
def _fake_forward(gu: Tensor) -> Tensor:
    return gu.new_empty(gu.shape[0], gu.shape[1] // 2)


@torch.library.register_fake(f"{ops.NAMESPACE}::swiglu_backward", lib=ops.library)  # type: ignore[untyped-decorator]
def _fake_backward(dh: Tensor, gu: Tensor) -> tuple[Tensor, Tensor]:
    return gu.new_empty(gu.shape), _fake_forward(gu)


@torch.library.register_fake(f"{ops.NAMESPACE}::swiglu_weights", lib=ops.library)  # type: ignore[untyped-decorator]
def _fake_weights(w1: Tensor, w3: Tensor, dtype: torch.dtype, after: Tensor | None) -> Tensor:
    return w1.new_empty(2 * w1.shape[0], w1.shape[1], dtype=dtype)


def gated(gu: Float[Tensor, "tokens two_d_ff"]) -> Float[Tensor, "tokens d_ff"]:
    """silu(g) u, g and u being the halves of each row."""
    if ops.must_dispatch(gu):
        return torch.ops.cs336_systems.swiglu_forward(gu)
    return kernels().forward(gu)


def gated_backward(
    dh: Float[Tensor, "tokens d_ff"], gu: Float[Tensor, "tokens two_d_ff"]
) -> tuple[Float[Tensor, "tokens two_d_ff"], Float[Tensor, "tokens d_ff"]]:
    """The gradient of gu from that of what `gated` made of it, and that again."""
    if ops.must_dispatch(dh, gu):
        return torch.ops.cs336_systems.swiglu_backward(dh, gu)
    return kernels().backward(dh, gu)


def side_by_side(
    w1: Float[Tensor, "d_ff d_model"],
    w3: Float[Tensor, "d_ff d_model"],
    dtype: torch.dtype,
    after: Tensor | None = None,
) -> Float[Tensor, "two_d_ff d_model"]:
    """Both matrices in one, in a dtype.

    In a backward pass ``after`` is one of its gradients: else torch.compile would find that the forward pass has made
    the same already, and keep that, with what FSDP gathered.
    """
    if ops.must_dispatch(w1, w3):
        return torch.ops.cs336_systems.swiglu_weights(w1, w3, dtype, after)
    return _weights(w1, w3, dtype, after)


class SwiGLUFunction(torch.autograd.Function):
    """w2 (silu(w1 x) ⊙ w3 x), in x's dtype whatever that of the weights: ``SwiGLUFunction.apply(x, w1, w3, w2)``.

    x is (tokens, d_model). Saves x and what w1 and w3 make of it; of the weights themselves only, and no copies, which
    would keep alive what FSDP gathered.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
        """The output, (tokens, d_model)."""
        gu = x @ side_by_side(w1, w3, x.dtype).t()
        of_weights = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        ctx.save_for_backward(x if of_weights else None, gu, w1, w3, w2)
        return gated(gu) @ w2.to(x.dtype).t()

    @staticmethod
    @functools.partial(differentiable_once, message=TWICE)
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of those that need one."""
        x, gu, w1, w3, w2 = ctx.saved_tensors
        of_x, of_w1, of_w3, of_w2 = ctx.needs_input_grad
        dx = dw1 = dw3 = dw2 = None
        # Outside of autocast, lest a backward pass that runs inside of it narrow what the forward pass had in float32.
        with without_autocast(gu.device):
            if not (of_x or of_w1 or of_w3):
                return None, None, None, (dy.t() @ gated(gu)).to(w2.dtype)
            dgu, h = gated_backward(dy @ w2.to(gu.dtype), gu)
            if of_w2:
                dw2 = (dy.t() @ h).to(w2.dtype)
            del h
            if of_w1 and of_w3:
                dw1, dw3 = (dgu.t() @ x).chunk(2)
            elif of_w1:
                dw1 = dgu[:, : len(w1)].t() @ x
            elif of_w3:
                dw3 = dgu[:, len(w1) :].t() @ x
            if of_x:
                dx = dgu @ side_by_side(w1, w3, gu.dtype, dgu)
        return dx, None if dw1 is None else dw1.to(w1.dtype), None if dw3 is None else dw3.to(w3.dtype), dw2


def dtype_of(x: Tensor) -> torch.dtype:
    """What the products are computed in: autocast's dtype where that is on, x's otherwise."""
    return autocast_dtype(x.device.type) or x.dtype


def has_kernels(device_type: str) -> bool:
    """Whether there are kernels for a type of device: CUDA's, where Triton is installed."""
    return device_type == "cuda" and TRITON_IS_INSTALLED


def fused(x: Tensor, *weights: Tensor) -> bool:
    """Whether `swiglu` takes the place of the plain expression: where there are kernels, and it can."""
    return has_kernels(x.device.type) and can_be_fused(x, *weights)


def can_be_fused(x: Tensor, *weights: Tensor) -> bool:
    """Whether the Function computes what the plain expression does: in training, in the dtypes of the kernels.

    Tensors have to be plain ones, and transforms of functions, derivatives forward and exported programs have to do
    with operators of torch alone.
    """
    tensors = (x, *weights)
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return False
    if not all(_is_plain(tensor) and tensor.device == x.device for tensor in tensors):
        return False
    if exporting() or _transformed():
        return False
    narrow = autocast_dtype(x.device.type)
    if narrow is None:
        return x.dtype in DTYPES and all(weight.dtype == x.dtype for weight in weights)
    return narrow in DTYPES and all(tensor.dtype in DTYPES for tensor in tensors)


def _is_plain(tensor: Tensor) -> bool:
    # Not looked up in `ops.PLAIN`, because torch.compile traces this.
    return type(tensor) is Tensor or type(tensor) is torch.nn.Parameter


def _transformed() -> bool:
    """Whether a transform of `torch.func`, or forward-mode differentiation, is at work: the Function has no rules."""
    if torch.compiler.is_compiling():
        return False  # what traces says so itself
    return ops.transforming() or in_forward_mode()


def swiglu(
    x: Float[Tensor, "*batch d_model"],
    w1: Float[Tensor, "d_ff d_model"],
    w3: Float[Tensor, "d_ff d_model"],
    w2: Float[Tensor, "d_model d_ff"],
) -> Float[Tensor, "*batch d_model"]:
    """w2 (silu(w1 x) ⊙ w3 x) by the kernels, in x's dtype, or autocast's."""
    rows = x.to(dtype_of(x)).reshape(-1, x.shape[-1])
    out: Tensor = SwiGLUFunction.apply(rows, w1, w3, w2)
    return out.view(x.shape)
