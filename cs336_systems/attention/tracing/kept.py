"""Functions that are recorded once, and again when what they would do has changed.

What a function computes follows from its code and from the values of the names that it reads. Where all of these can be
told to be the same as before, so is what it computes.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...kernels.torch_names import transform_level

T = TypeVar("T")

_VALUES = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_MODULES = ("torch", "math", "operator")
"""Whose attributes do not change."""

_kept: weakref.WeakKeyDictionary[Any, dict[str, tuple[Any, Any]]] = weakref.WeakKeyDictionary()
"""By function, and by kind of mod: what its names stood for, and what it gave. It goes when the function goes."""


class _UnknownError(Exception):
    """A name stands for something that may change in a way that cannot be told."""


def kept(mod: Any, kind: str, make: Callable[[], tuple[T, bool]]) -> T:
    """What ``make`` gives of a function, or gave of it before.

    Args:
        make: the result, and whether it follows from the names of the function alone.
    """
    try:
        names = transform_level(), *_described(mod, ())
        known = _kept.setdefault(mod, {})
    except (_UnknownError, TypeError):
        return make()[0]
    before, result = known.get(kind, (None, None))
    if before != names or result is None:
        result, follows = make()
        known[kind] = (names, result) if follows else (None, None)
    return result


def _described(function: Any, within: tuple[Any, ...]) -> Iterator[Any]:
    """All that a function's result depends on. Raises _UnknownError where that cannot be told."""
    if isinstance(function, functools.partial):
        yield from _described(function.func, within)
        yield from map(_identity, (*function.args, *function.keywords.items()))
        return
    if not isinstance(function, types.FunctionType):
        raise _UnknownError
    if function in within:
        return
    yield id(function.__code__)
    values = [cell.cell_contents for cell in function.__closure__ or () if not _is_empty(cell)]
    values += [function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__]
    values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for value in values:
        if isinstance(value, (types.FunctionType, functools.partial)):
            yield from _described(value, (*within, function))
        else:
            yield _identity(value)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _identity(value: Any) -> Any:
    """What is equal if a value is the same as before. A tensor's elements are read when a call is computed."""
    if isinstance(value, Tensor):
        return id(value), value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    if isinstance(value, tuple):
        return tuple(map(_identity, value))
    is_module = inspect.ismodule(value) and value.__name__.split(".")[0] in _MODULES
    owner = getattr(value, "__self__", None)  # of a builtin function its module; of a method an object
    is_builtin = inspect.isbuiltin(value) and (owner is None or isinstance(owner, (types.ModuleType, type)))
    if is_module or is_builtin or any(value is known for known in (int, float, bool, Tensor)):
        return id(value)
    if not isinstance(value, _VALUES):
        raise _UnknownError
    return type(value), value
