"""torch's ``scaled_dot_product_attention``, computed by this library, and two ways to redirect calls to it.

>>> with replaced():  # any device and dtype
...     out = model(inputs)  # torch.nn.functional.scaled_dot_product_attention is this library's
>>> activate()  # CUDA GPUs: the kernels behind torch's function are this library's
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

from ..attention import Attention, Implementation, attention
from .arguments import check_tensor
from .torch_registry import activate as activate
from .torch_registry import restore as restore


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
    """``torch.nn.functional.scaled_dot_product_attention``, computed by `attention`.

    A query whose keys are all masked gets 0 and zero gradients on every device, where torch's kernels return 0 or NaN.
    Dropout uses torch's generator, but drops other elements than torch's kernels. Tensors may be float16, bfloat16,
    float32 or float64.

    Args:
        query: (*batch, q_len, d). The batch axes of the three tensors broadcast. With four or more dimensions the last
            batch axis is the heads.
        key: (*batch, k_len, d).
        value: (*batch, k_len, dv).
        attn_mask: broadcasts to (*batch, q_len, k_len): a bool tensor, True where a query attends to a key; a floating-
            point tensor that is added to the scores and may require a gradient; or torch's ``CausalBias``.
        dropout_p: probability of dropping an attention probability; applied in evaluation mode too.
        is_causal: whether to mask keys after the query; the first query is aligned with the first key. Excludes
            ``attn_mask``.
        scale: multiplies the scores; 1 / sqrt(d) if None.
        enable_gqa: whether key and value may have fewer heads than query; their number divides query's.
        impl: as for `attention`; not an argument of torch's function.

    Returns:
        (*batch, q_len, dv) in query's dtype, or autocast's.

    Raises:
        RuntimeError: shapes do not broadcast, or ``attn_mask`` and ``is_causal`` are both given, as in torch.
        TypeError: an argument has the wrong type or dtype.
        ValueError: another shape, a device or a value is invalid.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x)
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be a bool; got {flag!r} of type {type(flag).__name__}")
    if is_causal and attn_mask is not None:
        raise RuntimeError(f"attn_mask must be None where is_causal is True; got {_describe(attn_mask)}")
    q, k, v = _broadcast(query, key, value, enable_gqa)
    # `attention` takes the first of three axes for the batch; with enable_gqa it is the heads.
    without_batch = enable_gqa and q.ndim == 3
    if without_batch:
        q, k, v = q[None], k[None], v[None]
    mask = {"causal": "top_left"} if is_causal else _mask_options(attn_mask, (*q.shape[:-1], k.shape[-2]))
    out = attention(q, k, v, **mask, dropout_p=dropout_p, scale=scale, impl=impl)
    if q.dtype != query.dtype:
        out = out.to(query.dtype)
    return out[0] if without_batch else out


@contextmanager
def replaced(impl: str | Implementation = "auto") -> Iterator[None]:
    """Replace ``torch.nn.functional.scaled_dot_product_attention`` in all threads; a context manager or a decorator.

    This affects calls that look the function up in ``torch.nn.functional``, such as
    ``F.scaled_dot_product_attention(...)`` and those of ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer``.
    It does not affect names bound to torch's function before, as by
    ``from torch.nn.functional import scaled_dot_product_attention``, and code that does not call the function: C++, and
    ``nn.MultiheadAttention`` if it returns weights, or in evaluation mode without gradients, where torch fuses whole
    layers. The previous function is restored at the end, also after an exception. ``impl`` is as for `attention`.

    Raises TypeError or ValueError if ``impl`` is invalid.
    """
    Attention(impl=impl)  # checks it
    before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = functools.partial(scaled_dot_product_attention, impl=impl)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before


def _broadcast(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the tensors with the same batch axes, apart from grouped heads.

    As in torch, 16-bit tensors become float32 if one that broadcasts requires a gradient, which is a sum over the batch
    and would otherwise round each of its terms.
    """
    last = 3 if grouped else 2
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.ndim < last:
            raise RuntimeError(f"{name} must have an axis of heads where enable_gqa is True; got {tuple(x.shape)}")
    if q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
        return q, k, v
    try:
        batch = torch.broadcast_shapes(q.shape[:-last], k.shape[:-last], v.shape[:-last])
    except RuntimeError as error:
        hint = "" if grouped else ", and enable_gqa must be True for grouped heads"
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise RuntimeError(
            f"the axes before the last {last} of query, key and value must broadcast{hint}; got {shapes}"
        ) from error
    sums = torch.is_grad_enabled() and any(x.requires_grad and x.shape[:-last] != batch for x in (q, k, v))
    is_16_bit = q.dtype == k.dtype == v.dtype and q.dtype.itemsize == 2
    if sums and is_16_bit and not torch.is_autocast_enabled(q.device.type):
        q, k, v = q.float(), k.float(), v.float()
    q, k, v = (x.expand(*batch, *x.shape[-last:]) for x in (q, k, v))
    return q, k, v


def _mask_options(attn_mask: Tensor | None, shape: tuple[int, ...]) -> dict[str, Any]:
    """The options of `attention` for an ``attn_mask`` of scores of this shape."""
    if attn_mask is None:
        return {}
    if isinstance(attn_mask, CausalBias):
        sizes = attn_mask.seq_len_q, attn_mask.seq_len_kv
        if sizes != shape[-2:]:
            raise RuntimeError(f"attn_mask must be a CausalBias of sizes {shape[-2:]}; got {sizes}")
        return {"causal": "top_left" if attn_mask.variant == CausalVariant.UPPER_LEFT else "bottom_right"}
    if not isinstance(attn_mask, Tensor) or not (attn_mask.dtype == torch.bool or attn_mask.is_floating_point()):
        raise TypeError(f"attn_mask must be a tensor of bools or floating-point numbers; got {_describe(attn_mask)}")
    axes = (1,) * (len(shape) - attn_mask.ndim) + tuple(attn_mask.shape)
    if len(axes) != len(shape) or any(size not in (1, full) for size, full in zip(axes, shape, strict=True)):
        raise RuntimeError(f"attn_mask must have a shape that broadcasts to {shape}; got {tuple(attn_mask.shape)}")
    return {"mask" if attn_mask.dtype == torch.bool else "bias": attn_mask}


def _describe(value: object) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
