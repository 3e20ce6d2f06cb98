"""Tiles, pipeline stages and registers for each head dimension. Imports no Triton."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from ..call import Band

T = TypeVar("T")


class ForwardConfig(NamedTuple):
    """How the forward is tiled.

    Attributes:
        tile_k: rows of a tile of k and v.
        consumers: consumer warp groups, each with 64 rows of q.
        stages: of the pipelines of k and v.
        consumer_registers, producer_registers: of a thread; a kernel starts with max_registers for each.
        separate_out: whether out has buffers beside q's in shared memory, so that the next q can be loaded earlier.
        ctas: CTAs that a multiprocessor runs at once.
        has_pairs: whether tiles of a tensor with an element for each pair lie beside those of k in shared memory.
    """

    tile_k: int
    consumers: int
    stages: int
    consumer_registers: int
    producer_registers: int
    max_registers: int
    separate_out: bool
    ctas: int = 1
    has_pairs: bool = False


class SplitHeadDim(NamedTuple):
    """The columns of a head: `head_dim` in one tile, and tails in a second, of q and k, and of v and out."""

    head_dim: int
    k_tail: int
    v_tail: int


class BackwardConfig(NamedTuple):
    """How the backward is tiled.

    Attributes:
        tile_k: rows of k and v of a CTA. Each of its two consumer warp groups has 64 of 128, or both share 64.
        tile_q: rows of a tile of q and dout.
        dq_columns: columns of the float32 dQ tiles that are added at a time.
        stages: of the pipelines of q and dout.
        consumer_registers, producer_registers, max_registers: as of `ForwardConfig`.
        pair_stages: how many tiles of a tensor with an element for each pair lie beside those of q: as many as
            ``stages``, or one, with a separate pipeline; 0 if they are not loaded.
        piece: columns of the pieces in which q or dout comes, which ``stages`` are of then (`backward_pieces`); else 0.
        k_tail, v_tail: columns of q and k, and of v, in a second tile.
    """

    tile_k: int
    tile_q: int
    dq_columns: int
    stages: int
    consumer_registers: int
    producer_registers: int
    max_registers: int
    pair_stages: int = 0
    piece: int = 0
    k_tail: int = 0
    v_tail: int = 0

    @property
    def has_pairs(self) -> bool:
        """As of `ForwardConfig`."""
        return self.pair_stages > 0

    @property
    def has_turns(self) -> bool:
        """Whether `dq_reducer` adds up dQ, which counts whose turn it is."""
        return self.tile_k == 128

    def launches(self, dk: T, dv: T) -> list[tuple[T | None, T | None]]:
        """The gradients that each launch of the kernel computes."""
        return [(dk, None), (None, dv)] if self.piece else [(dk, dv)]


SHORT_LENGTH, SHORT_CAUSAL_LENGTH = 1024, 2048
"""The most keys for which tiles of q see few; the second with a causal mask, where there are tails."""
FORWARD = {
    # By head_dim, and whether tiles of q see unequal numbers of keys, or few. Then three CTAs of one consumer are
    # fastest, whose epilogues overlap each other's main loops; else three consumers that share k and v.
    (64, True): ForwardConfig(64, 1, 3, 136, 24, 80, True, 3),
    (64, False): ForwardConfig(64, 3, 4, 160, 32, 128, True),
    # From here on the tiles of one CTA fill shared memory; two CTAs with smaller ones are slower.
    (128, True): ForwardConfig(128, 2, 2, 240, 24, 168, True),
    (128, False): ForwardConfig(128, 2, 2, 240, 24, 168, True),
    # The output takes 128 registers; q and two stages of k and v fill shared memory.
    (256, True): ForwardConfig(64, 2, 2, 240, 24, 168, False),
    (256, False): ForwardConfig(64, 2, 2, 240, 24, 168, False),
}
FORWARD_SPLIT = {
    # The same by head_dim and k_tail. With a causal mask three CTAs are faster up to SHORT_CAUSAL_LENGTH alone.
    (64, 16, True): ForwardConfig(64, 1, 2, 136, 24, 80, True, 3),
    (64, 16, False): ForwardConfig(128, 2, 2, 240, 24, 168, True),
    (64, 32, True): ForwardConfig(64, 1, 2, 136, 24, 80, True, 3),
    (64, 32, False): ForwardConfig(128, 2, 2, 240, 24, 168, True),
    # These fill shared memory with 64 rows of k.
    (128, 64, True): ForwardConfig(64, 2, 2, 240, 24, 168, True),
    (128, 64, False): ForwardConfig(64, 2, 2, 240, 24, 168, True),
    # And these with 32.
    (256, 256, True): ForwardConfig(32, 2, 2, 240, 24, 168, False),
    (256, 256, False): ForwardConfig(32, 2, 2, 240, 24, 168, False),
}
FORWARD_VARLEN = {
    # By head_dim and k_tail, for packed sequences without rules. Their producer needs more registers, which the
    # consumers give up; at 64 + 32 columns one of three CTAs cannot. Consumers that compute rules keep their registers.
    (64, 0): ForwardConfig(64, 1, 3, 120, 40, 80, True, 3),
    (64, 16): ForwardConfig(64, 1, 2, 120, 40, 80, True, 3),
    (64, 32): ForwardConfig(128, 2, 2, 224, 56, 168, True),
    (128, 0): ForwardConfig(128, 2, 2, 224, 56, 168, True),
    (128, 64): ForwardConfig(64, 2, 2, 224, 56, 168, True),
    (256, 0): ForwardConfig(64, 2, 2, 232, 40, 168, False),
    (256, 256): ForwardConfig(32, 2, 2, 232, 40, 168, False),
}
FORWARD_LATENT = {
    # For `LATENT`: v has no tail, so there is space for 128 rows of k. By whether there are rules: consumers that
    # compute them spill less with more registers, the others little or nothing with these.
    True: ForwardConfig(128, 2, 2, 240, 24, 168, False),
    False: ForwardConfig(128, 2, 2, 224, 56, 168, False),
}
_FORWARD_PAIRS = {
    # By head_dim and k_tail. Tiles of pairs take the memory of a stage, or of separate output buffers.
    (64, 0): ForwardConfig(64, 1, 2, 136, 24, 80, True, 3, has_pairs=True),
    (64, 16): ForwardConfig(64, 1, 2, 136, 24, 80, False, 3, has_pairs=True),
    (128, 0): ForwardConfig(128, 2, 2, 240, 24, 168, False, has_pairs=True),
    (128, 64): ForwardConfig(64, 2, 2, 240, 24, 168, True, has_pairs=True),
    (256, 0): ForwardConfig(64, 2, 2, 240, 24, 168, False, has_pairs=True),
}
FORWARD_PAIRS = {
    # By the bytes of an element, where one is read at each pair. Tiles of bytes take half of that memory.
    0: {},
    1: _FORWARD_PAIRS | {
        (64, 32): ForwardConfig(64, 1, 2, 136, 24, 80, False, 3, has_pairs=True),
        (128, 0): ForwardConfig(128, 2, 2, 240, 24, 168, True, has_pairs=True),
    },
    2: _FORWARD_PAIRS,
    # A tile of float32 numbers (64, 64) is as large as one of k (64, 128).
    4: {
        (64, 0): ForwardConfig(64, 1, 2, 136, 24, 80, False, 3, has_pairs=True),
        (64, 16): ForwardConfig(64, 2, 3, 240, 24, 168, True, has_pairs=True),
        (64, 32): ForwardConfig(64, 2, 3, 240, 24, 168, True, has_pairs=True),
        (128, 0): ForwardConfig(64, 2, 3, 240, 24, 168, False, has_pairs=True),
        (128, 64): ForwardConfig(64, 2, 2, 240, 24, 168, False, has_pairs=True),
        (256, 0): ForwardConfig(32, 2, 3, 240, 24, 168, False, has_pairs=True),
    },
}  # fmt: skip
BACKWARD = {
    64: BackwardConfig(128, 128, 64, 2, 240, 24, 168),
    # Tiles of 64 columns, and tails of q, k and v.
    96: BackwardConfig(128, 64, 32, 2, 240, 24, 168, k_tail=32, v_tail=32),
    128: BackwardConfig(128, 64, 64, 2, 240, 24, 168),
    # Tiles of 128 columns, and tails of q and k.
    192: BackwardConfig(128, 64, 32, 2, 240, 24, 168, k_tail=64),
    256: BackwardConfig(64, 64, 128, 2, 240, 24, 168),
    # Shared memory holds k, v, a tile of q, and three pieces of dout, which take the producer more registers.
    512: BackwardConfig(64, 64, 128, 3, 232, 40, 168, piece=64),
}
BACKWARD_WIDE_SPLIT = BackwardConfig(64, 64, 64, 2, 240, 24, 168, k_tail=64, v_tail=64)
"""Where v too has more than 128 of 192 columns."""
BACKWARD_OF_V = BackwardConfig(64, 64, 128, 4, 240, 24, 168, piece=128)
"""Of the launch for dV where there are pieces: there are named barriers for four."""
BACKWARD_PAIRS = {
    0: {},
    1: {head_dim: BACKWARD[head_dim]._replace(pair_stages=2) for head_dim in (64, 96, 128)},
    2: {
        64: BackwardConfig(128, 64, 32, 2, 240, 24, 168, pair_stages=2),
        96: BACKWARD[96]._replace(pair_stages=2),
        128: BackwardConfig(128, 64, 64, 2, 240, 24, 168, pair_stages=2),
    },
    4: {
        64: BackwardConfig(128, 64, 32, 2, 240, 24, 168, pair_stages=2),
        96: BACKWARD[96]._replace(pair_stages=2),
        128: BackwardConfig(128, 64, 64, 2, 240, 24, 168, pair_stages=1),
    },
}
BACKWARD_CURVED = BACKWARD[64]._replace(tile_q=64, dq_columns=32)
"""At 64, where the derivative of a score change depends on the score: for 128 rows there are too few registers."""
HEAD_DIMS = (64, 128, 256)
"""Columns that tiles have; for head dimensions between, TMA fills them up with zeros."""

LATENT = SplitHeadDim(128, 64, 0)
"""How heads of latent attention are held: 136 to 192 columns of q and k, and 72 to 128 of v."""
WIDE = SplitHeadDim(256, 256, 0)
"""How q and k of more columns than a tile has are held."""


def padded_head_dim(head_dim: int) -> int:
    """Columns of the tiles of a head dimension; the forward splits the widest (`WIDE`)."""
    return next(columns for columns in (*HEAD_DIMS, WIDE.head_dim + WIDE.k_tail) if columns >= head_dim)


def backward_head_dim(head_dim: int, v_head_dim: int) -> int:
    """Columns of q and k that a backward computes, in one tile and perhaps a tail."""
    columns, k_tail, _ = split_head_dim(head_dim, v_head_dim) or (0, 0, 0)
    if columns == 64 and k_tail > 0:
        return 96
    return columns + k_tail if k_tail == 64 else padded_head_dim(head_dim)


def forward_config(
    split: SplitHeadDim, band: Band, k_len: int, *, is_packed: bool, has_rules: bool, pair_itemsize: int
) -> ForwardConfig:
    """The configuration of a forward call. pair_itemsize: see `FORWARD_PAIRS`."""
    head_dim, k_tail, _ = split
    if (head_dim, k_tail) in FORWARD_PAIRS[pair_itemsize]:
        return FORWARD_PAIRS[pair_itemsize][head_dim, k_tail]
    if split == LATENT:
        return FORWARD_LATENT[has_rules]
    if is_packed and not has_rules:
        return FORWARD_VARLEN[head_dim, k_tail]
    left, right = band
    is_uneven = left is not None or (right is not None and k_tail == 0)
    few = SHORT_CAUSAL_LENGTH if k_tail and right is not None else SHORT_LENGTH
    # Lists of blocks have 128 rows each.
    uneven_or_few = is_uneven or k_len <= few or has_rules
    return FORWARD_SPLIT[head_dim, k_tail, uneven_or_few] if k_tail else FORWARD[head_dim, uneven_or_few]


def backward_config(
    head_dim: int, v_head_dim: int, *, pair_itemsize: int = 0, is_curved: bool = False
) -> BackwardConfig:
    """The configuration of a backward call of these head dimensions. is_curved: see `BACKWARD_CURVED`."""
    columns = backward_head_dim(head_dim, v_head_dim)
    if is_curved and columns == 64 and pair_itemsize == 0:
        return BACKWARD_CURVED
    if columns == 192 and v_head_dim > 128:
        return BACKWARD_WIDE_SPLIT
    config = BACKWARD_PAIRS[pair_itemsize].get(columns, BACKWARD[columns])
    return config._replace(v_tail=0) if v_head_dim <= columns - config.k_tail else config


def split_head_dim(head_dim: int, v_head_dim: int) -> SplitHeadDim | None:
    """How the forward holds heads of these dimensions; None if it does not."""
    if HEAD_DIMS[-1] < max(head_dim, v_head_dim):
        # Of out, a launch computes as many columns as the first tile of q and k has.
        return WIDE if v_head_dim <= head_dim <= WIDE.head_dim + WIDE.k_tail else None
    for columns, tail, _ in sorted(FORWARD_SPLIT):
        if columns < head_dim <= columns + tail:
            if v_head_dim == head_dim:
                return SplitHeadDim(columns, tail, tail)
            return SplitHeadDim(columns, tail, 0) if columns // 2 < v_head_dim <= columns else None
    return SplitHeadDim(padded_head_dim(head_dim), 0, 0) if v_head_dim == head_dim else None
