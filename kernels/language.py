"""The language that masks and score changes are written in: one function, for Triton's kernels and for torch's tensors.

`jit` functions compute element by element: with operators, with what `tl` has for elements (where, minimum, maximum,
abs, exp, exp2, log, log2, sqrt, sin, cos, erf, floor), and with `at`, `tanh` and so on from here. Triton compiles
them into its kernels. `in_torch` runs the same source on torch's tensors, where autograd differentiates it; that needs
no Triton.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import os
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # Triton has no wheel for this platform: the functions run on torch alone
    triton = tl = None

__all__ = [
    "NUMBERS", "apart", "at", "at_least", "at_most", "bounded", "compared", "congruent", "difference", "far_float",
    "floor_divide", "in_torch", "inside", "interpreting", "jit", "less", "near_float", "remainder", "sigmoid", "tanh",
    "tl", "written",
]  # fmt: skip

NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
"""Numbers that rules capture; those of a traced call are symbolic."""


def interpreting() -> bool:
    """Whether Triton is asked to interpret kernels on the CPU instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def jit(function: Callable[..., Any]) -> Any:
    """A function that kernels can call; without Triton the function as it is."""
    if tl is None:
        return function
    if triton.knobs.runtime.interpret:
        # The interpreter insists on finding the language among a function's globals, used or not.
        function.__globals__.setdefault("_triton_language", tl)
    return triton.jit(function)


_numbers = itertools.count()


def written(name: str, parameters: str, lines: Sequence[str], names: Mapping[str, Any]) -> Any:
    """A `jit` function of these lines, in which the names stand for these values.

    Triton reads its source, so that is left where Python looks for it.
    """
    source = "\n".join([f"def {name}({parameters}):", *[f"    {line}" for line in lines], ""])
    file = f"<{name} {next(_numbers)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"__name__": __name__, **names}
    exec(compile(source, file, "exec"), scope)
    function: Callable[..., Any] = scope[name]
    return jit(function)


@jit
def at(view, index):
    """The element of a captured tensor at ``index``, a tuple with one number or tile for each of its axes.

    view: the tensor's address and strides, each in a tuple; one of another length for an axis of size 1, which is read
    at 0 whatever the index. Indices must be inside of the tensor. Floating-point elements come in float32.
    Or the elements themselves, where the kernel has loaded them: any number but 0 may stand for True.
    """
    if isinstance(view, tl.tensor):
        element = view
    else:
        offset = tl.cast(0, tl.int64)
        for axis in tl.static_range(len(index)):
            if len(view[1][axis]) == 1:
                offset += index[axis] * tl.cast(view[1][axis][0], tl.int64)
        element = tl.load(view[0] + offset)
    if element.dtype.is_floating():
        element = element.to(tl.float32)
    return element


@jit
def apart(column, row, origin):
    """The index at which a table of distances is read, of which ``origin`` is that of distance 0.

    Kernels for Hopper have `sm90.lib.mods.tile_apart` in its place, where tiles are whole.
    """
    return column - row + origin


@jit
def near_float(number, difference):
    """An integer as float32, where it is small: ``difference``, which was computed of positions converted to float32.

    It needs a conversion for each row and each column. ``number``, the integer converted, needs one for each pair.
    """
    return difference


@jit
def far_float(number, difference):
    """An integer of any size as float32: ``number``, because ``difference`` may be rounded."""
    return number


@jit
def difference(x, y):
    """x - y of integers as float32. Kernels for Hopper have `sm90.lib.mods.tile_difference` in its place."""
    return x.to(tl.float32) - y.to(tl.float32)


@jit
def compared(x):
    """An integer that is about to be compared. Kernels for Hopper have `sm90.lib.mods.opaque` in its place."""
    return x


@jit
def less(x, y, number):
    """x < y + number, of the row and the column of a pair and an integer that is `bounded`.

    Kernels for Hopper have `sm90.lib.mods.tile_less` in its place.
    """
    return x < y + number


@jit
def at_least(x, low):
    """x, or ``low`` where it is smaller; NaN stays. On torch's tensors it is ``clamp``, with its derivative."""
    return tl.where(x < low, low, x)


@jit
def at_most(x, high):
    """x, or ``high`` where it is larger; the rest is as in `at_least`."""
    return tl.where(x > high, high, x)


@jit
def bounded(number):
    """An integer from -2**30 to 2**30, the nearest: further than any two positions are apart, with sums of 32 bits."""
    return tl.cast(tl.minimum(tl.maximum(number, -1073741824), 1073741824), tl.int32)


@jit
def congruent(x, y, number):
    """Whether the row and the column of a pair are a multiple of a number apart.

    Kernels for Hopper have `sm90.lib.mods.tile_congruent` in its place.
    """
    return x % number == y % number


@jit
def tanh(x):
    """The hyperbolic tangent, to float32's rounding: a polynomial near 0, where the quotient would cancel."""
    square = x * x
    series = -0.0061980313 * square + 0.0210200752
    series = series * square - 0.0538404055
    series = series * square + 0.1333247951
    series = series * square - 0.3333331465
    near = series * square * x + x
    decay = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.55, near, tl.where(x < 0.0, -far, far))


@jit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp(-x))


@jit
def floor_divide(x, y):
    """The quotient of integers, rounded down, as Python's and torch's // is; Triton's rounds towards 0."""
    quotient = x // y
    return quotient + has_other_sign(x - quotient * y, y)


@jit
def remainder(x, y):
    """What is left of integers by `floor_divide`: it has the sign of y."""
    left = x - x // y * y
    return left + (has_other_sign(left, y) & y)


@jit
def has_other_sign(x, y):
    """-1 where an integer x is below 0 and y above, or the other way round; else 0. Its bits say so: compilers make
    more instructions of comparisons."""
    is_negative = tl.cast(y, x.dtype) >> (x.dtype.primitive_bitwidth - 1)
    return ((x ^ is_negative) - is_negative) >> (x.dtype.primitive_bitwidth - 1)


@jit
def inside(index, size):
    """An index of an axis of this size: a negative one counts from the end, and one beyond becomes the nearest."""
    wrapped = tl.where(index < 0, index + size, index)
    return tl.minimum(tl.maximum(wrapped, 0), size - 1)


class _TorchLanguage:
    """What stands for ``triton.language`` where functions run on torch's tensors; ``wide`` stands for float32."""

    int32 = torch.int64
    int64 = torch.int64
    int1 = torch.bool

    def __init__(self, wide: torch.dtype) -> None:
        self.float32 = self.float64 = wide

    def __getattr__(self, name: str) -> Any:
        if name in ("where", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf", "floor", "ceil"):
            return _of_tensors(getattr(torch, name))
        if name in ("abs", "minimum", "maximum"):
            return _of_tensors(getattr(torch, name))
        raise AttributeError(f"a function of pairs may not use tl.{name}: torch's tensors have no such operation")


_TWINS: tuple[tuple[Any, Any], ...] = (
    (tanh, torch.tanh),
    (sigmoid, torch.sigmoid),
    (floor_divide, torch.floor_divide),
    (remainder, torch.remainder),
)


def _of_tensors(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(operation)
    def applied(*values: Any) -> Tensor:
        device = next((value.device for value in values if isinstance(value, Tensor)), None)
        # Not by as_tensor, of which Dynamo takes a length for a constant.
        return operation(*[torch.full((), x, device=device) if isinstance(x, NUMBERS) else x for x in values])  # type: ignore[arg-type]

    return applied


def _at_in_torch(tensor: Tensor, index: tuple[Any, ...], wide: torch.dtype) -> Tensor:
    places = tuple(0 if size == 1 else place for size, place in zip(tensor.shape, index, strict=True))
    # With an axis, because torch takes an index without axes for a number, whose value a traced call does not know.
    element = tensor[tuple([x[None] if isinstance(x, Tensor) and not x.ndim else x for x in places])]
    return element.to(wide) if element.is_floating_point() else element


def in_torch(function: Any, wide: torch.dtype) -> Callable[..., Any]:
    """A `jit` function as one of torch's tensors, its float32 being ``wide``.

    Raises:
        AttributeError: (when called) it uses what torch's tensors do not have.
    """
    python = getattr(function, "fn", function)
    language = _TorchLanguage(wide)
    twins: dict[str, Any] = {}
    for name in python.__code__.co_names:
        if name not in python.__globals__:
            continue  # an attribute, or a builtin
        value = python.__globals__[name]
        if value is None or isinstance(value, types.ModuleType):
            twins[name] = language if value is tl else value
        elif value is at:
            twins[name] = functools.partial(_at_in_torch, wide=wide)
        elif value is near_float:
            twins[name] = getattr(far_float, "fn", far_float)
        elif value is bounded:
            twins[name] = lambda number: number  # torch's positions have 64 bits
        elif value is at_least or value is at_most:
            # Not by _of_tensors: at an end that is a tensor, clamp has another derivative than at a number.
            twins[name] = torch.clamp_min if value is at_least else torch.clamp_max
        elif twin := next((twin for known, twin in _TWINS if known is value), None):
            twins[name] = _of_tensors(twin)
        elif hasattr(value, "fn"):
            twins[name] = in_torch(value, wide)
        elif hasattr(value, "value"):  # a tl.constexpr
            twins[name] = value.value
    # Without a name torch.compile does not take these globals for the module's.
    scope = {name: value for name, value in python.__globals__.items() if name != "__name__"}
    return types.FunctionType(python.__code__, {**scope, **twins}, python.__name__)
