"""One attention call as every backend takes it: its tensors, and every option in its final form.

Imports no Triton: every backend needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .layouts import ALIGNMENT, without_data
from .mods import SOFTCAP
from .rules import Mask, Scores

Band = tuple[int | None, int | None]
"""Query i sees the keys from i + left to i + right; None where there is no limit."""

MAX_LENGTH = 2**30 - 1
"""The longest q and k: kernels add two row numbers in 32 bits."""

BLOCK = 128
"""Queries and keys of a block in block lists, which kernels visit or skip as a whole."""

DROPOUT_BITS = 15
"""Bits of the random number that decides whether dropout drops a probability: two such numbers share a word."""

PHILOX_ROUNDS = 7
"""Of the generator of these numbers: the fewest that pass BigCrush (Salmon et al., 2011, table 2)."""


plan_caches: list[dict[Any, Any]] = []
"""Every cache of plans. What changes tile configurations (`triton.tiles.pin`) clears them all."""


class Options(NamedTuple):
    """What attention computes apart from its tensors. Hashable; sizes may be symbolic while torch traces.

    Attributes:
        scale: factor of q kᵀ.
        window_left: a query sees this many keys before its diagonal position; None for all.
        window_right: and this many after it; 0 for a causal mask.
        bottom_right: whether the diagonal ends at the last query and the last key (FlashAttention, KV caches) or begins
            at the first ones (torch's ``is_causal``).
        softcap: scores become softcap * tanh(score / softcap), before ``scores``.
        dropout_p: the probability that dropout drops a probability.
        mask: expression of mask rules (`rules`).
        scores: score rules in their order (`rules`).
        max_seqlen_q, max_seqlen_k: bounds on the lengths of packed sequences, None if not given.
        deterministic: results must be bitwise the same on every run.
    """

    scale: float
    window_left: int | None = None
    window_right: int | None = None
    bottom_right: bool = True
    softcap: float | None = None
    dropout_p: float = 0.0
    mask: Mask | None = None
    scores: Scores = ()
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    deterministic: bool = False

    @property
    def is_causal_or_full(self) -> bool:
        """Whether scores pass through nothing but the scale and perhaps a causal mask."""
        # len(), because torch.compile does not trace `not` of a tuple with symbolic sizes.
        changed = self.softcap is not None or self.mask is not None or len(self.scores) > 0 or self.dropout_p > 0
        return self.window_left is None and (self.window_right is None or self.window_right == 0) and not changed

    @property
    def score_rules(self) -> Scores:
        """All rules that change scores, the soft cap first."""
        return self.scores if self.softcap is None else ((SOFTCAP, (self.softcap,)), *self.scores)

    @property
    def dropout_threshold(self) -> int:
        """Dropout drops a probability whose random number of `DROPOUT_BITS` bits is below this."""
        return round(self.dropout_p * 2**DROPOUT_BITS)

    @property
    def keep_scale(self) -> float:
        """The factor of the probabilities that dropout keeps, 1 over their share."""
        kept = 2**DROPOUT_BITS - self.dropout_threshold
        return 0.0 if kept == 0 else 2**DROPOUT_BITS / kept

    @property
    def max_seqlens(self) -> tuple[int, int]:
        """Bounds on the lengths of packed sequences of q and k, 2**31 - 1 where none is given."""
        q, k = self.max_seqlen_q, self.max_seqlen_k
        return 2**31 - 1 if q is None else q, 2**31 - 1 if k is None else k

    def band(self, q_len: int, k_len: int, *, packed: bool = False) -> Band:
        """The limits for these lengths. In packed sequences they are relative to each sequence's diagonal."""
        shift = k_len - q_len if self.bottom_right and not packed else 0
        left = None if self.window_left is None else shift - self.window_left
        return left, None if self.window_right is None else shift + self.window_right


class Aux(NamedTuple):
    """The tensors of a call besides q, k and v.

    Attributes:
        sinks: (heads,) logits that join each row's softmax without a value.
        seed: (1,) int64, the seed of dropout.
        block_rows, block_columns: int32 lists of the blocks that the mask leaves visible (`attention.blocks`).
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) integers, where packed sequences begin.
        cache_lengths: (batch,) integers, the filled slots of a KV cache, new tokens included.
        mask_aux, score_aux: what the rules of the mask and of the scores captured, in the order of the rules.
    """

    sinks: Tensor | None = None
    seed: Tensor | None = None
    block_rows: Tensor | None = None
    block_columns: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    cache_lengths: Tensor | None = None
    mask_aux: tuple[Tensor, ...] = ()
    score_aux: tuple[Tensor, ...] = ()

    def map(self, function: Callable[[Tensor], Tensor]) -> Aux:
        """The same with ``function`` of each tensor."""
        named = [x if x is None else function(x) for x in self[:7]]
        return Aux._make([*named, *[tuple([function(x) for x in several]) for several in self[7:]]])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those that are given, in order."""
        return (*[x for x in self[:7] if isinstance(x, Tensor)], *self.mask_aux, *self.score_aux)


NO_AUX = Aux()


class AuxLayout(NamedTuple):
    """Which tensors an `Aux` has: what autograd saves with a flat list of them."""

    given: tuple[bool, ...]
    num_mask_aux: int

    @staticmethod
    def of(aux: Aux) -> AuxLayout:
        """The layout of these tensors."""
        return AuxLayout(tuple([x is not None for x in aux[:7]]), len(aux.mask_aux))

    def num_score_aux(self, num_tensors: int) -> int:
        """How many of ``num_tensors`` tensors are score_aux."""
        return num_tensors - sum(self.given) - self.num_mask_aux

    def restore(self, tensors: Sequence[Tensor]) -> Aux:
        """The `Aux` whose `tensors` are these."""
        rest = iter(tensors)
        named = [next(rest) if given else None for given in self.given]
        others = tuple(rest)
        return Aux._make([*named, others[: self.num_mask_aux], others[self.num_mask_aux :]])


class Gradients(NamedTuple):
    """What a backward returns; None for gradients that were not asked for."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    score_aux: tuple[Tensor | None, ...]


class Wanted(NamedTuple):
    """Which gradients a backward computes besides those of q, k and v."""

    sinks: bool = False
    score_aux: tuple[bool, ...] = ()


@dataclass(frozen=True, eq=False)
class Call:
    """A validated call: q (*batch, q_heads, q_len, d), k (*batch, kv_heads, k_len, d), v (*batch, kv_heads, k_len, dv).

    Three dimensions mean no head axis. Packed sequences come as (1, heads, all rows, d).
    Backends read metadata alone (shapes, strides, dtypes, devices, alignment), never values.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    options: Options
    aux: Aux = NO_AUX
    return_lse: bool = False

    @property
    def key(self) -> tuple[Hashable, ...]:
        """All that a plan depends on."""
        q, k, v = self.q, self.k, self.v
        aux = NO_AUX if self.aux is NO_AUX else tuple([_metadata(x) for x in self.aux])
        precision = torch.get_float32_matmul_precision() if q.dtype is torch.float32 else None
        tensors = q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, q.device, self.is_aligned
        return *tensors, precision, self.options, aux

    def without_data(self) -> Call:
        """The call of tensors on the meta device."""
        q, k, v = map(without_data, (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v, aux=self.aux.map(without_data))

    @property
    def depends_on_pairs(self) -> bool:
        """Whether kernels use the numbers of rows and columns for more than a causal mask and a window."""
        return self.has_rules or self.options.dropout_p > 0

    @property
    def q_len(self) -> int:
        """Rows of q."""
        return self.q.shape[-2]

    @property
    def k_len(self) -> int:
        """Rows of k and v."""
        return self.k.shape[-2]

    @property
    def head_dim(self) -> int:
        """Columns of q and k."""
        return self.q.shape[-1]

    @property
    def v_head_dim(self) -> int:
        """Columns of v and out."""
        return self.v.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of q, k, v and out."""
        return self.q.dtype

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.q.device

    @property
    def is_packed(self) -> bool:
        """Whether rows are those of packed sequences."""
        return self.aux.cu_seqlens_q is not None

    @property
    def has_rules(self) -> bool:
        """Whether rules change scores or hide pairs."""
        return self.options.mask is not None or len(self.options.scores) > 0

    @property
    def wanted(self) -> Wanted:
        """The gradients that its tensors require."""
        sinks = self.aux.sinks is not None and self.aux.sinks.requires_grad
        return Wanted(sinks, tuple([x.requires_grad for x in self.aux.score_aux]))

    @property
    def is_empty(self) -> bool:
        """Whether there is no query, or no key."""
        return 0 in (*self.q.shape, *self.k.shape)

    @property
    def band(self) -> Band:
        """The limits of what each query sees."""
        return self.options.band(self.q_len, self.k_len, packed=self.is_packed)

    @property
    def hides_rows(self) -> bool:
        """Whether some query may see no key at all: its output is 0 and its log-sum-exp -inf, or its sink."""
        if self.is_packed or self.aux.cache_lengths is not None or self.has_rules or self.k_len == 0:
            return True
        left, right = self.band
        before_all = right is not None and right < 0
        after_all = left is not None and self.q_len - 1 + left >= self.k_len
        return before_all or after_all or (left is not None and right is not None and left > right)

    @property
    def is_aligned(self) -> bool:
        """Whether q, k and v begin at multiples of `ALIGNMENT` bytes; True for tensors without addresses."""
        if torch.compiler.is_dynamo_compiling():
            return True
        try:
            return (self.q.data_ptr() | self.k.data_ptr() | self.v.data_ptr()) % ALIGNMENT == 0
        except RuntimeError:  # fake tensors, those of torch.func
            return True


def _metadata(x: Tensor | tuple[Tensor, ...] | None) -> Hashable:
    if x is None:
        return None
    return tuple([_metadata(item) for item in x]) if isinstance(x, tuple) else (x.shape, x.stride(), x.dtype)
