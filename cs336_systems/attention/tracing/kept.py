"""Functions that are recorded once, and again where what they would do has changed.

What a function computes follows from its code and from the values of the names that it reads. Where these are known
to be the same as before, so is what it computes. Tensors need not be the same ones, but of the same shape, dtype and
device: those of now are put in the place of those of then. So a lambda is recorded once, however often it is made.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...kernels.torch_names import transform_level

T = TypeVar("T")
Recorded = tuple[Any, tuple[Any, ...]]
"""An expression, and the tensors or tables that it captures."""

_VALUES = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_MODULES = ("torch", "math", "operator")
"""Whose attributes do not change."""
_MOST = 64
"""What is kept of one function: it may have another number in each call."""

_kept: weakref.WeakKeyDictionary[types.CodeType, dict[Hashable, Recorded]] = weakref.WeakKeyDictionary()
"""By code, and by what its names stand for; with positions in place of tensors, so that none is kept alive."""


class _UnknownError(Exception):
    """A name stands for something that may change in a way that cannot be told."""


def kept(mod: Any, kind: str, make: Callable[[], tuple[Recorded, bool]]) -> Recorded:
    """What ``make`` gives of a function, or gave of its code and the same names before.

    Args:
        make: what is recorded, and whether it follows from the names of the function alone.
    """
    names, tensors = list[Any]((kind, transform_level())), list[Tensor]()
    try:
        code = _describe(mod, names, tensors, ())
        key = tuple(names)
        known = _kept.setdefault(code, {}).get(key)
    except (_UnknownError, TypeError):
        return make()[0]
    if known is not None:
        return known[0], tuple(_replaced(each, lambda position: tensors[position]) for each in known[1])
    recorded, follows = make()
    if follows:
        positions = {id(tensor): position for position, tensor in enumerate(tensors)}
        try:
            places = tuple(_replaced(each, lambda tensor: positions[id(tensor)]) for each in recorded[1])
        except KeyError:  # it has found a tensor in a way that is not known here
            return recorded
        if len(_kept[code]) >= _MOST:
            _kept[code].clear()
        _kept[code][key] = recorded[0], places
    return recorded


def _replaced(captured: Any, change: Callable[[Any], Any]) -> Any:
    """What is captured, a tensor or its position or a table of such, with others in their places."""
    return captured.replaced(change) if hasattr(captured, "replaced") else change(captured)


def _describe(function: Any, names: list[Any], tensors: list[Tensor], within: tuple[Any, ...]) -> types.CodeType:
    """Add all that a function's result depends on, and return its code. Raises _UnknownError if that is not known."""
    if isinstance(function, functools.partial):
        code = _describe(function.func, names, tensors, within)
        names.append(tuple(function.keywords))
        for value in (*function.args, *function.keywords.values()):
            _add(value, names, tensors, within)
        return code
    if not isinstance(function, types.FunctionType):
        raise _UnknownError
    code = function.__code__
    if function in within:
        return code
    names.append(code)
    values = [cell.cell_contents for cell in function.__closure__ or () if not _is_empty(cell)]
    values += [function.__globals__[name] for name in _names_of(code) if name in function.__globals__]
    values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for value in values:
        _add(value, names, tensors, (*within, function))
    return code


def _names_of(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_of(constant)


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _add(value: Any, names: list[Any], tensors: list[Tensor], within: tuple[Any, ...]) -> None:
    """Add what is equal if a value is the same as before, or a tensor like before."""
    if isinstance(value, (types.FunctionType, functools.partial)):
        names.append("function")
        _describe(value, names, tensors, within)
        return
    if isinstance(value, Tensor):
        alike = next((place for place, other in enumerate(tensors) if other is value), len(tensors))
        tensors.append(value)
        names.append((alike, type(value), value.shape, value.dtype, value.device, value.requires_grad))
        return
    if isinstance(value, tuple):
        names.append(len(value))
        for each in value:
            _add(each, names, tensors, within)
        return
    is_module = inspect.ismodule(value) and value.__name__.split(".")[0] in _MODULES
    owner = getattr(value, "__self__", None)  # of a builtin function its module; of a method an object
    is_builtin = inspect.isbuiltin(value) and (owner is None or isinstance(owner, (types.ModuleType, type)))
    is_type = any(value is known for known in (int, float, bool, Tensor))
    if not (is_module or is_builtin or is_type or isinstance(value, _VALUES)):
        raise _UnknownError
    names.append((type(value), repr(value) if isinstance(value, float) else value))  # 0.0 == -0.0
