"""This library as an ``attn_implementation`` of transformers (5.5 or newer), for training and generation.

>>> from cs336_systems.compat import huggingface
>>> huggingface.register()
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="cs336_systems")

Causal masks, sliding windows, padding at the ends and packed sequences are passed to `attention` and `attention_varlen`
as such, without a mask of all pairs.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from ..attention import Attention, Implementation, attention, attention_varlen
from .flash_attn import flash_attn_func
from .flash_attn_varlen import flash_attn_varlen_func
from .huggingface_masks import (
    Starts,
    attention_mask,
    flash_attention_mask,
    is_cpu,
    starts_of,
    starts_of_positions,
)

NAME = "cs336_systems"
FLASH_NAME = "cs336_systems_flash"
"""For what transformers does with implementations whose names contain "flash" alone, as continuous batching."""
_NOT_PASSED = -1
_INSTEAD = "use attn_implementation='eager' instead"


def register(name: str = NAME, impl: str | Implementation = "auto") -> None:
    """Register this library with transformers as ``attn_implementation=name``, and as `FLASH_NAME`.

    Args:
        name: must not contain "flash": transformers would look for a kernel of that name.
        impl: as for `attention`.

    Raises:
        ImportError: transformers is not installed, or older than 5.5.
        TypeError, ValueError: ``impl`` or ``name`` is invalid.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    Attention(impl=impl)  # checks it
    if not isinstance(name, str) or not name or "flash" in name:
        raise ValueError(f"name must be a string without 'flash', which transformers treats specially; got {name!r}")
    for each, mask in ((name, attention_mask), (FLASH_NAME, flash_attention_mask)):
        AttentionInterface.register(each, functools.partial(attention_forward, impl=impl))
        AttentionMaskInterface.register(each, mask)
    _be_found()


def _be_found() -> None:
    """Let transformers find `FLASH_NAME` here, where it would import packages or look into its hub."""
    from transformers import modeling_flash_attention_utils as utils

    find = getattr(utils, "_lazy_imports", None)
    if find is None or hasattr(find, "finds_" + NAME):
        return

    @functools.wraps(find)
    def find_here_too(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation != FLASH_NAME:
            return find(implementation, *args, **kwargs)
        return flash_attn_func, flash_attn_varlen_func, None, utils._pad_input, utils._unpad_input

    setattr(find_here_too, "finds_" + NAME, True)
    utils._lazy_imports = find_here_too


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
    cache: Any = None,
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
        cache: a paged cache of continuous batching, which keys and values are written to and read from.
        impl: as for `attention`.
        kwargs: ``cu_seq_lens_q`` and ``cu_seq_lens_k``, (sequences + 1,), where packed sequences begin among all rows;
            ``position_ids``, (batch or 1, q_len), which are 0 where they begin.

    Returns:
        (out, None) with out (batch, q_len, q_heads, dv); probabilities are never returned.

    Raises ValueError if probabilities or a table of blocks are requested, or a layer does not pass its model's sliding
    window.
    """
    if kwargs.get("output_attentions"):
        raise ValueError(f"output_attentions must be False: probabilities are not in memory; {_INSTEAD}")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    options: dict[str, Any] = {
        "scale": scaling, "softcap": softcap, "sinks": s_aux, "dropout_p": dropout, "impl": impl,
    }  # fmt: skip
    if cache is not None:
        key, value = _through_pages(module, key, value, cache, kwargs)
        attention_mask = None
    starts = starts_of(attention_mask)
    if attention_mask is None:
        starts = _given_starts(kwargs)
        if starts is None and causal and query.shape[-2] == key.shape[-2]:
            starts = starts_of_positions(kwargs.get("position_ids"), query.shape[0])
    if starts is not None:
        if starts.is_causal is None:
            options |= {"causal": causal, "window": _window(module, sliding_window, key.shape[-2], causal)}
        return _of_sequences(query, key, value, starts, position_bias, options), None
    if attention_mask is not None and attention_mask.is_floating_point():
        options["bias"] = attention_mask if position_bias is None else attention_mask + position_bias
    else:
        options |= {"bias": position_bias, "mask": attention_mask}
    # A mask with a row per query is complete; one with a single row is the padding of the keys.
    incomplete = attention_mask is None or attention_mask.shape[-2] < query.shape[-2]
    if options.get("mask") is not None and not incomplete and options["mask"].stride(-2) == 0:
        options["mask"] = options["mask"][..., :1, :]  # the same row for all
    if incomplete and causal:
        options |= {"causal": True, "window": _window(module, sliding_window, key.shape[-2])}
    out = attention(query, key, value, **options)
    return out.transpose(1, 2).contiguous(), None


def _of_sequences(
    query: Tensor, key: Tensor, value: Tensor, starts: Starts, position_bias: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """out (batch, q_len, q_heads, dv) of sequences that are one after another in the rows of all entries.

    On a CPU each is a call, without those of padding, which get 0: torch's kernels compute what has no mask.
    """
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if position_bias is None and not is_cpu(query.device):
        out = attention_varlen(q, k, v, starts.q, starts.k, **options)
    else:
        out = _one_by_one(q, k, v, starts, position_bias, options, (query.shape[-2], key.shape[-2]))
    return out.unflatten(0, (query.shape[0], query.shape[-2]))


def _one_by_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Starts,
    position_bias: Tensor | None,
    options: dict[str, Any],
    lengths: tuple[int, int],
) -> Tensor:
    """out (rows of queries, q_heads, dv) of a call for each sequence. This waits for the device."""
    q_starts, k_starts = starts.q.tolist(), starts.k.tolist()
    q_rows, k_rows = q.shape[0], k.shape[0]
    if not (0 == q_starts[0] <= q_starts[-1] <= q_rows and 0 == k_starts[0] <= k_starts[-1] <= k_rows):
        raise ValueError(f"sequences must end at row {q_rows} of q and {k_rows} of k; got {q_starts} and {k_starts}")
    real = [1] * (len(q_starts) - 1) if starts.is_real is None else starts.is_real.tolist()
    outs: list[tuple[int, Tensor]] = []
    for number, is_real in enumerate(real):
        rows, columns = slice(*q_starts[number : number + 2]), slice(*k_starts[number : number + 2])
        if is_real and rows.start < rows.stop:
            bias = _part_of(position_bias, rows, columns, lengths)
            parts = q[rows], k[columns], v[columns]
            out = attention(*[x.transpose(0, 1)[None] for x in parts], bias=bias, **options)
            outs.append((rows.start, out[0].transpose(0, 1)))
    if not outs:
        return q.new_zeros(q_rows, q.shape[1], v.shape[-1])
    result = outs[0][1].new_zeros(q_rows, q.shape[1], v.shape[-1])
    for first, out in outs:
        result[first : first + out.shape[0]] = out
    return result


def _part_of(bias: Tensor | None, rows: slice, columns: slice, lengths: tuple[int, int]) -> Tensor | None:
    """What a bias of (batch or 1, heads or 1, q_len or 1, k_len or 1) has for a sequence, which lies in one entry."""
    if bias is None:
        return None
    entry, first = divmod(rows.start, lengths[0])
    own = [slice(entry, entry + 1), slice(None), slice(first, first + rows.stop - rows.start)]
    first = columns.start - entry * lengths[1]
    own.append(slice(first, first + columns.stop - columns.start))
    return bias[tuple(slice(None) if size == 1 else each for each, size in zip(own, bias.shape, strict=True))]


def _given_starts(kwargs: dict[str, Any]) -> Starts | None:
    """Where sequences begin, if the caller of the model says so."""
    q, k = (kwargs.get(f"cu_seq_lens_{name}") for name in "qk")
    if (q is None) != (k is None):
        given, lacking = ("q", "k") if k is None else ("k", "q")
        raise ValueError(f"cu_seq_lens_{lacking} must be given where cu_seq_lens_{given} is; got None")
    return None if q is None or k is None else Starts(q, k)


def _through_pages(
    module: nn.Module, key: Tensor, value: Tensor, cache: Any, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The keys and values of all requests, those in a paged cache too, which gets the new ones."""
    if kwargs.get("block_table") is not None:
        raise ValueError("block_table must be None: set max_blocks_per_request=0 in ContinuousBatchingConfig")
    if not hasattr(cache, "update"):
        raise TypeError(f"cache must be transformers' PagedAttentionCache; got {type(cache).__name__}")
    both: tuple[Tensor, Tensor] = cache.update(
        key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs
    )
    return both


def _window(module: nn.Module, sliding_window: int | None, k_len: int, causal: bool = True) -> tuple[int, int] | None:
    if sliding_window == _NOT_PASSED and causal:
        # Layers without a window pass none. So do some whose model has a window and applies it in the mask.
        size = getattr(getattr(module, "config", None), "sliding_window", None)
        if isinstance(size, int) and k_len > size:
            layer = type(module).__name__
            raise ValueError(f"sliding_window must be passed by {layer}, whose model has {size}; got none: {_INSTEAD}")
    if sliding_window is None or sliding_window <= 0:
        return None
    return sliding_window - 1, 0 if causal else sliding_window - 1
