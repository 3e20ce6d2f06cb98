"""Dropout: which probabilities of a tile are kept, as bits in the threads that hold the probabilities.

Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) makes four words of two numbers, for eight
columns of a row; `triton.lib.pairs.keep_mask` says for which. Two threads hold these columns of an accumulator, and
four threads if it is transposed. So each of them computes a half, or a quarter, of the calls whose numbers they share,
and they exchange a bit for each number. The bits of four calls fill an int32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...call import DROPOUT_BITS, PHILOX_ROUNDS
from .mma import WG_ROWS, accumulator, opaque_zero
from .struct import struct

THREADS = gl.constexpr(128)
"""Of a warp group."""

ROUNDS = gl.constexpr(PHILOX_ROUNDS)
LOWER_BITS = gl.constexpr((2**DROPOUT_BITS - 1) * 0x10001)
"""Those of both random numbers of a word."""


@struct
class Dropout:
    """A call's dropout; nothing of this is used unless DROPS.

    seed: pointer to it. addend: see `bound_mods.dropout_operand`. keep_scale: factor of the probabilities that are
    kept. heads: of q.
    """

    seed: gl.tensor
    addend: gl.tensor
    keep_scale: gl.tensor
    heads: gl.tensor
    DROPS: gl.constexpr

    @gluon.jit
    def draw(self, first_row, first_column, batch, head, SIZE: gl.constexpr, TRANSPOSED: gl.constexpr):
        """The bits for `drop` of a tile of 64 rows and SIZE columns, or SIZE rows and 64 columns if TRANSPOSED.

        They depend on no product, so drawing them can overlap one.
        """
        bits = first_row
        if self.DROPS:
            seed = gl.load(self.seed)
            matrix = batch * self.heads + head
            calls: gl.constexpr = min(SIZE, WG_ROWS) // 16
            layout: gl.constexpr = by_thread(calls)
            thread = gl.arange(0, THREADS, layout=gl.SliceLayout(1, layout))[:, None]
            call = gl.arange(0, calls, layout=gl.SliceLayout(0, layout))[None, :]
            if TRANSPOSED:
                rows = first_row + call * 16 + thread // 4 % 2 * 8 + thread // 8 % 2 + thread % 4 * 2
                counters = first_column // 8 + thread // 32 * 2 + thread // 16 % 2
            else:
                thread += opaque_zero(first_column)
                rows = first_row + thread // 32 * 16 + thread // 4 % 8 + call % 2 * 8
                counters = first_column // 8 + call // 2 * 4 + thread % 2 * 2 + thread // 2 % 2
            bits = self.draw_columns(seed, rows, counters, matrix, TRANSPOSED)
            if SIZE == 2 * WG_ROWS:
                if TRANSPOSED:
                    rows += WG_ROWS
                else:
                    counters += WG_ROWS // 8
                bits = gl.join(bits, self.draw_columns(seed, rows, counters, matrix, TRANSPOSED))
        return bits

    @gluon.jit
    def draw_columns(self, seed, rows, counters, matrix, TRANSPOSED: gl.constexpr):
        """A number (128,) for each thread: the bits of 64 columns of its accumulator, or of all, if they are 32.

        rows, counters (128, calls): of the calls that each thread computes.
        """
        first, second, third, fourth = philox(seed, counters, rows, matrix)
        call = gl.arange(0, rows.shape[1], layout=gl.SliceLayout(0, rows.type.layout))[None, :]
        # Bytes 0 and 2 are of the first two of four adjacent columns, bytes 1 and 3 of the others.
        bits = self.keep_bits(first, 2 * call) | self.keep_bits(third, 2 * call + 1)
        bits |= self.keep_bits(second, 2 * call + 8) | self.keep_bits(fourth, 2 * call + 9)
        return exchanged(gl.sum(bits, 1), TRANSPOSED)

    @gluon.jit
    def keep_bits(self, words, place):
        """Bit ``place`` of each half of a word: whether the probability with the random number in this half is kept."""
        return ((words & LOWER_BITS) + self.addend >> (15 - place)) & (0x10001 << place)

    @gluon.jit
    def drop(self, p, bits, TRANSPOSED: gl.constexpr, AGAIN: gl.constexpr = False):
        """A tile (64, columns) in registers, 0 where dropout drops the probability.

        AGAIN: another tile was dropped by the same bits before. If ptxas knew that they are the same, it would keep the
        predicate of each element, which takes two instructions.
        """
        if self.DROPS:
            if AGAIN:
                bits = rotated(bits)
            layout: gl.constexpr = accumulator(p.shape[1])
            row = gl.arange(0, WG_ROWS, layout=gl.SliceLayout(1, layout))[:, None]
            column = gl.arange(0, p.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
            block = column // 8
            bit = place_of(block, row, TRANSPOSED) + column % 2 * 16
            if AGAIN:
                bit = (bit + 1) % 32
            p = gl.where((of_elements(bits, p.shape[1]) >> bit) & 1 != 0, p, 0.0)
        return p

    @gluon.jit
    def drop_packed(self, p, bits, TRANSPOSED: gl.constexpr):
        """`drop` of a tile from `pack_pairs`, with fewer instructions."""
        if self.DROPS:
            COLUMNS: gl.constexpr = 2 * p.shape[1]
            layout: gl.constexpr = p.type.layout
            row = gl.arange(0, WG_ROWS, layout=gl.SliceLayout(1, layout))[:, None]
            block = gl.arange(0, p.shape[1], layout=gl.SliceLayout(0, layout))[None, :] // 4
            place = place_of(block, row, TRANSPOSED)
            even, _ = gl.split(gl.reshape(of_elements(bits, COLUMNS), [WG_ROWS, p.shape[1], 2]))
            # Bits 7 and 23, or 15 and 31, are now those of a pair; PRMT repeats them.
            p &= repeated(even << (7 - place % 8), 0xAA88 + place // 8 * 0x1111)
        return p

    @gluon.jit
    def scale(self, x):
        """What kept probabilities made, times their factor."""
        if self.DROPS:
            x *= self.keep_scale
        return x


@gluon.jit
def new_dropout(dropout, kv_heads, group, unused):
    """From a kernel's argument: (seed, addend, keep_scale), or None; then ``unused`` stands in."""
    if dropout is None:
        made = Dropout(unused, unused, unused, unused, False)
    else:
        made = Dropout(
            dropout[0], gl.to_tensor(dropout[1]), gl.to_tensor(dropout[2]), gl.to_tensor(kv_heads * group), True
        )
    return made


@gluon.constexpr_function
def by_thread(columns):
    """The layout of (128, columns) in which each thread of a warp group has a row."""
    return gl.BlockedLayout([1, columns], [32, 1], [4, 1], [1, 0])


@gluon.jit
def philox(seed, first, second, third):
    """Four int32 random numbers, from an int64 seed and a counter of three numbers and 0: Philox 4x32."""
    fourth = 0
    low, high = seed.to(gl.int32), (seed >> 32).to(gl.int32)
    for _ in gl.static_range(ROUNDS):
        of_first, of_third = wide_product(first, 0xD2511F53), wide_product(third, 0xCD9E8D57)
        first, second = of_third[0] ^ second ^ low, of_third[1]
        third, fourth = of_first[0] ^ fourth ^ high, of_first[1]
        # 0x9E3779B9 and 0xBB67AE85.
        low += -0x61C88647
        high += -0x4498517B
    return first, second, third, fourth


@gluon.constexpr_function
def multiplication(factor):
    """PTX of the upper and the lower half of a product: one instruction, which LLVM often makes two of."""
    return f"{{ .reg .b64 product; mul.wide.u32 product, $2, {factor}; mov.b64 {{$1, $0}}, product; }}"


@gluon.jit
def wide_product(x, FACTOR: gl.constexpr):
    """The upper and the lower 32 bits of a product of unsigned numbers."""
    return gl.inline_asm_elementwise(
        multiplication(FACTOR), "=r,=r,r", [x], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )


@gluon.jit
def repeated(x, choice):
    """The highest bit of four bytes of a number, each eight times; 8 added to a digit of PRMT's choice."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, $2;", "=r,r,r", [x, choice], dtype=gl.int32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def rotated(x):
    """The same bits, each one place further up, the last one first."""
    return gl.inline_asm_elementwise(
        "shf.l.wrap.b32 $0, $1, $1, 1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.constexpr_function
def exchange(distance):
    """PTX of the number that the thread holds whose lane differs in the bit ``distance``."""
    return f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;"


@gluon.jit
def merged(x, DISTANCE: gl.constexpr, LOWER: gl.constexpr, UPPER: gl.constexpr):
    """Bytes of each number (128,) and of the one in the thread whose lane differs in the bit DISTANCE.

    LOWER, UPPER: which, where this bit is 0, and where it is 1. From the last hexadecimal digit on: 0 to 3 are bytes of
    a thread's own number, 4 to 7 of the other.
    """
    other = gl.inline_asm_elementwise(exchange(DISTANCE), "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)
    thread = gl.arange(0, THREADS, layout=x.type.layout)
    choice = gl.where((thread & DISTANCE) == 0, LOWER, UPPER)
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [x, other, choice], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def exchanged(x, TRANSPOSED: gl.constexpr):
    """Of the bytes of two threads' numbers those of each thread: 0 and 2 in the first, 1 and 3 in the second.

    TRANSPOSED: of four threads', whose lanes are 4 apart, bytes 0, 2, 1 and 3 in the first to the fourth.
    """
    return merged(merged(x, 4, 0x5410, 0x3276), 8, 0x6420, 0x3175) if TRANSPOSED else merged(x, 1, 0x6240, 0x3715)


@gluon.jit
def place_of(block, row, TRANSPOSED: gl.constexpr):
    """The bit, of 16, of a row and the first of two adjacent columns in this block of eight."""
    if TRANSPOSED:
        place = block % 2 * 8 + block // 2 % 4 * 2 + row // 8 % 2
    else:
        place = block // 2 % 2 * 8 + block // 4 % 2 * 4 + row // 8 % 2 * 2 + block % 2
    return place


@gluon.jit
def of_elements(x, COLUMNS: gl.constexpr):
    """For each element of an accumulator (64, COLUMNS) its thread's number, one (128,), or (128, 2) for two halves."""
    HALVES: gl.constexpr = x.numel // THREADS
    BLOCKS: gl.constexpr = COLUMNS // 8 // HALVES
    x = gl.reshape(x, [4, 8, 4, HALVES])
    for _ in gl.static_range(5 if BLOCKS == 8 else 4):
        x = gl.join(x, x)
    # Four warps, eight rows, four threads in a row; two rows eight apart; columns by eights, two in a thread.
    x = gl.permute(gl.reshape(x, [4, 8, 4, HALVES, 2, BLOCKS, 2]), [0, 4, 1, 3, 5, 2, 6])
    return gl.convert_layout(gl.reshape(x, [WG_ROWS, COLUMNS]), accumulator(COLUMNS), assert_trivial=True)
