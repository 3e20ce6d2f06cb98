"""This library in torch's registry of flash attention: the kernels of ``scaled_dot_product_attention`` on CUDA GPUs.

>>> from cs336_systems.compat import sdpa
>>> sdpa.activate()  # at the top of a program
>>> out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

Unlike `sdpa.replaced`, which replaces a Python function, this replaces operators of torch's dispatcher: callers in C++,
names that are bound already, and torch.compile reach them too.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ..attention import dispatch
from ..attention.call import Arguments, make_call
from ..attention.functions import NO_WANTED, Plan
from ..attention.validation import check_tensors, shape_of
from ..attention.varlen import as_heads, packed_sequences
from ..kernels.call import Call
from .arguments import to_window

NAME = "cs336_systems"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
Gradients = tuple[Tensor, Tensor, Tensor]


def activate() -> None:
    """Let the flash backend of torch's ``scaled_dot_product_attention`` run this library's kernels on CUDA GPUs.

    The same as ``torch.nn.attention.activate_flash_attention_impl("cs336_systems")``. It also turns torch's cuDNN
    backend off, which torch prefers to flash on Hopper GPUs and newer, until `restore`.
    """
    torch.nn.attention.activate_flash_attention_impl(NAME)


def restore() -> None:
    """Let torch run its own kernels again, and cuDNN's if it did before.

    The same as ``torch.nn.attention.restore_flash_attention_impl()``.
    """
    torch.nn.attention.restore_flash_attention_impl()


class Handle:
    """Keeps the operators replaced, until `remove`.

    Args:
        key: the dispatch key; "CPU" is for tests.
        impl: "flash", or "tiled" for tests.
    """

    def __init__(self, key: str = "CUDA", impl: str = "flash") -> None:
        self.cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        operators = Operators(impl)
        self.library: torch.library.Library | None = torch.library.Library("aten", "IMPL", key)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*other operators may also be overridden", UserWarning)
            for name in NAMES:
                self.library.impl(name, getattr(operators, name), key)
        torch.backends.cuda.enable_cudnn_sdp(False)

    def remove(self) -> None:
        """Restore what was there before."""
        self.library = None  # torch takes the operators back when the last reference goes
        torch.backends.cuda.enable_cudnn_sdp(self.cudnn)


class Operators:
    """The operators of aten that a provider of flash attention replaces, with aten's arguments.

    q is (batch, q_len, heads, d), or (all rows, heads, d) with ``cum_seq_q``; in the ``_scaled_dot_product`` ones
    (batch, heads, q_len, d). k and v may have fewer heads, and have q's d. ``is_causal`` aligns the last query with
    the last key: torch's ``scaled_dot_product_attention`` calls these operators with lengths that are equal.

    Raise what `attention` does, and ValueError for arguments that this library does not compute.
    """

    def __init__(self, impl: str) -> None:
        self.impl = impl

    def _flash_attention_forward(
        self, query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None,
        max_q: int, max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *,
        scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
        seqused_k: Tensor | None = None, alibi_slopes: Tensor | None = None, block_table: Tensor | None = None,
        num_splits: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """(out, lse, seed, an unused tensor, an empty one); lse (batch, heads, q_len), or (heads, all rows)."""
        # The backward is not given alibi_slopes. No kernel splits keys, whatever num_splits says.
        _refuse(seqused_k=seqused_k, block_table=block_table, alibi_slopes=alibi_slopes)
        seed, unused, debug_mask = _others(query, dropout_p, return_debug_mask)
        arguments = _arguments(is_causal, scale, dropout_p, window_size_left, window_size_right, seed)
        call, plan = self._plan(query, key, value, cum_seq_q, cum_seq_k, arguments)
        out, lse = plan.forward(call.q, call.k, call.v, call.aux)
        if cum_seq_q is not None:
            out, lse = out[0], lse[0]
        return _laid_out(out.transpose(-3, -2), query), lse, seed, unused, debug_mask

    def _flash_attention_forward_no_dropout_inplace(
        self, out: Tensor, query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        """lse; out is written into ``out``."""
        if dropout_p != 0:
            raise ValueError(f"dropout_p must be 0 where out is given; got {dropout_p}")
        shared = (cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask)
        result, lse, *_ = self._flash_attention_forward(query, key, value, *shared, **options)
        if out.shape != result.shape or out.dtype != result.dtype:
            expected, got = (f"{shape_of(x)} {x.dtype}" for x in (result, out))
            raise ValueError(f"out must be {expected} to match query; got {got}")
        out.copy_(result)
        return lse

    def _flash_attention_backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
        cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
        rng_state: Tensor, unused: Tensor, *, scale: float | None = None, window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> Gradients:  # fmt: skip
        """The gradients of query, key and value."""
        arguments = _arguments(is_causal, scale, dropout_p, window_size_left, window_size_right, rng_state)
        call, plan = self._plan(query, key, value, cum_seq_q, cum_seq_k, arguments)
        out, grad_out = out.transpose(-3, -2), grad_out.transpose(-3, -2)
        if cum_seq_q is None:
            dq, dk, dv = _backward(plan, call, out, logsumexp, grad_out)
        else:
            dq, dk, dv = (x[0] for x in _backward(plan, call, out[None], logsumexp[None], grad_out[None]))
        dq, dk, dv = (x.transpose(-3, -2) for x in (dq, dk, dv))
        return _laid_out(dq, query), _laid_out(dk, key), _laid_out(dv, value)

    def _scaled_dot_product_flash_attention(
        self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
        return_debug_mask: bool = False, *, scale: float | None = None,
    ) -> tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, Tensor]:  # fmt: skip
        """(out, lse, None, None, q_len, k_len, seed, an unused tensor, an empty one); lse (batch, heads, q_len)."""
        seed, unused, debug_mask = _others(query, dropout_p, return_debug_mask)
        call, plan = self._plan_of_heads(query, key, value, _arguments(is_causal, scale, dropout_p, seed=seed))
        out, lse = plan.forward(call.q, call.k, call.v, call.aux)
        lengths = query.shape[-2], key.shape[-2]
        return _laid_out(out, query), lse, None, None, *lengths, seed, unused, debug_mask

    def _scaled_dot_product_flash_attention_backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
        cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
        philox_seed: Tensor, philox_offset: Tensor, *, scale: float | None = None,
    ) -> Gradients:  # fmt: skip
        """The gradients of query, key and value."""
        call, plan = self._plan_of_heads(query, key, value, _arguments(is_causal, scale, dropout_p, seed=philox_seed))
        dq, dk, dv = _backward(plan, call, out, logsumexp, grad_out)
        return _laid_out(dq, query), _laid_out(dk, key), _laid_out(dv, value)

    def _plan(
        self, q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor | None, k_starts: Tensor | None, arguments: Arguments
    ) -> tuple[Call, Plan]:
        _check(q, v, 4 if q_starts is None else 3)
        if q_starts is None:
            call = make_call(q.transpose(-3, -2), k.transpose(-3, -2), v.transpose(-3, -2), arguments)
            return call, dispatch.eager_plan(self.impl, call)
        if k_starts is None:
            raise ValueError("cum_seq_k must be given where cum_seq_q is; got None")
        # Nothing needs bounds for the lengths, and without them other lengths need no other plan.
        packed = packed_sequences(q, k, v, q_starts, k_starts, None, None, None)
        call = make_call(*as_heads(q, k, v), arguments, packed)
        return call, dispatch.eager_plan(self.impl, call)

    def _plan_of_heads(self, q: Tensor, k: Tensor, v: Tensor, arguments: Arguments) -> tuple[Call, Plan]:
        _check(q, v, 4)
        call = make_call(q, k, v, arguments)
        return call, dispatch.eager_plan(self.impl, call)


NAMES = [name for name in vars(Operators) if name.startswith(("_flash", "_scaled")) and hasattr(torch.ops.aten, name)]


def _check(q: Tensor, v: Tensor, ndim: int) -> None:
    """torch takes out to be like query, and the log-sum-exp to be float32."""
    check_tensors(query=q, value=v)
    if q.dtype not in DTYPES:
        raise TypeError(f"query must be float16, bfloat16 or float32; got {q.dtype}")
    if q.ndim != ndim:
        raise ValueError(f"query must have 4 dimensions, or 3 with cum_seq_q; got {shape_of(q)}")
    if v.shape[-1] != q.shape[-1]:
        raise ValueError(f"value must have the head dimension of query, {q.shape[-1]}; got {shape_of(v)}")


def _refuse(**arguments: Tensor | None) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name} must be None; got a tensor of shape {shape_of(value)}")


def _others(query: Tensor, dropout_p: float, return_debug_mask: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The seed, (2,) uint64 of which the first is used; the unused tensor; and the debug mask, which is empty."""
    if return_debug_mask:
        raise ValueError("return_debug_mask must be False; got True")
    if dropout_p == 0:
        seed = query.new_empty(2, dtype=torch.int64)
    else:
        seed = torch.randint(-(2**63), 2**63 - 1, (2,), device=query.device)
    return seed.view(torch.uint64), query.new_empty((), dtype=torch.uint64), query.new_empty(0)


def _arguments(
    is_causal: bool, scale: float | None, dropout_p: float, left: int | None = None, right: int | None = None,
    seed: Tensor | None = None,
) -> Arguments:  # fmt: skip
    window = to_window((-1 if left is None else left, -1 if right is None else right))
    if dropout_p == 0 or seed is None:
        return Arguments(is_causal, window, scale)
    return Arguments(is_causal, window, scale, dropout_p=dropout_p, seed=seed.view(torch.int64)[:1])


def _backward(plan: Plan, call: Call, out: Tensor, lse: Tensor, dout: Tensor) -> Gradients:
    out = out if out.stride(-1) == 1 else out.contiguous()
    gradients = plan.backward(call.q, call.k, call.v, out, lse.contiguous(), dout, None, call.aux, NO_WANTED)
    return gradients.q, gradients.k, gradients.v


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """x, with the strides that torch.compile expects: those of ``empty_like(like)``."""
    strides = torch.empty_like(like, device="meta").stride()
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


torch.nn.attention.register_flash_attention_impl(NAME, register_fn=Handle)
