"""The functions of the package ``flash_attn``, version 2, computed by this library, and `install` to replace it.

>>> from cs336_systems.compat.flash_attn import flash_attn_func
>>> out = flash_attn_func(q, k, v, causal=True)  # (batch, length, heads, d)

>>> with install():
...     from flash_attn import flash_attn_func  # the same

Tensors are (batch, length, heads, d), or (total length, heads, d) for packed sequences, and may be views. Besides
float16 and bfloat16 they may be float32 and float64, and they may be on the CPU.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from jaxtyping import Float
from torch import Tensor

from ..attention import attention
from . import flash_attn_padding as padding
from . import flash_attn_rotary as rotary
from .arguments import Number, Pair, check_shape, to_options
from .flash_attn_cache import flash_attn_with_kvcache
from .flash_attn_varlen import (
    Returned,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__version__ = "2.8.3"
"""The version of ``flash_attn`` that has these arguments."""

PACKAGE = "flash_attn"
_MARK = "__computed_by_cs336_systems__"


def flash_attn_func(
    q: Float[Tensor, "batch q_len q_heads d"],
    k: Float[Tensor, "batch k_len kv_heads d"],
    v: Float[Tensor, "batch k_len kv_heads dv"],
    dropout_p: Number = 0.0,
    softmax_scale: Number | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: Number = 0.0,
    alibi_slopes: Float[Tensor, "*batch q_heads"] | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """softmax(q kᵀ · softmax_scale) v.

    Args:
        q: queries (batch, q_len, q_heads, d).
        k: keys (batch, k_len, kv_heads, d); kv_heads divides q_heads.
        v: values (batch, k_len, kv_heads, dv); dv may differ from d.
        dropout_p: probability of dropping an attention probability; applied in evaluation mode too.
        softmax_scale: multiplies the scores; 1 / sqrt(d) if None.
        causal: whether to mask keys after the query; the last query is aligned with the last key.
        window_size: (left, right), the numbers of keys before and after its own position that a query attends to,
            aligned as for ``causal``; -1 for all. A tuple, a list, or a tensor or an array of two integers.
        softcap: replaces scores by softcap * tanh(score / softcap), unless it is 0.
        alibi_slopes: (q_heads,) or (batch, q_heads); subtracts slope * |distance| from the scores.
        deterministic: whether gradients must be the same in every run; see `attention`.
        return_attn_probs: also return the log-sum-exp, and None for the probabilities.

    Numbers may also be NumPy's, or tensors of one element, which are read with a host synchronisation.

    Returns:
        out (batch, q_len, q_heads, dv), contiguous, in q's dtype; or (out, softmax_lse, S_dmask) with softmax_lse
        (batch, q_heads, q_len) in float32 (float64 for float64 inputs) and S_dmask None. A query whose keys are all
        masked gets 0 and -inf.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape, a device or a value is invalid.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_shape(name, x, "batch", "length", "heads", "d")
    options = to_options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    result = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options)
    out, lse = (result, None) if isinstance(result, Tensor) else result
    # Copies nothing where the kernels ran: they write rows in q's order.
    out = out.transpose(1, 2).contiguous()
    return out if lse is None else (out, lse, None)


def flash_attn_qkvpacked_func(
    qkv: Float[Tensor, "batch length 3 heads d"],
    dropout_p: Number = 0.0,
    softmax_scale: Number | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: Number = 0.0,
    alibi_slopes: Float[Tensor, "*batch heads"] | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """`flash_attn_func` for queries, keys and values in one tensor (batch, length, 3, heads, d)."""
    check_shape("qkv", qkv, "batch", "length", 3, "heads", "d")
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *options)


def flash_attn_kvpacked_func(
    q: Float[Tensor, "batch q_len q_heads d"],
    kv: Float[Tensor, "batch k_len 2 kv_heads d"],
    dropout_p: Number = 0.0,
    softmax_scale: Number | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: Number = 0.0,
    alibi_slopes: Float[Tensor, "*batch q_heads"] | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """`flash_attn_func` for keys and values in one tensor (batch, k_len, 2, kv_heads, d)."""
    check_shape("kv", kv, "batch", "length", 2, "heads", "d")
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *options)


def install(*, force: bool = False) -> ExitStack:
    """Make ``import flash_attn`` find these functions, and its modules of `MODULES` theirs.

    Importing anything else of the real package then raises ImportError, as if it were not built.

    Args:
        force: also replace the real package if it has been imported. References to its functions stay as they are.

    Returns:
        An ExitStack that restores the previous state: at the end of a ``with`` statement, or by ``close()``.

    Raises RuntimeError if the real ``flash_attn`` has been imported, and ``force`` is False.
    """
    real = sys.modules.get(PACKAGE)
    if real is not None and not hasattr(real, _MARK) and not force:
        file = getattr(real, "__file__", None)
        raise RuntimeError(f"{PACKAGE} must not be imported before, unless force is True; got the package in {file}")
    names = [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]
    before = {name: sys.modules.pop(name) for name in names}
    ours = _modules()
    sys.modules.update(ours)
    undo = ExitStack()
    undo.callback(sys.modules.update, before)
    for name in ours:
        undo.callback(sys.modules.pop, name, None)
    return undo


_FUNCTIONS = (
    *(flash_attn_func, flash_attn_qkvpacked_func, flash_attn_kvpacked_func),
    *(flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func, flash_attn_varlen_kvpacked_func),
    flash_attn_with_kvcache,
)
MODULES: dict[str, tuple[Any, ...]] = {
    "": _FUNCTIONS,
    "flash_attn_interface": _FUNCTIONS,
    "bert_padding": (
        *(padding.unpad_input, padding.unpad_input_for_concatenated_sequences, padding.pad_input),
        *(padding.index_first_axis, padding.index_put_first_axis),
    ),
    "layers": (),
    "layers.rotary": (rotary.apply_rotary_emb, rotary.apply_rotary_emb_torch),
}
"""The functions of each module of the package, a package before its modules."""


def _modules() -> dict[str, ModuleType]:
    """The package and its modules by their full names, each an attribute of its parent."""
    made: dict[str, ModuleType] = {}
    for name, functions in MODULES.items():
        full = f"{PACKAGE}.{name}" if name else PACKAGE
        module = made[full] = ModuleType(full, __doc__)
        # importlib.util.find_spec raises for a module without a spec.
        module.__spec__ = ModuleSpec(full, None, origin=__file__)
        module.__dict__.update({_MARK: True, **{function.__name__: function for function in functions}})
        parent, _, last = full.rpartition(".")
        if parent:
            made[parent].__dict__.update({"__path__": [], last: module})
    made[PACKAGE].__dict__["__version__"] = __version__
    return made
