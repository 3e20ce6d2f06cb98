"""This library as an ``attn_implementation`` of transformers, for training and generation.

>>> from cs336_systems.compat import huggingface
>>> huggingface.register()
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="cs336_systems")

Causality, sliding windows and padding reach the kernels as such, without a mask of all pairs, wherever the queries are
the last of the keys: in training, in a prefill, and with a cache that grows. Needs transformers 5.5 or newer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Implementation, attention
from ..attention.dispatch import parse

NAME = "cs336_systems"
_UNKNOWN = -1
_INSTEAD = "for what this implementation cannot do, use attn_implementation='eager'"


def register(name: str = NAME, impl: str | Implementation = "auto") -> None:
    """Make ``attn_implementation=name`` known to transformers.

    Args:
        name: must not contain "flash": transformers would look on its hub for a kernel of that name.
        impl: as `attention` takes it.

    Raises:
        ImportError: transformers is not installed, or older than 5.5.
        TypeError, ValueError: ``impl`` is none, or the name is of no use.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    parse(impl)
    if not isinstance(name, str) or not name or "flash" in name:
        expected = "name must be a text without 'flash' in it, which transformers has other plans for"
        raise ValueError(f"{expected}; got {name!r}")

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
    sliding_window: int | None = _UNKNOWN,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    impl: str | Implementation = "auto",
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as the layers of transformers ask for it.

    Args:
        module: the layer; ``is_causal`` is its attribute of that name, or True, if None.
        query: (batch, q_heads, q_len, d).
        key: (batch, kv_heads, k_len, d).
        value: (batch, kv_heads, k_len, dv).
        attention_mask: what `attention_mask` gave, or a mask of all pairs (batch or 1, heads or 1, q_len, k_len), bool
            or added to scores, which then says all that there is to say.
        dropout: the probability that a weight is set to 0.
        scaling: what scores are multiplied by; 1 / sqrt(d) if None.
        sliding_window: how many keys, its own among them, a query of a causal layer sees.
        softcap: bounds scores by softcap * tanh(score / softcap).
        s_aux: (q_heads,), the sinks.
        position_bias: is added to scores; broadcasts to (batch, q_heads, q_len, k_len).
        impl: as `attention` takes it.

    Returns:
        (out, None) with out (batch, q_len, q_heads, dv): weights are never there to be returned.

    Raises:
        ValueError: the weights or a paged cache are asked for, or a layer keeps its sliding window to itself.
    """
    for name in ("output_attentions", "cache"):
        if kwargs.get(name) not in (None, False):
            raise ValueError(f"{name} must be None or False: {_INSTEAD}; got {type(kwargs[name]).__name__}")
    masks: dict[str, Any] = {"bias": position_bias}
    if attention_mask is not None and attention_mask.is_floating_point():
        masks["bias"] = attention_mask if position_bias is None else attention_mask + position_bias
    else:
        masks["mask"] = attention_mask
    # A mask with a row for each query says it all. Without, it is the padding alone.
    if attention_mask is None or attention_mask.shape[-2] < query.shape[-2]:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if causal:
            masks |= {"causal": True, "window": _window(module, sliding_window, key.shape[-2])}
    out = attention(
        query, key, value, **masks, scale=scaling, softcap=softcap, sinks=s_aux, dropout_p=dropout, impl=impl
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
    """The mask of a forward pass, for `attention_forward`; transformers calls it once for each kind of layer.

    Args:
        q_length, kv_length: the numbers of queries and keys.
        q_offset, kv_offset: the positions of the first of each; of a static cache a tensor.
        mask_function: which pairs are visible, besides padding.
        attention_mask: (batch, length) bools, False where a position is padding.
        allow_is_causal_skip: whether ``mask_function`` is plain causality, or that and a sliding window.

    Returns:
        None, if causality and the layer's window say it all; bools (batch, 1, 1, kv_length) if padding comes on top of
        these and there are several queries; else bools (batch, 1, q_length, kv_length), True for what is visible.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    # In a static cache, keys that are not there yet come after the queries.
    ends_together = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if allow_is_causal_skip and ends_together:
        if attention_mask is None:
            return None
        padding = attention_mask[:, kv_offset : kv_offset + kv_length]
        if padding.shape[1] == kv_length:
            # What a graph does cannot depend on the mask's values.
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
    if sliding_window == _UNKNOWN:
        # A layer that hands none on has none, unless its model has one and built the mask for it.
        size = getattr(getattr(module, "config", None), "sliding_window", None)
        if isinstance(size, int) and k_len > size:
            raise ValueError(
                f"sliding_window must be handed on by {type(module).__name__}, whose model has one of {size}; "
                f"got none: {_INSTEAD}"
            )
    return (sliding_window - 1, 0) if sliding_window is not None and sliding_window > 0 else None
