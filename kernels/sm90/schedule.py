"""Which tiles a program computes, in which order, and which tiles of keys each of them needs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..versions import aggregate
from .packing import Packing, corner


@aggregate
class Work:
    """One tile of query rows: its matrix, which is a batch's head, its first row, and tiles of keys.

    Those in [begin, end) are seen by any row of it. Those from whole_begin to whole_end are seen by every row, each of
    which sees a key of a tile after them as well, if it sees any at all.
    """

    matrix: gl.tensor
    batch: gl.tensor
    head: gl.tensor
    first_row: gl.tensor
    begin: gl.tensor
    whole_begin: gl.tensor
    whole_end: gl.tensor
    end: gl.tensor

    @gluon.constexpr_function
    def __init__(self, matrix, batch, head, first_row, begin, whole_begin, whole_end, end):
        self.matrix = matrix
        self.batch = batch
        self.head = head
        self.first_row = first_row
        self.begin = begin
        self.whole_begin = whole_begin
        self.whole_end = whole_end
        self.end = end


@aggregate
class Schedule:
    """Tiles of query rows in the order in which programs take them.

    Matrices are taken in sections whose keys and values the L2 cache holds; in a section, with a causal mask, the rows
    that see most come first, which leaves the short ones to fill the gaps at the end.

    If sequences are packed, lengths are those of matrices, and limits hold for one whose lengths are equal; in what
    `work` returns they are those of a tile's sequence, as if it had a matrix to itself.
    """

    matrices: gl.tensor
    heads: gl.tensor
    q_len: gl.tensor
    k_len: gl.tensor
    left: gl.tensor
    right: gl.tensor
    section: gl.tensor
    packing: Packing
    TILE_Q: gl.constexpr
    TILE_K: gl.constexpr
    LEFT: gl.constexpr
    RIGHT: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, matrices, heads, q_len, k_len, left, right, section, packing, TILE_Q, TILE_K, LEFT, RIGHT):
        self.matrices = matrices
        self.heads = heads
        self.q_len = q_len
        self.k_len = k_len
        self.left = left
        self.right = right
        self.section = section
        self.packing = packing
        self.TILE_Q = gl.constexpr(TILE_Q)
        self.TILE_K = gl.constexpr(TILE_K)
        self.LEFT = gl.constexpr(LEFT)
        self.RIGHT = gl.constexpr(RIGHT)

    @gluon.jit
    def tiles_of_a_matrix(self):
        """How many there are; if sequences are packed, for as many as could be cut short, so some may be spare."""
        if self.packing.PACKED:
            tiles = self.q_len // self.TILE_Q + self.packing.count + 1
        else:
            tiles = gl.cdiv(self.q_len, self.TILE_Q)
        return tiles

    @gluon.jit
    def tiles(self):
        """How many tiles there are."""
        return self.matrices * self.tiles_of_a_matrix()

    @gluon.jit
    def work(self, index):
        """What a tile, by its place in the order, asks for, and the schedule of its sequence."""
        tiles = self.tiles_of_a_matrix()
        # What is left over goes with the last section: one of its own would have tiles for few programs.
        last = self.matrices // self.section - 1
        number = gl.minimum(index // (self.section * tiles), last)
        first = number * self.section
        within = index - first * tiles
        width = self.section
        if number == last:
            width = self.matrices - first
        tile = within // width
        matrix = first + within % width
        if self.RIGHT:
            tile = tiles - 1 - tile
        own = self
        if self.packing.PACKED:
            packing, tile, q_len, k_len = self.packing.find(tile, self.q_len, self.k_len, self.TILE_Q)
            own = self.of_sequence(packing, q_len, k_len)
        return own.work_of(matrix // self.heads, matrix % self.heads, tile * self.TILE_Q), own

    @gluon.jit
    def of_sequence(self, packing, q_len, k_len):
        """The schedule of one of packed sequences."""
        shift = q_len * 0
        if self.packing.TO_THE_END:
            shift = k_len - q_len
        return Schedule(
            self.matrices, self.heads, q_len, k_len, self.left + shift, self.right + shift, self.section, packing,
            self.TILE_Q, self.TILE_K, self.LEFT, self.RIGHT,
        )  # fmt: skip

    @gluon.jit
    def has_rows(self, index):
        """Whether there is a row at the place of a tile, which there is unless sequences are packed."""
        has_rows = True
        if self.packing.PACKED:
            work, own = self.work(index)
            has_rows = work.first_row < own.q_len
        return has_rows

    @gluon.jit
    def is_spare(self, index):
        """Whether there is a place, but no row at it."""
        tiles = self.tiles()
        return (index < tiles) & (not self.has_rows(gl.minimum(index, tiles - 1)))

    @gluon.jit
    def q_corner(self, batch, head, row, column):
        """Where a copy of rows of q begins; rows after the last are zeros, and not written."""
        return corner(batch, head, self.packing.q_start, self.q_len, row, column, self.packing.PACKED)

    @gluon.jit
    def k_corner(self, batch, head, row, column):
        """The same of k."""
        return corner(batch, head, self.packing.k_start, self.k_len, row, column, self.packing.PACKED)

    @gluon.jit
    def first_filled_up(self):
        """Where the rows of k begin among those that are filled up for each sequence."""
        first = 0
        if self.packing.PACKED:
            first = self.packing.first_filled_up()
        return first

    @gluon.jit
    def visits(self, times):
        """So many, or none if sequences are packed and this one has no keys: a backward need not visit any."""
        if self.packing.PACKED:
            times = gl.where(self.k_len > 0, times, 0)
        return times

    @gluon.jit
    def row_numbers(self, pointer, work, own):
        """Of numbers for all rows of matrices, those for a tile's sequence."""
        pointer += work.matrix.to(gl.int64) * self.q_len
        if self.packing.PACKED:
            pointer += own.packing.q_start
        return pointer

    @gluon.jit
    def work_of(self, batch, head, first_row):
        """The same, by where it begins."""
        end = self.k_len
        last = self.k_len - 1
        if self.RIGHT:
            end = gl.minimum(end, first_row + self.TILE_Q + self.right)
            last = gl.minimum(last, first_row + self.right)
        begin = 0
        whole_begin = 0
        if self.LEFT:
            begin = gl.maximum(first_row + self.left, 0)
            whole_begin = gl.maximum(first_row + self.TILE_Q - 1 + self.left, 0)
        # At least one tile is visited, all of it hidden if need be, so that no program has to do without a softmax.
        end = gl.maximum(gl.cdiv(end, self.TILE_K), 1)
        begin = gl.minimum(begin // self.TILE_K, end - 1)
        whole_end = gl.maximum(last, 0) // self.TILE_K
        whole_begin = gl.cdiv(whole_begin, self.TILE_K)
        return Work(
            batch * self.heads + head, batch, head, first_row,
            gl.to_tensor(begin), gl.to_tensor(whole_begin), whole_end, end,
        )  # fmt: skip

    @gluon.jit
    def in_place_of(self, tile, work, TURNED: gl.constexpr):
        """The tile of keys that is visited in a tile's place, where all are seen and TURNED.

        Programs that begin together would all visit the first one first, and all add to the same numbers. So each
        begins beside its own rows, as with a causal mask, and comes to the first tile after the last.
        """
        if TURNED and not (self.LEFT or self.RIGHT):
            tile += work.first_row // self.TILE_K % work.end
            tile = gl.where(tile < work.end, tile, tile - work.end)
        return tile

    @gluon.jit
    def sees(self, number, tile, work):
        """Whether there is a ``number``-th tile of rows in a tile's matrix, and a tile of keys is one of its first."""
        there = number < gl.cdiv(self.q_len, self.TILE_Q)
        if self.LEFT:
            there = there & (self.work_of(work.batch, work.head, number * self.TILE_Q).begin <= tile)
        return there

    @gluon.jit
    def is_cut_short(self, work):
        """Whether some of the last tile's keys do not exist, as none do where one of packed sequences has no keys."""
        if self.packing.PACKED:
            cut_short = work.end * self.TILE_K > self.k_len
        else:
            cut_short = self.k_len % self.TILE_K != 0
        return cut_short

    @gluon.jit
    def whole_tiles(self, work):
        """From which tile on, and up to which, a backward needs no mask: rows are of keys here, tiles of queries.

        None where some of the keys do not exist: those have scores of 0.
        """
        left = gl.minimum(gl.maximum(work.whole_begin, work.begin), work.end)
        right = gl.minimum(gl.maximum(work.whole_end, left), work.end)
        if not (self.LEFT or self.RIGHT):
            right = work.end
        if work.first_row + self.TILE_Q > self.q_len:
            left = work.end
            right = work.end
        return left, right
