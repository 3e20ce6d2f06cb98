"""What all launches of a call share: everything that follows from its metadata, worked out once for a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..bound_mods import BoundMods
from ..call import Call, Wanted
from .tiles import Precision, TileConfig, columns_of_a_tile


@dataclass(frozen=True)
class Constants:
    """Compile-time sizes of a kernel, passed as one constant ``C``; every field is a ``tl.constexpr``.

    HEAD_DIM, V_HEAD_DIM: columns of q and k, and of v. BLOCK_D, BLOCK_DV: columns of their tiles, powers of two.
    TILE_Q, TILE_K: rows of a tile of q and of k. LEFT, RIGHT: whether the band has these edges.
    """

    HEAD_DIM: Any
    V_HEAD_DIM: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    TILE_Q: Any
    TILE_K: Any
    LEFT: Any
    RIGHT: Any

    @classmethod
    def of(cls, **values: int) -> Constants:
        """Constants of plain numbers; without edges unless given."""
        return cls(**{name: tl.constexpr(value) for name, value in {"LEFT": False, "RIGHT": False, **values}.items()})


NOTHING_WANTED = Wanted()


class Problem:
    """A call without its tensors: q (*leading, q_len, d), k (*leading, k_len, d) and v (*leading, k_len, dv).

    batch_heads: matrices of q, and of k and v. group: query heads per head of k. heads: of q. sizes: the leading sizes
    of q and of k and v; the first is never read, and is 0 so that kernels do not specialise on it. block: the wider
    padded head dimension. shape: (batch, heads, q_len, k_len), of packed sequences (sequences, heads, max_seqlen_q,
    max_seqlen_k). packed: the numbers num_seqs, max_seqlen_q and max_seqlen_k, 0 without packed sequences.
    """

    def __init__(self, call: Call, wanted: Wanted = NOTHING_WANTED) -> None:
        options = call.options
        q_leading, kv_leading = tuple(call.q.shape[:-2]), tuple(call.k.shape[:-2])
        self.options, self.device, self.mods = options, call.device, BoundMods.of(call, wanted)
        self.precision = precision_of(call.dtype)
        self.q_len, self.k_len, self.head_dim, self.v_head_dim = call.q_len, call.k_len, call.head_dim, call.v_head_dim
        self.q_batch_heads, self.kv_batch_heads = math.prod(q_leading), math.prod(kv_leading)
        self.sizes = (0, *q_leading[1:]), (0, *kv_leading[1:])
        self.group = self.q_batch_heads // max(1, self.kv_batch_heads)
        self.heads = q_leading[-1] if len(q_leading) > 1 else 1
        self.kv_heads = kv_leading[-1] if len(kv_leading) > 1 else 1
        self.block = padded(max(self.head_dim, self.v_head_dim))
        self.left, self.right = call.band
        self.packed = 0, 0, 0
        self.shape = self.q_batch_heads // max(1, self.heads), self.heads, self.q_len, self.k_len
        starts = call.aux.cu_seqlens_q
        if starts is not None:
            self.packed = starts.numel() - 1, *options.max_seqlens
            self.shape = self.packed[0], self.heads, *options.max_seqlens
        self.is_packed = starts is not None
        has_rules = len(self.mods.scores) > 0 or self.mods.mask is not None
        self.has_operands = has_rules or len(call.aux.tensors) > 0

    @property
    def with_mods(self) -> bool:
        """Whether pairs are changed by more than a causal mask."""
        return not self.options.is_causal_or_full

    @property
    def widths(self) -> dict[str, int]:
        """Head dimensions and their padded widths."""
        padded_widths = {"BLOCK_D": padded(self.head_dim), "BLOCK_DV": padded(self.v_head_dim)}
        return {"HEAD_DIM": self.head_dim, "V_HEAD_DIM": self.v_head_dim, **padded_widths}

    def slices(self, *widths: int) -> int:
        """The slices of columns in which these widths are computed."""
        return max(-(-width // columns_of_a_tile(self.block, self.precision)) for width in widths)

    def constants(self, config: TileConfig) -> Constants:
        """The compile-time sizes of a kernel with these tiles."""
        columns = columns_of_a_tile(self.block, self.precision)
        widths = {name: min(width, columns) if name[:5] == "BLOCK" else width for name, width in self.widths.items()}
        edges = {"LEFT": self.left is not None, "RIGHT": self.right is not None}
        return Constants.of(**widths, TILE_Q=config.tile_q, TILE_K=config.tile_k, **edges)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The kernels' integers from ``group`` to ``max_seqlen_k``."""
        return self.group, self.heads, self.q_len, self.k_len, self.left or 0, self.right or 0, *self.packed


def precision_of(dtype: torch.dtype) -> Precision:
    """How products of a dtype are computed; for float32 `torch.get_float32_matmul_precision` decides."""
    if dtype != torch.float32:
        return "half"
    return "float32" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def padded(width: int) -> int:
    """The columns of a tile for a head dimension: a power of two, at least 16 as tensor cores need."""
    return max(16, triton.next_power_of_2(width))


def is_pipelined(tensor: Tensor) -> bool:
    """Whether Triton certainly loads tiles of a 16-bit matrix asynchronously: in accesses of 4 bytes or more."""
    *others, column = tensor.stride()
    pairs = not tensor.shape[-1] % 2 and not any(stride % 2 for stride in others)
    return pairs and column == 1 and tensor.data_ptr() % 16 == 0


def stride_multiples(tensors: list[Tensor]) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """Each tensor's strides, all but the last divided by a common multiple (8, 4, 2 or 1); and these multiples.

    `lib.matrix.matrix` takes both. Triton recognises multiples of 16 by itself: strides that all are stay as they are.
    """
    strides, multiples = [], []
    for tensor in tensors:
        *steps, column = tensor.stride()
        common = math.gcd(16, *steps)
        multiple = 1 if common == 16 else common
        strides.append((*[step // multiple for step in steps], column))
        multiples.append(multiple)
    return strides, tuple(multiples)
