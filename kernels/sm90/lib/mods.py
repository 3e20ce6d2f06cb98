"""A call's rules in the kernels for Hopper, and its dropout; see `cs336_systems.kernels.rules`."""

import ast
import functools
import inspect
import types

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...language import is_written, written
from .dropout import Dropout
from .struct import struct

COMPARISONS = {ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge"}
LOGIC = {ast.BitAnd: "and", ast.BitOr: "or", ast.BitXor: "xor"}
"""PTX's names of operators."""


def in_gluon(function):
    """A `jit` function of `cs336_systems.kernels.language`, and those that it calls, as one that these kernels call."""
    return _twin(function.fn)


@functools.cache
def _twin(python):
    scope = dict(python.__globals__)
    for name in python.__code__.co_names:
        value = scope.get(name)
        if value is tl:
            scope[name] = gl
        elif hasattr(value, "fn"):
            scope[name] = in_gluon(value)
    if not is_written(python):
        return gluon.jit(types.FunctionType(python.__code__, scope, python.__name__))
    [function] = _Predicates().visit(ast.parse(inspect.getsource(python))).body
    lines = [line for statement in function.body for line in ast.unparse(statement).splitlines()]
    names = scope | {"compared": compared, "combined": combined}
    return gluon.jit(written(function.name, ast.unparse(function.args), lines, names).fn)


class _Predicates(ast.NodeTransformer):
    """Writes ``compared(x, "lt", y)`` for ``x < y`` and ``combined(x, "and", y)`` for ``x & y``."""

    def visit_Compare(self, node):
        self.generic_visit(node)
        return _call("compared", node.left, COMPARISONS[type(node.ops[0])], node.comparators[0])

    def visit_BinOp(self, node):
        self.generic_visit(node)
        name = LOGIC.get(type(node.op))
        return node if name is None else _call("combined", node.left, name, node.right)


def _call(function, left, operator, right):
    return ast.Call(ast.Name(function, ast.Load()), [left, ast.Constant(operator), right], [])


@gluon.jit
def compared(x, OPERATOR: gl.constexpr, y):
    """A comparison, of integers of 32 bits by PTX.

    LLVM compares all pairs of a thread as one vector, gathers the bits in an integer and takes it apart.
    """
    x, y = gl.to_tensor(x), gl.to_tensor(y)
    if x.dtype == gl.int32 and y.dtype == gl.int32:
        found = gl.inline_asm_elementwise(
            "setp." + OPERATOR + ".s32 $0, $1, $2;", "=b,r,r", [x, y], dtype=gl.int1, is_pure=True, pack=1
        )
    elif OPERATOR == "eq":
        found = x == y
    elif OPERATOR == "ne":
        found = x != y
    elif OPERATOR == "lt":
        found = x < y
    elif OPERATOR == "le":
        found = x <= y
    elif OPERATOR == "gt":
        found = x > y
    else:
        found = x >= y
    return found


@gluon.jit
def combined(x, OPERATOR: gl.constexpr, y):
    """The same of ``&``, ``|`` and ``^``, of bools by PTX."""
    x, y = gl.to_tensor(x), gl.to_tensor(y)
    if x.dtype == gl.int1 and y.dtype == gl.int1:
        found = gl.inline_asm_elementwise(
            OPERATOR + ".pred $0, $1, $2;", "=b,b,b", [x, y], dtype=gl.int1, is_pure=True, pack=1
        )
    elif OPERATOR == "and":
        found = x & y
    elif OPERATOR == "or":
        found = x | y
    else:
        found = x ^ y
    return found


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
    def hide(self, seen, pairs):
        """Which of the pairs that are seen MASK leaves."""
        if self.MASK is not None:
            mask = self.MASK(pairs.batch, pairs.head, pairs.rows, pairs.columns, self.captured[0])
            seen = combined(seen, "and", mask.to(gl.int1))
        return seen


@gluon.jit
def replaced(items, PLACE: gl.constexpr, item):
    """A tuple with another item at a place."""
    return items[:PLACE] + (item,) + items[PLACE + 1 :]  # noqa: RUF005 - unknown to Triton


@struct
class Pairs:
    """A tile of pairs of query rows and key columns, which broadcast: where they are, clamped to those that exist."""

    batch: gl.tensor
    head: gl.tensor
    rows: gl.tensor
    columns: gl.tensor


@gluon.jit
def clamped(places, length):
    """The nearest places that exist of ``length``."""
    return gl.minimum(places, gl.maximum(length - 1, 0))
