"""`attention` and `explain`, and how every public function runs a call."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Literal, TypedDict, overload

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import Never, Unpack

from ..kernels.call import NO_AUX, Aux
from ..kernels.layouts import ALIGNMENT
from ..kernels.torch_names import any_autocast, must_dispatch
from . import dispatch
from .call import ATTENTION_OPTIONS, Arguments, make_call, sizes_of
from .explanation import Explanation, explain_call
from .features import bind
from .hints import refuse_unknown
from .mods import MaskMod, ScoreMod, as_mask, as_scores
from .plan import Run, remember
from .precision import autocast_inputs
from .rules import Mask, Scores
from .sizes import Packed
from .validation import Implementation, Window, check_cache, check_cache_values


class TensorOptions(TypedDict, total=False):
    """The keyword arguments of `attention` that are tensors or hold some."""

    alibi_slopes: Tensor | None
    bias: Tensor | None
    scores: Scores | ScoreMod | None
    mask: Tensor | Mask | MaskMod | None
    sinks: Tensor | None
    seed: int | Tensor | None
    generator: torch.Generator | None


class AttentionOptions(TensorOptions, total=False):
    """The keyword arguments of `attention` but ``return_lse``."""

    causal: bool | str
    window: Window | None
    scale: float | None
    softcap: float | None
    dropout_p: float
    deterministic: bool | None
    impl: str | Implementation


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[AttentionOptions]
) -> Tensor: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[AttentionOptions]
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[AttentionOptions]
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
    scores: Scores | ScoreMod | None = None,
    mask: Tensor | Mask | MaskMod | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    generator: torch.Generator | None = None,
    deterministic: bool | None = None,
    impl: str | Implementation = "auto",
    return_lse: bool = False,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q kᵀ · scale) v, by the implementation that ``impl`` names or "auto" chooses.

    >>> q = k = v = torch.randn(2, 8, 128, 64)
    >>> attention(q, k, v, causal=True).shape
    torch.Size([2, 8, 128, 64])

    Args:
        q: queries (*batch, q_heads, q_len, d), in float16, bfloat16, float32 or float64. Three dimensions mean no head
            axis, (batch, q_len, d); two mean (q_len, d). Any strides. Or q, k, v and the results are nested tensors
            (batch, heads, *, d) of layout torch.jagged, which `attention_varlen` computes.
        k: keys (*batch, kv_heads, k_len, d); kv_heads divides q_heads, and each serves a group of query heads.
        v: values (*batch, kv_heads, k_len, dv).
        causal: True or "bottom_right" hides the keys after a query, the last query aligned with the last key;
            "top_left" aligns the first ones, as torch's ``is_causal`` does.
        window: (before, after), how many keys before and after its own position a query sees; None for all. Positions
            are aligned as ``causal`` says, bottom-right if it is False.
        scale: factor of the scores; 1 / sqrt(d) if None.
        softcap: bounds scores by softcap * tanh(score / softcap), before the other changes, which follow in this order:
        alibi_slopes: (q_heads,) or (batch, q_heads); slope * distance is subtracted from each score. On a CPU they are
            checked to be finite.
        bias: is added to the scores; any shape that broadcasts to (*batch, q_heads, q_len, k_len).
        scores: score changes of your own: a function of (score, b, h, q_idx, kv_idx), what `mods.score_mod` makes of
            one, or rules; see `cs336_systems.attention.mods`.
        mask: True where a query sees a key: a bool tensor of any shape that broadcasts to (*batch, q_heads, q_len,
            k_len); a function of (b, h, q_idx, kv_idx), or what `mods.mask_mod` makes of one; or a mask made of rules.
            What causal and window hide stays hidden.
        sinks: (q_heads,), a logit for each head that joins the softmax without a value.
        dropout_p: the probability that a weight of the softmax becomes 0, rounded to a multiple of 2**-15; the others
            are divided by 1 minus that.
            Which ones follows from the seed and a weight's batch entry, head, row and column alone.
        seed: of dropout, an int or an int64 tensor of one element; drawn from ``generator``, or from the device's
            generator, if None.
        deterministic: results must be bitwise the same on every run; None follows
            ``torch.are_deterministic_algorithms_enabled()``. Without it the Hopper kernels add up the gradient of q in
            any order; everything else of this library always repeats.
        impl: "flash" (Triton), "sdpa" (torch's own), "compiled", "tiled" or "naive", which never falls back to another;
            "auto" takes the first of "flash", "sdpa", "tiled" and "naive" that can compute the call ("naive" before
            "tiled" for small float32 and float64 calls on a CPU).
        return_lse: also return the log-sum-exp of each query's scores, its sink included. It is differentiable.

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
    if unknown:
        refuse_unknown(unknown, ATTENTION_OPTIONS)
    arguments = Arguments(
        causal, window, scale, softcap, dropout_p, deterministic, return_lse, alibi_slopes, bias,
        None if scores is None else as_scores(scores, q), None if mask is None else as_mask(mask, q),
        sinks, seed, generator,
    )  # fmt: skip
    if getattr(q, "is_nested", False):
        from .varlen import nested_attention

        return nested_attention(q, k, v, arguments, impl)
    out, lse = run(q, k, v, arguments, impl)
    return out if lse is None else (out, lse)


def explain(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **options: Unpack[AttentionOptions]
) -> Explanation:
    """Which backend `attention` would use for these arguments, and why not each other one. Computes nothing."""
    q, k, v = autocast_inputs(q, k, v)
    arguments: dict[str, Any] = {**options}
    impl = arguments.pop("impl", "auto")
    return explain_call(make_call(q, k, v, Arguments.of(q, **arguments, return_lse=return_lse)), impl)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arguments: Arguments,
    impl: str | Implementation,
    packed: Packed | None = None,
    cache_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """out and, if asked for, log-sum-exp. Validated and planned once for each new combination of metadata.

    With ``packed``, q is (1, heads, all rows, d), and so on; with ``cache_lengths``, k and v are a KV cache. Under
    autocast inputs are cast.
    """
    others: tuple[Tensor, ...] = () if packed is None else packed[:2]
    if cache_lengths is not None:
        others = (cache_lengths,)
    is_traced = must_dispatch(q, k, v, *others)
    if is_traced or any_autocast():
        q, k, v = autocast_inputs(q, k, v)
    has_tensors = arguments.has_tensors
    key, plan = None, None
    if not is_traced:
        key, plan = _known_plan(q, k, v, arguments, has_tensors, impl, packed, cache_lengths)
    if plan is None:
        if cache_lengths is not None:
            check_cache(q, k, v, cache_lengths)
        call = make_call(q, k, v, arguments, packed, cache_lengths)
        plan, aux = dispatch.choose(call, impl).plan(call), call.aux
        if key is not None:
            remember(dispatch.plans, key, plan)
    elif cache_lengths is not None:
        check_cache_values(q, k, v, cache_lengths)
        aux = Aux(cache_lengths=cache_lengths)
    elif packed is not None or has_tensors:
        aux = bind(arguments, sizes_of(q, k, packed), arguments.causal != "top_left", q.device)
    else:
        aux = NO_AUX
    if q.ndim > 2:
        return plan(q, k, v, aux)
    out, lse = plan(q[None], k[None], v[None], aux)
    return out[0], None if lse is None else lse[0]


def _known_plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arguments: Arguments,
    has_tensors: bool,
    impl: str | Implementation,
    packed: Packed | None,
    cache_lengths: Tensor | None,
) -> tuple[Hashable, Run | None]:
    """All that a plan depends on, and the plan if there is one.

    The key is None where the arguments cannot be right, and validation says why.
    """
    try:
        precision = torch.get_float32_matmul_precision() if q.dtype is torch.float32 else None
        key: tuple[Any, ...] = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            q.device, k.device, v.device, (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT == 0,
            arguments.key(has_tensors), impl, precision, torch.are_deterministic_algorithms_enabled(),
            torch.is_grad_enabled(),
        )  # fmt: skip
        if packed is not None:
            q_starts, k_starts, *lengths = packed
            key += (q_starts.shape, q_starts.dtype, q_starts.device, k_starts.shape, k_starts.dtype, k_starts.device)
            key += (*lengths, *map(type, lengths))
        if cache_lengths is not None:
            key += (cache_lengths.shape, cache_lengths.stride(), cache_lengths.dtype, cache_lengths.device)
        return key, dispatch.plans.get(key)
    except (TypeError, RuntimeError):
        return None, None
