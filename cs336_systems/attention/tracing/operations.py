"""Torch's operators in the language of `cs336_systems.kernels.language`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .graph import SAME, Node

TEMPLATES = {
    "neg": "(-{0})",
    "abs": "tl.abs({0})",
    "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0})",
    "log": "tl.log({0})",
    "log2": "tl.log2({0})",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "tl.rsqrt({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "erf": "tl.erf({0})",
    "tanh": "tanh({0})",
    "sigmoid": "sigmoid({0})",
    "reciprocal": "(1.0 / {0})",
    "relu": "tl.where({0} > 0.0, {0}, 0.0)",
    "square": "({0} * {0})",
    "sgn": "(({0} > 0).to(tl.int32) - ({0} < 0).to(tl.int32))",
    "sign": "(({0} > 0).to(tl.int32) - ({0} < 0).to(tl.int32))",
    "logical_not": "({0} == 0)",
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "rsub": "({1} - {0})",
    "mul": "({0} * {1})",
    "div": "({0} / {1})",
    "floor_divide": "floor_divide({0}, {1})",
    "remainder": "remainder({0}, {1})",
    "minimum": "tl.minimum({0}, {1})",
    "maximum": "tl.maximum({0}, {1})",
    "eq": "({0} == {1})",
    "ne": "({0} != {1})",
    "lt": "({0} < {1})",
    "le": "({0} <= {1})",
    "gt": "({0} > {1})",
    "ge": "({0} >= {1})",
    "bitwise_and": "({0} & {1})",
    "bitwise_or": "({0} | {1})",
    "bitwise_xor": "({0} ^ {1})",
    "__lshift__": "({0} << {1})",
    "__rshift__": "({0} >> {1})",
    "bitwise_left_shift": "({0} << {1})",
    "bitwise_right_shift": "({0} >> {1})",
    "logical_and": "(({0} != 0) & ({1} != 0))",
    "logical_or": "(({0} != 0) | ({1} != 0))",
    "logical_xor": "(({0} != 0) ^ ({1} != 0))",
    "where": "tl.where({0}, {1}, {2})",
    "masked_fill": "tl.where({1}, {2}, {0})",
    "tanh_backward": "({0} * (1.0 - {1} * {1}))",
    "sigmoid_backward": "({0} * {1} * (1.0 - {1}))",
    "threshold_backward": "tl.where({1} > {2}, {0}, 0.0)",
}
"""By torch's name, an expression of the operands; `expression` has those that depend on more."""
KNOWN = SAME | TEMPLATES.keys() | {"bitwise_not", "clamp", "clamp_max", "clamp_min", "_to_copy", "pow"}
"""The operators that a mod and its derivative may use."""
MADE_OF: dict[str, Callable[..., Tensor]] = {
    "gelu": lambda x, approximate="none": (
        0.5 * x * (1 + torch.erf(x * 0.5**0.5))
        if approximate == "none"
        else 0.5 * x * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)))
    ),
    "leaky_relu": lambda x, slope=0.01: torch.where(x > 0, x, slope * x),
    "silu": lambda x: x * torch.sigmoid(x),
}
"""What other operators are made of: those of `KNOWN`."""
RESHAPED = SAME - {"sum", "sum_to_size"} | {"unsqueeze"}
"""What changes no element of a row."""
FOLDED = {
    "all": torch.ops.aten.bitwise_and.Tensor,
    "amax": torch.ops.aten.maximum.default,
    "amin": torch.ops.aten.minimum.default,
    "any": torch.ops.aten.bitwise_or.Tensor,
    "dot": torch.ops.aten.add.Tensor,
    "max": torch.ops.aten.maximum.default,
    "min": torch.ops.aten.minimum.default,
    "sum": torch.ops.aten.add.Tensor,
}
"""What makes one element of a row, by the operator that makes it of two."""
COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
_OF_FLOATS = frozenset(
    (
        *("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf", "tanh", "sigmoid", "reciprocal", "div"),
        *("add", "sub", "rsub", "mul", "minimum", "maximum"),
    )
)
_NATURAL = frozenset(("add", "mul", "floor_divide", "remainder", "minimum", "maximum"))
_WIDENING = frozenset(("mul", "__lshift__", "bitwise_left_shift"))
_MOST_FACTORS = 8
STAND_INS = 1_000_003
"""Integers from here on may stand for others: see `variants.recorded`. Far from any that a mod says."""


def expression(node: Node, name_of: Callable[[Any, bool], str]) -> str:
    """The text of an operation, which is `KNOWN`. Raises ValueError for arguments that kernels do not have.

    Args:
        name_of: the text of an operand, as a float32 number if the second argument is true.
    """
    name, keywords = node.name, dict(node.keywords)
    if name in ("floor_divide", "remainder") and node.is_integer and (divisor := divisor_of(node)):
        return _divided(name, node.arguments[0], divisor, name_of)
    # Integers become floats as torch promotes them. Of a choice, both sides have the dtype of the result.
    as_float = not node.is_integer and (name in _OF_FLOATS or name == "masked_fill")
    chosen = (1, 2) if name == "where" else ()
    compared = name in COMPARISONS and any(not each.is_integer for each in node.inputs)
    operands = [
        name_of(value, as_float or compared or (place in chosen and not node.is_integer))
        if not (name == "masked_fill" and place == 1)
        else name_of(value, False)
        for place, value in enumerate(node.arguments)
        if value is not None and not isinstance(value, (torch.dtype, list, tuple))
    ]
    if name in _WIDENING and node.is_integer:
        # 32 bits hold positions, and sums of two of them, but no product.
        wide = next(place for place, x in enumerate(node.arguments) if isinstance(x, Node) and x.kind != "number")
        operands[wide] += ".to(tl.int64)"
    if name in ("add", "sub", "rsub") and keywords.get("alpha", 1) != 1:
        operands[1] = f"({name_of(keywords['alpha'], as_float)} * {operands[1]})"
    if name == "bitwise_not":
        return f"({operands[0]} == 0)" if node.dtype is torch.bool else f"(~{operands[0]})"
    if name == "_to_copy":
        return f"{operands[0]}.to(tl.{_triton_dtype(node.dtype)})"
    if name == "div" and keywords.get("rounding_mode") is not None:
        if keywords["rounding_mode"] != "floor":
            raise ValueError("a mod may divide with rounding_mode None or 'floor'; got 'trunc'")
        name = "floor_divide"
    if name in ("floor_divide", "remainder") and not node.is_integer:
        floor = "tl.floor(({0}) / ({1}))" if name == "floor_divide" else "({0} - tl.floor(({0}) / ({1})) * {1})"
        return floor.format(*(name_of(value, True) for value in node.arguments))
    if name in ("floor_divide", "remainder") and all(map(_is_natural, node.arguments)):
        return f"({operands[0]} {'//' if name == 'floor_divide' else '%'} {operands[1]})"  # rounded down either way
    if name in ("clamp", "clamp_min", "clamp_max"):
        return _clamped(node, name_of)
    if name == "pow":
        return _power(node, name_of)
    return TEMPLATES[name].format(*operands)


def divisor_of(node: Node) -> int | None:
    """The number that a node divides by, if it is a number and positive."""
    number = node.arguments[1].value if isinstance(node.arguments[1], Node) else node.arguments[1]
    return number if isinstance(number, int) and 0 < number < STAND_INS else None


def _divided(name: str, value: Any, divisor: int, name_of: Callable[[Any, bool], str]) -> str:
    """The quotient or the remainder, rounded down. The divisor is written out: no GPU has an instruction to divide."""
    text, is_quotient = name_of(value, False), name == "floor_divide"
    if divisor & (divisor - 1) == 0:
        return f"({text} >> {divisor.bit_length() - 1})" if is_quotient else f"({text} & {divisor - 1})"
    if _is_natural(value):
        return f"({text} {'//' if is_quotient else '%'} {divisor})"
    return f"{name}({text}, {divisor})"


def _is_natural(value: object) -> bool:
    """Whether an integer is known not to be negative: an index of the pair, a number, or what is made of such."""
    if isinstance(value, Node):
        made_of = value.kind == "operation" and value.name in _NATURAL and not value.keywords
        return value.kind == "place" or _is_natural(value.value) or (made_of and all(map(_is_natural, value.arguments)))
    return isinstance(value, int) and value >= 0


def _triton_dtype(dtype: torch.dtype) -> str:
    if dtype is torch.bool:
        return "int1"
    return "float32" if dtype.is_floating_point else "int64" if dtype is torch.int64 else "int32"


def _clamped(node: Node, name_of: Callable[[Any, bool], str]) -> str:
    value, *ends = node.arguments
    named = dict(node.keywords)
    if node.name == "clamp_max":
        least, most = None, ends[0]
    else:
        least = ends[0] if ends else named.get("min")
        most = ends[1] if len(ends) > 1 else named.get("max")
    text = name_of(value, not node.is_integer)
    for function, end in (("at_least", least), ("at_most", most)):
        if end is not None:
            text = f"{function}({text}, {name_of(end, not node.is_integer)})"
    return text


def _power(node: Node, name_of: Callable[[Any, bool], str]) -> str:
    numbers = [x.value if isinstance(x, Node) and x.kind == "number" else x for x in node.arguments]
    base, exponent = numbers
    if isinstance(base, (int, float)) and base > 0 and not node.is_integer:
        return f"tl.exp2({name_of(exponent, True)} * {name_of(math.log2(base), True)})"
    if exponent == 0.5:
        return f"tl.sqrt({name_of(base, True)})"
    if not isinstance(exponent, (int, float)) or exponent not in range(-_MOST_FACTORS, _MOST_FACTORS + 1):
        got = exponent if isinstance(exponent, (int, float)) else "one that depends on the pair"
        raise ValueError(f"a mod may raise to 0.5 or to a whole number up to {_MOST_FACTORS}; got {got}")
    factor = name_of(base, not node.is_integer)
    product = " * ".join([f"{factor}.to(tl.int64)" if node.is_integer else factor] * int(abs(exponent))) or "1.0"
    return f"({product})" if exponent >= 0 else f"(1.0 / ({product}))"
