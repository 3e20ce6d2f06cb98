"""Packed sequences (varlen): several in the rows of one tensor, and TMA coordinates that end where a sequence does.

TMA checks coordinates against the tensor's ends, and a sequence ends inside. So descriptors describe a tensor [wrap,
end, head, row, column] of BOUND rows, and `tma_coords` makes the last of these rows the sequence's. Rows and ends have
a stride of one row, and BOUND steps along the first axis lead BOUND rows back, because addresses wrap around.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...lib.varlen import slot_of, span_of
from .named_barriers import WARP
from .struct import struct

BOUND = gl.constexpr(1 << 30)
"""More rows than a tensor has."""

PADDING = gl.constexpr(128)
"""Per-row backward buffers are padded to a multiple of this for each sequence: a multiple of every tile."""


@struct
class Varlen:
    """Where packed sequences begin, and which of them a tile belongs to; nothing of this is used unless VARLEN.

    cu_outer, cu_inner: first rows along both axes, (num_sequences + 1,) each. max_outer, max_inner: rows of the longest
    sequence; captured tensors and lists of blocks may have elements for no more. index: the tile's sequence, whose
    first rows are outer_start and inner_start. BOTTOM_RIGHT: whether its diagonal ends at its last row and column.
    """

    cu_outer: gl.tensor
    cu_inner: gl.tensor
    num_sequences: gl.tensor
    max_outer: gl.tensor
    max_inner: gl.tensor
    index: gl.tensor
    outer_start: gl.tensor
    inner_start: gl.tensor
    VARLEN: gl.constexpr
    BOTTOM_RIGHT: gl.constexpr

    @gluon.jit
    def at(self, index, outer_start, inner_start):
        """The same for a tile of the sequence ``index``."""
        return Varlen(
            self.cu_outer, self.cu_inner, self.num_sequences, self.max_outer, self.max_inner,
            index, outer_start, inner_start, self.VARLEN, self.BOTTOM_RIGHT,
        )  # fmt: skip

    @gluon.jit
    def locate(self, outer_tile, outer_len, inner_len, OUTER_TILE: gl.constexpr):
        """`at` the sequence of a tile of a head, the tile's number in it, and the sequence's two lengths.

        outer_len, inner_len: rows of the tensors. Outer rows after the last sequence form one more, which sees nothing.
        """
        index = sequence_of(self.cu_outer, outer_tile, self.num_sequences, OUTER_TILE)
        outer = span_of(self.cu_outer, index, self.num_sequences, outer_len)
        inner = span_of(self.cu_inner, index, self.num_sequences, inner_len)
        inner_length = gl.where(index == self.num_sequences, 0, inner.length)
        outer_tile -= slot_of(self.cu_outer, index, OUTER_TILE)
        return self.at(index, outer.first, inner.first), outer_tile, outer.length, inner_length

    @gluon.jit
    def longest_first(self, place, tiles, OUTER_TILE: gl.constexpr, LAST_FIRST: gl.constexpr):
        """The tile of a head at a place of an order, of fewer than WARP sequences: the longest sequence first.

        Of each sequence the tiles from the first to the last, or with LAST_FIRST from the last to the first.
        """
        lanes = gl.arange(0, WARP, gl.BlockedLayout([1], [WARP], [1], [0]))
        first = slots_of(self.cu_outer, lanes, self.num_sequences, tiles, OUTER_TILE)
        sizes = slots_of(self.cu_outer, lanes + 1, self.num_sequences, tiles, OUTER_TILE) - first
        # In one number, so that one reduction finds a sequence and its size. Sizes are negative where cu_seqlens are
        # out of order.
        left = gl.maximum(sizes, 0) * WARP + lanes
        longest = gl.max(left, 0)
        while (place >= longest // WARP) & (longest >= WARP):
            place -= longest // WARP
            left = gl.where(left == longest, 0, left)
            longest = gl.max(left, 0)
        if LAST_FIRST:
            place = longest // WARP - 1 - place
        return gl.maximum(gl.sum(gl.where(lanes == longest % WARP, first, 0), 0) + place, 0)

    @gluon.jit
    def nearest(self, rows, length, most):
        """The nearest of the first ``length`` rows; of packed sequences, of no more than ``most``."""
        if self.VARLEN:
            length = gl.minimum(length, most)
        return gl.minimum(rows, gl.maximum(length - 1, 0))

    @gluon.jit
    def padded_inner_start(self):
        """The sequence's first inner row in buffers that are padded."""
        return (self.inner_start // PADDING + self.index) * PADDING


@gluon.jit
def slots_of(starts, sequences, num_sequences, tiles, TILE: gl.constexpr):
    """The first tile of each sequence, see `slot_of`; ``tiles`` for those after the rows after the last one."""
    slots = slot_of(starts, gl.minimum(sequences, num_sequences), TILE)
    return gl.where(sequences > num_sequences, tiles, slots)


@gluon.jit
def sequence_of(starts, tile, num_sequences, TILE: gl.constexpr):
    """The sequence that a tile belongs to; ``num_sequences`` for the rows after the last one.

    A warp asks for 32 sequences at a time: one after another, loads take as long as the steps that should cover them.
    """
    lanes = gl.arange(0, WARP, gl.BlockedLayout([1], [WARP], [1], [0]))
    # The sequence begins no later than the tile, even where cu_seqlens are out of order.
    sequence = tile * 0
    beyond = sequence + num_sequences + 1
    while beyond - sequence > 1:
        step = gl.cdiv(beyond - sequence, WARP)
        asked = gl.minimum(sequence + lanes * step, beyond - 1)
        sequence = gl.max(gl.where(slot_of(starts, asked, TILE) <= tile, asked, sequence), 0)
        beyond = gl.minimum(beyond, sequence + step)
    return sequence


@gluon.jit
def new_varlen(cu_outer, cu_inner, sequences, max_outer, max_inner, BOTTOM_RIGHT: gl.constexpr):
    """Packed sequences, or none where ``cu_outer`` is None; then ``sequences`` stands in for fields without a use."""
    VARLEN: gl.constexpr = cu_outer is not None
    if not VARLEN:
        cu_outer, cu_inner = sequences, sequences
    return Varlen(
        cu_outer, cu_inner, sequences, max_outer, max_inner, sequences, sequences, sequences, VARLEN, BOTTOM_RIGHT
    )  # fmt: skip


@gluon.jit
def tma_coords(batch, head, start, length, row, column, VARLEN: gl.constexpr):
    """The coordinates of a row and column; with VARLEN, of the sequence that has ``length`` rows from ``start`` on."""
    coords = [batch, head, row, column]
    if VARLEN:
        coords = [BOUND, start + length, head, BOUND - length + row, column]
    return coords
