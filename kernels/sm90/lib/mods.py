"""A call's rules in the kernels for Hopper, and its dropout; see `cs336_systems.kernels.rules`."""

import functools
import types

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...language import apart, compared, congruent, difference, less, remainder
from ...lib.rules import is_singular
from .dropout import Dropout
from .struct import struct

ZERO, MINUS_INFINITY = gl.constexpr("0f00000000"), gl.constexpr("0fFF800000")
"""float32 numbers as PTX writes them."""


def in_gluon(function, *, whole_tiles):
    """A `jit` function of `cs336_systems.kernels.language`, and those that it calls, as one that these kernels call.

    whole_tiles: whether all positions along the columns of tiles exist, and so are not clamped.
    """
    return _twin(function.fn, whole_tiles)


@functools.cache
def _twin(python, whole_tiles):
    scope = dict(python.__globals__)
    for name in python.__code__.co_names:
        value = scope.get(name)
        if value is tl:
            scope[name] = gl
        elif twin := next((twin for known, twin in _twins(whole_tiles) if known is value), None):
            scope[name] = twin
        elif hasattr(value, "fn"):
            scope[name] = in_gluon(value, whole_tiles=whole_tiles)
    twin = types.FunctionType(python.__code__, scope, python.__name__)
    twin.__dict__.update(python.__dict__)
    return gluon.jit(twin)


def _twins(whole_tiles):
    """What these kernels have in place of functions of the language."""
    known = (compared, opaque), (congruent, tile_congruent), (difference, tile_difference), (less, tile_less)
    return (*known, (apart, tile_apart)) if whole_tiles else known


@gluon.jit
def opaque(x):
    """int32 x, unknown to LLVM, which would gather the results of many comparisons in one integer and take it apart."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.constexpr_function
def along_columns(x, y):
    """Whether x lies along the rows of a tile, and y along its columns, of which a thread has more than neighbours."""
    return len(x.shape) == 2 and len(y.shape) == 2 and x.shape[1] == 1 and y.shape[0] == 1 and y.shape[1] > 8


@gluon.jit
def eights(y):
    """How much further a thread's columns of a tile, those of y (1, columns), are than those of its first eight."""
    return gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, y.type.layout))[None, :] // 8 * 8


@gluon.jit
def tile_difference(x, y):
    """x - y of integers as float32, for a tile of pairs if one has a row of columns (1, columns).

    Integers are converted for a thread's columns below 8 alone. The others are 8, 16 and so on further, which is added
    to the float32 number: one instruction where converting needs two. All are small, and so are exact.
    """
    if along_columns(x, y):
        further = eights(y)
        made = (x - (y - further)).to(gl.float32) - further.to(gl.float32)
    elif along_columns(y, x):
        further = eights(x)
        made = (x - further - y).to(gl.float32) + further.to(gl.float32)
    else:
        made = x.to(gl.float32) - y.to(gl.float32)
    return made


@gluon.jit
def tile_apart(column, row, origin):
    """column - row + origin with 64 bits, of positions that are not clamped along the columns of a tile.

    As in `tile_less`, few integers are computed. How much further the others are is known when compiled, and becomes a
    part of the instructions that load.
    """
    if along_columns(column, row):
        near, further = in_eights(row)
        made = (column + origin - near).to(gl.int64) - further
    elif along_columns(row, column):
        near, further = in_eights(column)
        made = (near - (row - origin)).to(gl.int64) + further
    else:
        made = (column - row + origin).to(gl.int64)
    return made


@gluon.jit
def in_eights(y):
    """The positions of a tile's columns (1, columns), which begin at a multiple of ``columns``, as two summands.

    The second is that of `eights`, known when compiled. The first, the same for many columns, is made of bits, as LLVM
    makes the positions: it does not see that differences are equal. Of positions that do not exist, and are clamped,
    it is not the sum: what is computed of them is hidden.
    """
    return y & (7 - y.shape[1]), eights(y)


@gluon.jit
def tile_less(x, y, number):
    """x < y + number. As in `tile_difference`, few integers are computed, and compared with constants."""
    if along_columns(x, y):
        near, further = in_eights(y)
        made = opaque(x - number - near) < further
    elif along_columns(y, x):
        near, further = in_eights(x)
        made = opaque(near - (y + number)) < -further
    else:
        made = opaque(x) < opaque(y + number)
    return made


@gluon.jit
def tile_congruent(x, y, number):
    """Whether x and y are a multiple of a number apart, in the same way."""
    if along_columns(x, y):
        near, further = in_eights(y)
        made = opaque(remainder(x - near, number)) == further % number
    elif along_columns(y, x):
        made = tile_congruent(y, x, number)
    else:
        made = opaque(x % number) == opaque(y % number)
    return made


@struct
class Mods:
    """A call's score changes, its mask and its dropout.

    captured: what the rules of MASK and those of SCORE captured, two tuples. natural: factor from scores after
    `ScoreScale.softcap` to those that SCORE takes. MASK and SCORE: see `rules`, or None.
    """

    captured: gl.tuple
    natural: gl.tensor
    dropout: Dropout
    MASK: gl.constexpr
    SCORE: gl.constexpr

    @gluon.jit
    def change(self, s, pairs):
        """Scores (natural ones with SCORE)."""
        if self.SCORE is not None:
            s = self.SCORE(s * self.natural, pairs.batch, pairs.head, pairs.rows, pairs.columns, self.captured[1])
        return s

    @gluon.jit
    def differentiate(self, s, pairs):
        """The same, and their derivative by those before."""
        slope = 1.0
        if self.SCORE is not None:
            s, slope, _ = self.SCORE(
                s * self.natural, pairs.batch, pairs.head, pairs.rows, pairs.columns, self.captured[1]
            )  # fmt: skip
        return s, slope

    @gluon.jit
    def chained(self, p, derivative):
        """P times a derivative that SCORE returned, and 0 where P is: of pairs that do not exist it may be NaN."""
        if is_singular(self.SCORE):
            p = selected(p * derivative, p.to(gl.int32, bitcast=True), ZERO)
        elif self.SCORE is not None:
            p *= derivative
        return p

    @gluon.jit
    def terms(self, s, pairs):
        """Scores, and the derivatives by what they captured: those that SCORE was written for."""
        s, _, terms = self.SCORE(
            s * self.natural, pairs.batch, pairs.head, pairs.rows, pairs.columns, self.captured[1]
        )  # fmt: skip
        return s, terms

    @gluon.jit
    def reading(self, tile, ARGUMENT: gl.constexpr):
        """The same with a tile, in registers, in place of what was captured, by MASK and then by SCORE, at a number."""
        of_mask = self.captured[0]
        of_scores = self.captured[1]
        if len(of_mask) > ARGUMENT:
            of_mask = replaced(of_mask, ARGUMENT, tile)
        else:
            of_scores = replaced(of_scores, ARGUMENT - len(of_mask), tile)
        return Mods((of_mask, of_scores), self.natural, self.dropout, self.MASK, self.SCORE)

    @gluon.jit
    def unmasked(self, pairs):
        """Whether MASK leaves a pair; any number but 0 stands for True."""
        return self.MASK(pairs.batch, pairs.head, pairs.rows, pairs.columns, self.captured[0])

    @gluon.jit
    def hide(self, x, pairs, HIDDEN: gl.constexpr):
        """float32 x where MASK leaves a pair, and HIDDEN, as PTX writes it, elsewhere."""
        if self.MASK is not None:
            x = selected(x, self.unmasked(pairs), HIDDEN)
        return x

    @gluon.jit
    def restrict(self, seen, pairs):
        """Which of the pairs that are ``seen`` MASK leaves."""
        if self.MASK is not None:
            seen = seen & (self.unmasked(pairs) != 0)
        return seen


@gluon.jit
def selected(x, seen, HIDDEN: gl.constexpr):
    """float32 x where ``seen``, and HIDDEN, as PTX writes it, elsewhere. `opaque` says why in PTX."""
    return gl.inline_asm_elementwise(
        "{.reg .pred seen; setp.ne.b32 seen, $2, 0; selp.f32 $0, $1, " + HIDDEN + ", seen;}", "=f,f,r",
        [x, seen.to(gl.int32)], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def replaced(items, PLACE: gl.constexpr, item):
    """A tuple with another item at a place."""
    return items[:PLACE] + (item,) + items[PLACE + 1 :]  # noqa: RUF005 - unknown to Triton


@struct
class Pairs:
    """A tile of pairs of query rows and key columns, which broadcast: where they are, or the nearest that exist."""

    batch: gl.tensor
    head: gl.tensor
    rows: gl.tensor
    columns: gl.tensor
