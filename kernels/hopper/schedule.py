"""Which tiles a program computes, in which order, and which tiles of keys each of them needs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .versions import aggregate


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
    """

    matrices: gl.tensor
    heads: gl.tensor
    q_len: gl.tensor
    k_len: gl.tensor
    left: gl.tensor
    right: gl.tensor
    section: gl.tensor
    TILE_Q: gl.constexpr
    TILE_K: gl.constexpr
    LEFT: gl.constexpr
    RIGHT: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, matrices, heads, q_len, k_len, left, right, section, TILE_Q, TILE_K, LEFT, RIGHT):
        self.matrices = matrices
        self.heads = heads
        self.q_len = q_len
        self.k_len = k_len
        self.left = left
        self.right = right
        self.section = section
        self.TILE_Q = gl.constexpr(TILE_Q)
        self.TILE_K = gl.constexpr(TILE_K)
        self.LEFT = gl.constexpr(LEFT)
        self.RIGHT = gl.constexpr(RIGHT)

    @gluon.jit
    def tiles(self):
        """How many tiles there are."""
        return self.matrices * gl.cdiv(self.q_len, self.TILE_Q)

    @gluon.jit
    def work(self, index):
        """What a tile, by its place in the order, asks for."""
        tiles = gl.cdiv(self.q_len, self.TILE_Q)
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
        return self.work_of(matrix // self.heads, matrix % self.heads, tile * self.TILE_Q)

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
