"""The flash kernels as torch operators, so that tracing, fake tensors and dispatch modes see them.

``cs336_systems::flash_forward`` and ``flash_backward`` are opaque: torch.compile calls them as they are. Kernels are
imported when the first real tensor arrives, so that a machine without Triton can import this package.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from ..kernels.layout import one_a_row, rows_like

NAMESPACE = "cs336_systems"
PLAIN = {Tensor, torch.nn.Parameter}

_library = torch.library.Library(NAMESPACE, "DEF")
_library.define(
    "flash_forward(Tensor q, Tensor k, Tensor v, str causal, float scale) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "flash_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, "
    "str causal, float scale) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@functools.cache
def kernels() -> ModuleType:
    """The module that launches the kernels."""
    from ..kernels.portable import launch

    return launch


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: str, scale: float) -> tuple[Tensor, Tensor]:
    return kernels().forward(q, k, v, causal, scale)


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    causal: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return kernels().backward(q, k, v, out, lse, dout, dlse, causal, scale)


for _device in ("CUDA", "CPU"):
    _library.impl("flash_forward", _forward, _device)
    _library.impl("flash_backward", _backward, _device)


@torch.library.register_fake(f"{NAMESPACE}::flash_forward", lib=_library)  # type: ignore[untyped-decorator]
def _fake_forward(q: Tensor, k: Tensor, v: Tensor, causal: str, scale: float) -> tuple[Tensor, Tensor]:
    return rows_like(q, v.shape[-1]).empty(q.dtype, q.device), one_a_row(q).empty(torch.float32, q.device)


@torch.library.register_fake(f"{NAMESPACE}::flash_backward", lib=_library)  # type: ignore[untyped-decorator]
def _fake_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    causal: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (rows_like(x, x.shape[-1]).empty(x.dtype, x.device) for x in (q, k, v))
    return dq, dk, dv


def must_dispatch(*tensors: Tensor) -> bool:
    """Whether something other than this process's own kernels has to see the call: tracing, a mode, a subclass.

    Otherwise the operators' implementations can be called as plain functions, which spares a short sequence the cost
    of going through the dispatcher.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    if torch._C._functorch.maybe_current_level() is not None:
        return True
    return not PLAIN.issuperset(map(type, tensors))


def flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: str, scale: float) -> tuple[Tensor, Tensor]:
    """out and log-sum-exp of q (*leading, q_len, d), k, v (*leading, k_len, d or dv), at least one leading axis."""
    if must_dispatch(q, k, v):
        return torch.ops.cs336_systems.flash_forward(q, k, v, causal, scale)
    return _forward(q, k, v, causal, scale)


def flash_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    causal: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from those of out and, unless it is None, of the log-sum-exp."""
    if must_dispatch(q, k, v, out, lse, dout):
        return torch.ops.cs336_systems.flash_backward(q, k, v, out, lse, dout, dlse, causal, scale)
    return _backward(q, k, v, out, lse, dout, dlse, causal, scale)
