"""This library as an ``attn_implementation`` of transformers (5.5 or newer), for training and generation.

>>> from cs336_systems.compat import huggingface
>>> huggingface.register()
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="cs336_systems")

If the queries are the last of the keys (in training, in a prefill, with a growing cache), causal masks, sliding windows
and padding are passed to `attention` as such, without a mask of all pairs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Attention, Implementation, attention

NAME = "cs336_systems"
_NOT_PASSED = -1
_INSTEAD = "use attn_implementation='eager' instead"


def register(name: str = NAME, impl: str | Implementation = "auto") -> None:
    """Register this library with transformers as ``attn_implementation=name``.

    Args:
        name: must not contain "flash": transformers would look for a kernel of that name on its hub.
        impl: as for `attention`.

    Raises:
        ImportError: transformers is not installed, or older than 5.5.
        TypeError, ValueError: ``impl`` or ``name`` is invalid.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    Attention(impl=impl)  # checks it
    if not isinstance(name, str) or not name or "flash" in name:
        raise ValueError(f"name must be a string without 'flash', which transformers treats specially; got {name!r}")

    AttentionInterface.register(name, functools.partial(attention_forward, impl=impl))
    AttentionMaskInterface.register(name, attention_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = _NOT_PASSED,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    impl: str | Implementation = "auto",
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with the arguments that transformers' layers pass.

    Args:
        module: the layer; its attribute ``is_causal``, or else True, replaces an ``is_causal`` of None.
        query: (batch, q_heads, q_len, d).
        key: (batch, kv_heads, k_len, d).
        value: (batch, kv_heads, k_len, dv).
        attention_mask: the result of `attention_mask`; or a mask of all pairs (batch or 1, heads or 1, q_len, k_len),
            bool or added to the scores, which then replaces ``is_causal`` and ``sliding_window``.
        dropout: probability of dropping an attention probability.
        scaling: multiplies the scores; 1 / sqrt(d) if None.
        sliding_window: number of keys that a query of a causal layer attends to, its own included.
        softcap: replaces scores by softcap * tanh(score / softcap).
        s_aux: (q_heads,), the sinks.
        position_bias: is added to the scores; broadcasts to (batch, q_heads, q_len, k_len).
        impl: as for `attention`.

    Returns:
        (out, None) with out (batch, q_len, q_heads, dv); probabilities are never returned.

    Raises ValueError if probabilities or a paged cache are requested, or a layer does not pass its model's sliding
    window.
    """
    for name in ("output_attentions", "cache"):
        if kwargs.get(name) not in (None, False):
            raise ValueError(f"{name} must be None or False; got {type(kwargs[name]).__name__}: {_INSTEAD}")
    options: dict[str, Any] = {"bias": position_bias}
    if attention_mask is not None and attention_mask.is_floating_point():
        options["bias"] = attention_mask if position_bias is None else attention_mask + position_bias
    else:
        options["mask"] = attention_mask
    # A mask with a row per query is complete; one with a single row is the padding of the keys.
    incomplete = attention_mask is None or attention_mask.shape[-2] < query.shape[-2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if incomplete and causal:
        options |= {"causal": True, "window": _window(module, sliding_window, key.shape[-2])}
    out = attention(
        query, key, value, **options, scale=scaling, softcap=softcap, sinks=s_aux, dropout_p=dropout, impl=impl
    )
    return out.transpose(1, 2).contiguous(), None


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of a forward pass, for `attention_forward`; transformers calls it once for each type of layer.

    Args:
        q_length, kv_length: numbers of queries and keys.
        q_offset, kv_offset: positions of the first query and key; with a static cache q_offset is a tensor.
        mask_function: which pairs are visible, besides padding.
        attention_mask: (batch, length) bools, False for padding.
        allow_is_causal_skip: whether ``mask_function`` is a causal mask, with or without a sliding window.

    Returns:
        None, if the causal mask and the layer's window are enough; bools (batch, 1, 1, kv_length) for padding besides
        these and several queries; otherwise bools (batch, 1, q_length, kv_length), True for visible pairs.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    # A static cache has unused slots after the queries.
    ends_together = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if allow_is_causal_skip and ends_together:
        if attention_mask is None:
            return None
        padding = attention_mask[:, kv_offset : kv_offset + kv_length]
        if padding.shape[1] == kv_length:
            # A compiled graph cannot depend on the mask's values.
            if not torch.compiler.is_compiling() and bool(padding.all()):
                return None
            if q_length > 1:
                return padding[:, None, None]
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function or causal_mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        **kwargs,
    )


def _window(module: nn.Module, sliding_window: int | None, k_len: int) -> tuple[int, int] | None:
    if sliding_window == _NOT_PASSED:
        # Layers without a window pass none. So do some whose model has a window and applies it in the mask.
        size = getattr(getattr(module, "config", None), "sliding_window", None)
        if isinstance(size, int) and k_len > size:
            layer = type(module).__name__
            raise ValueError(f"sliding_window must be passed by {layer}, whose model has {size}; got none: {_INSTEAD}")
    return (sliding_window - 1, 0) if sliding_window is not None and sliding_window > 0 else None
