"""Packed sequences, several in the rows of one matrix: which a tile belongs to, and how copies end where it does.

The copying unit leaves out what lies outside of a tensor, and a sequence ends inside. So it is told of another tensor
[big, end, head, row, column] with BOUND rows, of which `corner` has the last ones be those of a sequence. Rows and ends
are one row apart, and BOUND steps along the first axis lead back by BOUND rows, because addresses wrap around.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..triton.sequences import sequence_of, slot_of, span_of
from ..versions import aggregate

BOUND = gl.constexpr(1 << 30)
"""More rows than a matrix has."""

FILLED_UP = gl.constexpr(128)
"""What the backward has for each row of q is for a multiple of so many, of each sequence: of any tile."""


@aggregate
class Packing:
    """Where packed sequences are listed, how many, and which one a tile is of, if they are PACKED.

    q_starts, k_starts: see `triton.sequences`. q_start, k_start: the first rows of the ``number``-th sequence.
    TO_THE_END: whether a sequence's last row's own column is its last, rather than the first row's the first.
    """

    q_starts: gl.tensor
    k_starts: gl.tensor
    count: gl.tensor
    number: gl.tensor
    q_start: gl.tensor
    k_start: gl.tensor
    PACKED: gl.constexpr
    TO_THE_END: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, q_starts, k_starts, count, number, q_start, k_start, PACKED, TO_THE_END):
        self.q_starts = q_starts
        self.k_starts = k_starts
        self.count = count
        self.number = number
        self.q_start = q_start
        self.k_start = k_start
        self.PACKED = gl.constexpr(PACKED)
        self.TO_THE_END = gl.constexpr(TO_THE_END)

    @gluon.jit
    def of(self, number, q_start, k_start):
        """The same, for a tile of one sequence."""
        return Packing(self.q_starts, self.k_starts, self.count, number, q_start, k_start, self.PACKED, self.TO_THE_END)

    @gluon.jit
    def find(self, tile, q_len, k_len, TILE_Q: gl.constexpr):
        """The sequence of a tile of rows of q, the tile's number in it, and rows of q and of k, in matrices of so many.

        The rows of q after the last sequence see nothing.
        """
        number = sequence_of(self.q_starts, tile, self.count, TILE_Q)
        queries = span_of(self.q_starts, number, self.count, q_len)
        keys = span_of(self.k_starts, number, self.count, k_len)
        k_length = gl.where(number == self.count, 0, keys.length)
        tile -= slot_of(self.q_starts, number, TILE_Q)
        return self.of(number, queries.first, keys.first), tile, queries.length, k_length

    @gluon.jit
    def first_filled_up(self):
        """Where the rows of k's sequence begin, if those of each are filled up."""
        return (self.k_start // FILLED_UP + self.number) * FILLED_UP


@gluon.jit
def new_packing(q_starts, k_starts, sequences, TO_THE_END: gl.constexpr):
    """So many packed sequences, or none where nothing is listed; of those it is never asked where they lie."""
    if q_starts is None:
        packing = Packing(sequences, sequences, sequences, sequences, sequences, sequences, False, TO_THE_END)
    else:
        packing = Packing(q_starts, k_starts, sequences, sequences, sequences, sequences, True, TO_THE_END)
    return packing


@gluon.jit
def corner(batch, head, start, length, row, column, PACKED: gl.constexpr):
    """Where the copying unit finds a tile: at a row of the sequence that begins at ``start``, if they are packed."""
    found = [batch, head, row, column]
    if PACKED:
        found = [BOUND, start + length, head, BOUND - length + row, column]
    return found
