"""The functions that a user calls: validate, choose, call."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import Unpack

from ..kernels.settings import Window
from . import choose
from .choose import Explanation, Implementation
from .features import Features
from .flash import with_kernels
from .precision import autocast_inputs
from .rules import Mask, Scores
from .run import RUN, Options, Run
from .spec import AttentionSpec
from .validation import check
from .varlen import nested_attention

MOST_REMEMBERED = 4096
_remembered: dict[tuple[Any, ...], tuple[Run, AttentionSpec, tuple[Tensor, ...]]] = {}


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[Options]
) -> Tensor: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[Options]
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention(
    q: Float[Tensor, "*batch q_heads q_len d"],
    k: Float[Tensor, "*batch kv_heads k_len d"],
    v: Float[Tensor, "*batch kv_heads k_len dv"],
    *,
    causal: bool | str = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    scores: Scores | None = None,
    mask: Tensor | Mask | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    generator: torch.Generator | None = None,
    deterministic: bool | None = None,
    impl: str | Implementation = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q kᵀ · scale) v, by the fastest implementation that can compute it.

    >>> q = k = v = torch.randn(2, 8, 128, 64)
    >>> attention(q, k, v, causal=True).shape
    torch.Size([2, 8, 128, 64])

    Args:
        q: queries (*batch, q_heads, q_len, d), in float16, bfloat16, float32 or float64. Three dimensions mean no head
            axis, (batch, q_len, d); two mean (q_len, d). Any strides. Or q, k, v and the results are nested tensors
            (batch, heads, *, d) of layout torch.jagged; then see `attention_varlen`, which computes that.
        k: keys (*batch, kv_heads, k_len, d); kv_heads divides q_heads, and each serves a group of query heads.
        v: values (*batch, kv_heads, k_len, dv).
        causal: True or "bottom_right" hides what comes after a query, the last query aligned with the last key;
            "top_left" aligns the first ones, as torch's ``is_causal`` does.
        window: (before, after), how many keys before and after its own position a query sees; None for all. Positions
            are aligned as ``causal`` says, and at the ends where that is False.
        scale: what scores are multiplied by; 1 / sqrt(d) if None.
        softcap: bounds scores by softcap * tanh(score / softcap). First of what changes scores, which is in this order:
        alibi_slopes: (q_heads,) or (batch, q_heads); a slope times the distance of a key is taken from its score. On a
            CPU they are checked to be finite.
        bias: is added to scores; of any shape that broadcasts to (*batch, q_heads, q_len, k_len).
        scores: changes of one's own; see `cs336_systems.attention.rules`.
        mask: True where a query sees a key: a bool tensor of any shape that broadcasts to (*batch, q_heads, q_len,
            k_len), or a mask made of rules. What causal and window hide stays hidden.
        sinks: (q_heads,), a logit for each head that takes part in the softmax without a value.
        dropout_p: the probability that a weight is set to 0, the others being divided by what is left of 1. A weight's
            fate follows from the seed, its batch entry, head, row and column alone.
        seed: of dropout, an int or an int64 tensor of one element; drawn from ``generator``, or from the device's, if
            None.
        deterministic: whether results have to be the same to the bit on every run; None follows
            ``torch.are_deterministic_algorithms_enabled()``. Without it the kernels for Hopper add up the gradient of
            q in whatever order their programs come; everything else of this library always repeats to the bit.
        impl: "flash" (Triton), "sdpa" (torch's own), "compiled", "tiled", "naive", or "auto" to choose. A named one
            never falls back to another.
        return_lse: also return the log-sum-exp of each query's scores, and its sink's, which is differentiable.

    q, k, v, alibi_slopes, bias, sinks and what ``scores`` captured may need gradients.

    Returns:
        out (*batch, q_heads, q_len, dv) in q's dtype, or (out, lse) with lse (*batch, q_heads, q_len), the natural
        log-sum-exp in float32 (float64 for float64 inputs). A query that sees no key gets 0 and -inf, or its sink.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices or values do not fit, or the implementation named cannot compute the call.

    float32 inputs are computed at float32-level error if ``torch.get_float32_matmul_precision()`` is "highest", the
    default, and in TF32 otherwise. "flash" splits them into float16 halves, with one scale for all rows of a head of k
    and the query heads that it serves, so a row about 1e5 times as large as the others costs these precision: see
    docs/kernels.md. Under autocast inputs are cast to its dtype.
    """
    if getattr(q, "is_nested", False):
        options: Options = {
            "causal": causal,
            "window": window,
            "scale": scale,
            "softcap": softcap,
            "alibi_slopes": alibi_slopes,
            "bias": bias,
            "scores": scores,
            "mask": mask,
            "sinks": sinks,
            "dropout_p": dropout_p,
            "seed": seed,
            "generator": generator,
            "deterministic": deterministic,
            "impl": impl,
        }
        return nested_attention(q, k, v, return_lse, options)
    q, k, v = autocast_inputs(q, k, v)
    features = None
    # Written out, because it is part of the host time of every call.
    of_scores = softcap is not None or alibi_slopes is not None or bias is not None or scores is not None
    drops = dropout_p != 0 or isinstance(dropout_p, bool) or seed is not None or generator is not None
    if of_scores or drops or mask is not None or sinks is not None:
        features = Features(mask, bias, softcap, alibi_slopes, scores, sinks, dropout_p, seed, generator)
    run, spec, extras = _prepare(q, k, v, causal, scale, impl, return_lse, window, features, deterministic)
    if q.ndim == 2:
        out, lse = run(q[None], k[None], v[None], spec, return_lse, extras)
        out, lse = out[0], None if lse is None else lse[0]
    else:
        out, lse = run(q, k, v, spec, return_lse, extras)
    return out if lse is None else (out, lse)


def explain(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **options: Unpack[Options]) -> Explanation:
    """Which implementation `attention` would use for these arguments, and why not each other one. Computes nothing."""
    q, k, v = autocast_inputs(q, k, v)
    given: dict[str, Any] = {**options}
    causal, scale, impl = given.pop("causal", False), given.pop("scale", None), given.pop("impl", "auto")
    window, deterministic = given.pop("window", None), given.pop("deterministic", None)
    features = Features(**given) if given else None
    problem = check(q, k, v, causal, scale, return_lse, window, features, deterministic)
    return with_kernels(choose.explain(problem, impl), q, k, v, problem.spec)


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str,
    scale: float | None,
    impl: str | Implementation,
    return_lse: bool,
    window: Window | None,
    features: Features | None,
    deterministic: bool | None,
) -> tuple[Run, AttentionSpec, tuple[Tensor, ...]]:
    """What will run, on which spec and extras: validated and chosen once for each new combination of metadata."""
    others = (causal, scale, impl, return_lse, window, deterministic)
    if features is not None or torch.compiler.is_compiling():
        return _choose(q, k, v, *others, features)
    try:
        tensors = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device)
        # The types tell 1 from True, and what is no dense tensor from what is.
        types = (type(causal), type(scale), type(return_lse), type(deterministic), q.layout, k.layout, v.layout)
        follows_torch = deterministic is None and torch.are_deterministic_algorithms_enabled()
        key = (*tensors, *others, *types, window and tuple(map(type, window)), follows_torch)
        known = _remembered.get(key)
    except (AttributeError, TypeError, RuntimeError):
        # Not tensors, ragged ones, or not hashable: validation says what is wrong with them.
        return _choose(q, k, v, *others, None)
    if known is None:
        known = _choose(q, k, v, *others, None)
        if len(_remembered) >= MOST_REMEMBERED:
            _remembered.clear()
        _remembered[key] = known
    return known


def _choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str,
    scale: float | None,
    impl: str | Implementation,
    return_lse: bool,
    window: Window | None,
    deterministic: bool | None,
    features: Features | None,
) -> tuple[Run, AttentionSpec, tuple[Tensor, ...]]:
    problem = check(q, k, v, causal, scale, return_lse, window, features, deterministic)
    return RUN[choose.choose(problem, impl)], problem.spec, problem.extras
