"""torch's ``scaled_dot_product_attention``, computed by this library, and a way to take its place.

>>> with replaced():
...     out = model(inputs)  # its calls of torch.nn.functional.scaled_dot_product_attention come here
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from ..attention import Implementation, attention
from ..attention.dispatch import parse
from ..attention.validation import check_tensors, shape_of


def scaled_dot_product_attention(
    query: Float[Tensor, "*batch q_len d"],
    key: Float[Tensor, "*batch k_len d"],
    value: Float[Tensor, "*batch k_len dv"],
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    impl: str | Implementation = "auto",
) -> Float[Tensor, "*batch q_len dv"]:
    """What ``torch.nn.functional.scaled_dot_product_attention`` computes.

    A query that sees no key gets 0 and gives no gradient, on every device, where torch's kernels return 0 or NaN.
    Dropout draws other numbers than torch's, from the same generator. Tensors may be float16, bfloat16, float32 or
    float64.

    Args:
        query: (*batch, q_len, d). The batch axes of the three broadcast against each other; with four dimensions or
            more the last of them is that of heads.
        key: (*batch, k_len, d).
        value: (*batch, k_len, dv).
        attn_mask: broadcasts to (*batch, q_len, k_len): a bool tensor, True where a query sees a key, or floating-point
            numbers that are added to scores and may need a gradient. torch's ``CausalBias`` is taken as what it says.
        dropout_p: the probability that a weight is set to 0: always, for this function knows no evaluation mode.
        is_causal: hides what comes after a query, the first query aligned with the first key. Excludes ``attn_mask``.
        scale: what scores are multiplied by; 1 / sqrt(d) if None.
        enable_gqa: whether each head of key and value may serve several of query, whose number theirs divides.
        impl: as `attention` takes it; not among torch's arguments.

    Returns:
        (*batch, q_len, dv) in query's dtype, or autocast's.

    Raises:
        RuntimeError: shapes do not broadcast, or ``attn_mask`` and ``is_causal`` are both given; torch raises the same.
        TypeError: an argument has the wrong type or dtype.
        ValueError: another shape, a device or a value does not fit.
    """
    check_tensors(query=query, key=key, value=value)
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be a bool; got {flag!r} of type {type(flag).__name__}")
    if is_causal and attn_mask is not None:
        raise RuntimeError(f"attn_mask must be None where is_causal is True; got {_described(attn_mask)}")
    q, k, v = _broadcast(query, key, value, enable_gqa)
    # Without a batch axis the first of three would be taken for one, where it is that of grouped heads.
    lone = enable_gqa and q.ndim == 3
    if lone:
        q, k, v = q[None], k[None], v[None]
    masks = {"causal": "top_left"} if is_causal else _masks(attn_mask, (*q.shape[:-1], k.shape[-2]))
    out = attention(q, k, v, **masks, dropout_p=dropout_p, scale=scale, impl=impl)
    if q.dtype != query.dtype:
        out = out.to(query.dtype)
    return out[0] if lone else out


@contextmanager
def replaced(impl: str | Implementation = "auto") -> Iterator[None]:
    """Inside, ``torch.nn.functional.scaled_dot_product_attention`` is this module's, for all threads; also a decorator.

    That reaches every call that looks the name up in ``torch.nn.functional`` when it is made, such as
    ``F.scaled_dot_product_attention(...)`` and those of ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer``.
    Out of reach are names bound to the function itself before, as by
    ``from torch.nn.functional import scaled_dot_product_attention``, and what computes attention without it: C++, and
    ``nn.MultiheadAttention`` when it is asked for weights, or in evaluation mode without gradients, where torch has a
    fused operator for whole layers. What was there before comes back at the end, also after an exception.

    Args:
        impl: as `attention` takes it, for every call inside.

    Raises:
        TypeError, ValueError: ``impl`` is none.
    """
    parse(impl)
    before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = functools.partial(scaled_dot_product_attention, impl=impl)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before


def _broadcast(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors as views with the same batch axes, but for the heads where they are grouped.

    In float32 where the gradient of a broadcast one of 16 bits is wanted, as in torch: it is a sum over the batch, and
    each of its terms would be rounded to 16 bits before.
    """
    own = 3 if grouped else 2
    for name, tensor in (("query", q), ("key", k), ("value", v)):
        if tensor.ndim < own:
            raise RuntimeError(f"{name} must have an axis of heads where enable_gqa is True; got {shape_of(tensor)}")
    if q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
        return q, k, v
    try:
        batch = torch.broadcast_shapes(q.shape[:-own], k.shape[:-own], v.shape[:-own])
    except RuntimeError as error:
        hint = "" if grouped else ", and enable_gqa must be True for grouped heads"
        got = ", ".join(map(shape_of, (q, k, v)))
        raise RuntimeError(
            f"the axes before query's, key's and value's last {own} must broadcast{hint}; got {got}"
        ) from error
    summed = torch.is_grad_enabled() and any(x.requires_grad and x.shape[:-own] != batch for x in (q, k, v))
    narrow = q.dtype == k.dtype == v.dtype and q.dtype.itemsize == 2
    if summed and narrow and not torch.is_autocast_enabled(q.device.type):
        q, k, v = q.float(), k.float(), v.float()
    q, k, v = (x.expand(*batch, *x.shape[-own:]) for x in (q, k, v))
    return q, k, v


def _masks(attn_mask: Tensor | None, shape: tuple[int, ...]) -> dict[str, Any]:
    """The arguments of `attention` that say the same, for scores of this shape."""
    if attn_mask is None:
        return {}
    if isinstance(attn_mask, CausalBias):
        sizes = attn_mask.seq_len_q, attn_mask.seq_len_kv
        if sizes != shape[-2:]:
            raise RuntimeError(f"attn_mask must be a CausalBias of sizes {shape[-2:]}; got {sizes}")
        return {"causal": "top_left" if attn_mask.variant == CausalVariant.UPPER_LEFT else "bottom_right"}
    if not isinstance(attn_mask, Tensor) or not (attn_mask.dtype == torch.bool or attn_mask.is_floating_point()):
        raise TypeError(f"attn_mask must be a tensor of bools or floating-point numbers; got {_described(attn_mask)}")
    own = (1,) * (len(shape) - attn_mask.ndim) + tuple(attn_mask.shape)
    if len(own) != len(shape) or any(size not in (1, full) for size, full in zip(own, shape, strict=True)):
        raise RuntimeError(f"attn_mask must have a shape that broadcasts to {shape}; got {shape_of(attn_mask)}")
    return {"mask" if attn_mask.dtype == torch.bool else "bias": attn_mask}


def _described(value: object) -> str:
    return f"{shape_of(value)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
