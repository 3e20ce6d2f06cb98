"""The functions of the package ``flash_attn``, version 2, computed by this library, and a way to stand in for it.

>>> from cs336_systems.compat.flash_attn import flash_attn_func
>>> out = flash_attn_func(q, k, v, causal=True)  # (batch, length, heads, d)

>>> with install():
...     from flash_attn import flash_attn_func  # the same

Tensors are (batch, length, heads, d), or (all tokens, heads, d) of packed sequences, and views of them are what is
computed on. Besides float16 and bfloat16 they may
be float32 and float64, and besides a GPU they may be on the CPU.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from importlib.machinery import ModuleSpec
from types import ModuleType

from jaxtyping import Float
from torch import Tensor

from ..attention import attention
from ..attention.validation import check_tensors, shape_of
from .arguments import Number, Pair, parts, settings_of
from .flash_attn_varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__version__ = "2.8.3"
"""The version of ``flash_attn`` that has these arguments."""

PACKAGE = "flash_attn"
_OURS = "__computed_by_cs336_systems__"

Returned = Tensor | tuple[Tensor, Tensor, None]


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
        dropout_p: the probability that a weight is set to 0: always, for this function knows no evaluation mode.
        softmax_scale: what scores are multiplied by; 1 / sqrt(d) if None.
        causal: hides what comes after a query, the last query aligned with the last key.
        window_size: (left, right), how many keys before and after its own position a query sees, aligned as ``causal``
            is; -1 for all. A tuple, a list, or a tensor or an array of two integers.
        softcap: bounds scores by softcap * tanh(score / softcap), unless it is 0.
        alibi_slopes: (q_heads,) or (batch, q_heads); a slope times the distance of a key is taken from its score.
        deterministic: whether gradients have to be the same on every run; see `attention`.
        return_attn_probs: also return the log-sum-exp, and None where ``flash_attn`` returns the weights for its tests.

    Numbers may also be NumPy's, or tensors of one element, which is waited for.

    Returns:
        out (batch, q_len, q_heads, dv), contiguous, in q's dtype; or (out, softmax_lse, S_dmask) with softmax_lse
        (batch, q_heads, q_len) in float32 (float64 for float64 inputs) and S_dmask always None. A query that sees no
        key gets 0 and -inf.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices or values do not fit.
    """
    check_tensors(q=q, k=k, v=v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            raise ValueError(f"{name} must have shape (batch, length, heads, d); got {shape_of(tensor)}")
    settings = settings_of(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    result = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **settings)
    if isinstance(result, Tensor):
        return _by_length(result)
    out, lse = result
    return _by_length(out), lse, None


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
    """`flash_attn_func` of queries, keys and values in one tensor (batch, length, 3, heads, d)."""
    q, k, v = parts("qkv", qkv, 3, "batch", "length")
    settings = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *settings)


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
    """`flash_attn_func` of keys and values in one tensor (batch, k_len, 2, kv_heads, d)."""
    k, v = parts("kv", kv, 2, "batch", "length")
    settings = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *settings)


def _by_length(out: Tensor) -> Tensor:
    # The kernels write rows in the order of q's, so that this copies nothing where they ran.
    return out.transpose(1, 2).contiguous()


def install(*, force: bool = False) -> ExitStack:
    """Let ``import flash_attn`` and ``import flash_attn.flash_attn_interface`` find these functions, from now on.

    What the real package has besides them is then an ImportError, as if it were not built.

    Args:
        force: also take the place of the real package where it is imported already. Who holds its functions keeps them.

    Returns:
        What takes this back: at the end of a ``with`` statement, or by ``close()``.

    Raises:
        RuntimeError: the real ``flash_attn`` is imported already, and ``force`` is False.
    """
    real = sys.modules.get(PACKAGE)
    if real is not None and not hasattr(real, _OURS) and not force:
        where = getattr(real, "__file__", None) or "an unknown place"
        raise RuntimeError(f"{PACKAGE} must not be imported already, unless force is True; got the one of {where}")
    names = [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]
    before = {name: sys.modules.pop(name) for name in names}
    package, interface = _module(PACKAGE), _module(f"{PACKAGE}.flash_attn_interface")
    package.__dict__.update(__path__=[], __version__=__version__, flash_attn_interface=interface)
    sys.modules.update({module.__name__: module for module in (package, interface)})
    undo = ExitStack()
    undo.callback(_restore, before, (package, interface))
    return undo


_FUNCTIONS = (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_kvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
)


def _restore(before: dict[str, ModuleType], ours: tuple[ModuleType, ...]) -> None:
    for module in ours:
        sys.modules.pop(module.__name__, None)
    sys.modules.update(before)


def _module(name: str) -> ModuleType:
    module = ModuleType(name, __doc__)
    # Without a spec, asking whether there is such a package is an error.
    module.__spec__ = ModuleSpec(name, None, origin=__file__)
    module.__dict__.update({_OURS: True, **{function.__name__: function for function in _FUNCTIONS}})
    return module
