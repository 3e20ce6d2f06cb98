"""Comparisons of the row and the column of a pair, which kernels compute with fewer instructions than others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...kernels.mods import AXES
from .graph import Node
from .operations import divisor_of

_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_OPPOSITE = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}


def compared_positions(node: Node, text_of: Callable[[int], str]) -> str | None:
    """The text of a comparison of row and column, or of their distance with a number; None for another operation.

    Args:
        text_of: the text of a number.
    """
    if node.kind != "operation" or len(node.arguments) != 2:
        return None
    name, (left, right) = node.name, node.arguments
    if name in ("eq", "ne"):
        congruent = _congruent(left, right)
        return f"({congruent} == 0)" if congruent and name == "ne" else congruent
    if name not in _MIRRORED:
        return None
    if _integer(left) is not None:
        left, right, name = right, left, _MIRRORED[name]

    def ordered(name: str, x: Node, y: Node, number: int | None, sign: int) -> str:
        """x compared with the sum of y and sign * number."""
        if name in ("gt", "le"):
            x, y, sign = y, x, -sign
        text = "0" if number is None else text_of(number)
        if text.lstrip("-").isdigit():
            text = str(sign * int(text))
        else:
            text = f"{'-' if sign < 0 else ''}bounded({text})"
        text = f"less({x.value}, {y.value}, {text})"
        return text if name in ("lt", "gt") else f"({text} == 0)"

    number = _integer(right)
    if number is None:
        one, other = _moved_position(left), _moved_position(right)
        if one is None or other is None:
            return None
        (x, of_x, sign_x), (y, of_y, sign_y) = one, other
        if not _are_positions(x, y) or (of_x is not None and of_y is not None):
            return None
        return ordered(name, x, y, of_y, sign_y) if of_x is None else ordered(name, x, y, of_x, -sign_x)
    if _is_distance(left):
        x, y = left.arguments
        return ordered(name, x, y, number, 1)
    if _is_operation(left, "abs") and _is_distance(left.arguments[0]):
        x, y = left.arguments[0].arguments
        is_within = name in ("lt", "le")
        order = name if is_within else _OPPOSITE[name]
        within = f"({ordered(order, x, y, number, 1)} & {ordered(order, y, x, number, 1)})"
        return within if is_within else f"({within} == 0)"
    return None


def _moved_position(value: Any) -> tuple[Node, int | None, int] | None:
    """A position, a number or None, and the sign with which that is added to it; None for another value.

    `linear` would add numbers up, of which one may stand for another (`STAND_INS`).
    """
    if _is_position(value):
        return value, None, 1
    if _is_operation(value, "add", "sub"):
        x, number = value.arguments
        if value.name == "add" and _is_position(number):
            x, number = number, x
        if _is_position(x) and _integer(number) is not None:
            return x, _integer(number), 1 if value.name == "add" else -1
    return None


def _congruent(left: Any, right: Any) -> str | None:
    """Whether row and column are a multiple of a number apart: ``(x - y) % n == 0`` or ``x % n == y % n``; or None."""
    for one, other in ((left, right), (right, left)):
        if not _is_remainder(one):
            continue
        (x, _), divisor = one.arguments, divisor_of(one)
        if _is_distance(x) and _integer(other) == 0:
            x, y = x.arguments
        elif _is_remainder(other) and divisor_of(other) == divisor and _are_positions(x, other.arguments[0]):
            y = other.arguments[0]
        else:
            continue
        return f"congruent({x.value}, {y.value}, {divisor})"
    return None


def _is_remainder(value: Any) -> bool:
    return _is_operation(value, "remainder") and value.is_integer and divisor_of(value) is not None


def _is_distance(value: Any) -> bool:
    """Whether it is one position minus the other."""
    return _is_operation(value, "sub") and _are_positions(*value.arguments)


def _are_positions(x: Any, y: Any) -> bool:
    """Whether one is the row and the other the column."""
    return _is_position(x) and _is_position(y) and x is not y


def _is_position(value: Any) -> bool:
    return isinstance(value, Node) and value.kind == "place" and value.value in AXES[2:]


def _is_operation(value: Any, *names: str) -> bool:
    """Whether it is one of these operations, with nothing but operands."""
    if not (isinstance(value, Node) and value.kind == "operation" and value.name in names and not value.keywords):
        return False
    return len(value.arguments) == (1 if value.name == "abs" else 2)


def _integer(value: Any) -> int | None:
    if isinstance(value, Node) and value.kind == "number":
        value = value.value
    return value if isinstance(value, int) and not isinstance(value, bool) else None
