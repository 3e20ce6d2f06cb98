"""Statistics of the scores of attention that training asks for, without the scores in memory."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypedDict

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import forward_ad
from typing_extensions import Never, Unpack

from ...kernels.call import Call
from ...kernels.torch_names import in_forward_mode
from .. import dispatch, op
from ..backends import Backend
from ..call import Arguments, make_call
from ..hints import refuse_unknown
from ..mods import MaskMod, ScoreMod, as_mask, as_scores
from ..naive import visible_scores, with_sinks
from ..precision import autocast_inputs, without_autocast
from ..rules import Mask, Scores
from ..sizes import Packed
from ..validation import Implementation, Window
from ..varlen import as_heads, packed_sequences
from .op import statistics


class ScoreStatistics(NamedTuple):
    """Three numbers for each query, (*batch, q_heads, q_len) in float32 (float64 for float64 inputs).

    s_j are the scores of the keys that a query sees, after the scale, the soft cap and all other changes; p_j are their
    weights in the softmax.

    Attributes:
        lse: log(sum_j exp s_j), the sink's among them.
        max_scores: max_j s_j, without the sink, which is no score; -inf for a query that sees no key. It has no
            gradient.
        entropy: -sum_j p_j log p_j in nats, the sink's weight among them; 0 for a query that sees no key.
    """

    lse: Tensor
    max_scores: Tensor
    entropy: Tensor


class StatisticsOptions(TypedDict, total=False):
    """The keyword arguments of `score_statistics`: those of `attention` that say what the scores are."""

    causal: bool | str
    window: Window | None
    scale: float | None
    softcap: float | None
    alibi_slopes: Tensor | None
    bias: Tensor | None
    scores: Scores | ScoreMod | None
    mask: Tensor | Mask | MaskMod | None
    sinks: Tensor | None
    impl: str | Implementation


OPTIONS = frozenset(StatisticsOptions.__annotations__)


def score_statistics(
    q: Float[Tensor, "*batch q_heads q_len d"],
    k: Float[Tensor, "*batch kv_heads k_len d"],
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
    impl: str | Implementation = "auto",
    **unknown: Never,
) -> ScoreStatistics:
    """The log-sum-exp, the largest score and the entropy of each query's softmax, as `attention` computes it.

    >>> q = k = torch.randn(2, 8, 128, 64)
    >>> score_statistics(q, k, causal=True).max_scores.amax((0, 2)).shape  # of each head
    torch.Size([8])

    QK-clip needs the largest scores (Kimi Team, "Kimi K2: Open agentic intelligence", 2025). Low entropies precede
    training that diverges (Zhai et al., "Stabilizing Transformer training by preventing attention entropy collapse",
    2023). The values are not needed. The cost is the product q kᵀ, 2 · d operations for each pair that is computed:
    half of a forward of `attention` whose v has the width of k. The backward computes two such products with "naive",
    three with "tiled", and four with "flash".

    Args:
        q: queries (*batch, q_heads, q_len, d), in float16, bfloat16, float32 or float64. Three dimensions mean no head
            axis, (batch, q_len, d); two mean (q_len, d). Any strides.
        k: keys (*batch, kv_heads, k_len, d); kv_heads divides q_heads.
        causal, window, scale, softcap, alibi_slopes, bias, scores, mask, sinks: as `attention` takes them.
        impl: "flash" (a Triton kernel), "tiled" or "naive"; "auto" takes the first of these that can compute the call
            on a GPU, and the first of the others elsewhere. "naive" has every score in memory.

    lse and entropy are differentiable in q, k, alibi_slopes, bias, sinks and what ``scores`` captured, with "naive" any
    number of times. "flash" takes 16-bit inputs to the Triton kernels of the backward of `attention`, and float32 ones
    to the backward of "tiled", PyTorch operations on tiles of 512 x 512 scores. Both need linear memory.

    Returns:
        A `ScoreStatistics`. A query with a score of +inf or NaN has NaN for its entropy.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices or values do not fit, or the implementation named cannot compute the call.

    The precision of float32 products is that of `attention`. Under autocast inputs are cast to its dtype. torch.compile
    traces the call into one graph. torch.func and forward-mode derivatives need "naive", which "auto" then takes.
    """
    if unknown:
        refuse_unknown(unknown, OPTIONS)
    arguments = Arguments(
        causal, window, scale, softcap, alibi_slopes=alibi_slopes, bias=bias, scores=as_scores(scores, q),
        mask=as_mask(mask, q), sinks=sinks,
    )  # fmt: skip
    return _computed(q, k, arguments, impl)


def score_statistics_varlen(
    q: Float[Tensor, "all_q q_heads d"],
    k: Float[Tensor, "all_k kv_heads d"],
    cu_seqlens_q: Int[Tensor, " sequences+1"],
    cu_seqlens_k: Int[Tensor, " sequences+1"] | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **options: Unpack[StatisticsOptions],
) -> ScoreStatistics:
    """`score_statistics` of packed sequences, each of them (q_heads, all_q).

    Args:
        q: queries (all_q, q_heads, d).
        k: keys (all_k, kv_heads, d).
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as `attention_varlen` takes them. Queries after the last
            sequence see no key.
        options: as `score_statistics` takes them.

    Raises:
        TypeError, ValueError: as `score_statistics` and `attention_varlen` do.
    """
    arguments: dict[str, Any] = {**options}
    if not OPTIONS.issuperset(arguments):
        refuse_unknown({name: x for name, x in arguments.items() if name not in OPTIONS}, OPTIONS)
    impl = arguments.pop("impl", "auto")
    packed = packed_sequences(q, k, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, arguments.get("mask"))
    q, k, _ = as_heads(q, k, k)
    lse, max_scores, entropy = _computed(q, k, Arguments.of(q, **arguments), impl, packed)
    return ScoreStatistics(lse[0], max_scores[0], entropy[0])


def _computed(
    q: Tensor, k: Tensor, arguments: Arguments, impl: str | Implementation, packed: Packed | None = None
) -> ScoreStatistics:
    q, k, _ = autocast_inputs(q, k, k)
    call = make_call(q, k, k, arguments, packed)
    backend = dispatch.choose(call, impl, _why_not)
    lse, max_scores, entropy = _naive(call) if backend.name == "naive" else statistics(call, backend.name)
    found = lse, max_scores.detach(), entropy
    return ScoreStatistics(*(found if q.ndim > 2 else [x[0] for x in found]))


def _why_not(backend: Backend, call: Call) -> str | None:
    """Why a backend does not compute the statistics of a call, or None if it does."""
    if backend.name not in ("triton", "tiled", "naive"):
        return "score_statistics has the implementations 'flash' (with the Triton backend), 'tiled' and 'naive'"
    if backend.name != "naive" and (op.transforming() or _has_tangents(call)):
        return "torch.func and forward-mode derivatives need impl='naive'"
    return dispatch.supports(backend, call)


def _has_tangents(call: Call) -> bool:
    if torch.compiler.is_compiling() or not in_forward_mode():
        return False
    tensors = call.q, call.k, *call.aux.tensors
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors if x.is_floating_point())


def _naive(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """The definitions, with every score in memory, in float32 or float64."""
    q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (call.q, call.k))
    with without_autocast(q.device):
        scores, _ = visible_scores(Call(q, k, k, call.options, call.aux))
        max_scores = scores.amax(-1) if scores.shape[-1] > 0 else scores.new_full(scores.shape[:-1], -math.inf)
        if call.aux.sinks is not None:
            scores = with_sinks(scores, call.aux.sinks, k)
        # The softmax of a row of -inf, and its gradient, would be NaN.
        blind = (scores == -math.inf).all(-1)
        scores = scores.masked_fill(blind[..., None], 0.0)
        log_p = torch.log_softmax(scores, -1)
        p = torch.exp(log_p)
        lse = torch.logsumexp(scores, -1).masked_fill(blind, -math.inf)
        entropy = -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1).masked_fill(blind, 0.0)
    lse, max_scores, entropy = (
        rearrange(x, "... kv group row -> ... (kv group) row") for x in (lse, max_scores, entropy)
    )
    return lse, max_scores, entropy
