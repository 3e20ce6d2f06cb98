"""Triton's interpreter, several times as fast at the same results: the tests spend most of their time in it.

It makes again, for every operation, what depends on a shape or on a dtype alone, and it computes sums a second time to
look for overflows that it then does not report.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import triton
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

__all__ = ["make_faster"]

KNOWN = ("3.6.", "3.7.", "3.8.", "3.9.")
"""Versions of Triton with which `tests/kernels/test_interpreter.py` passes."""


def make_faster() -> None:
    """Change the interpreter of this process, if it is of a version whose insides are known here."""
    if not triton.__version__.startswith(KNOWN):
        return
    _patch_the_language_once_a_launch()
    _call_builtins_directly()
    _unwrap_by_type()
    _compute_sums_once()
    _check_types_once()
    _remember_dtypes()
    _remember_shapes()


def _patch_the_language_once_a_launch() -> None:
    """Patch `triton.language` for the kernel, and not again for each call of a device function.

    The first call from a module in a launch does it; the others would do the same to what is patched already.
    """
    patch = interpreter._patch_lang
    patched_for: set[int] = set()

    def patch_once(function: Any) -> Any:
        names = id(function.__globals__)
        if names in patched_for:
            return None
        scope = patch(function)
        if not patched_for:  # this is the kernel: what it returns to takes everything back
            restore = scope.restore

            def restore_and_forget() -> None:
                patched_for.clear()
                restore()

            scope.restore = restore_and_forget
        patched_for.add(names)
        return scope

    interpreter._patch_lang = patch_once


def _call_builtins_directly() -> None:
    """Without two functions around each, which look for an argument and take it out to put it in again."""
    known: dict[Any, Any] = {}

    def directly(member: Any) -> Any:
        if member not in known:
            builtin = getattr(member, "__wrapped__", member)

            def call(*args: Any, **kwargs: Any) -> Any:
                kwargs["_semantic"] = interpreter.interpreter_semantic
                return builtin(*args, **kwargs)

            known[member] = call
        return known[member]

    interpreter._patch_attr = lambda obj, name, member, builder, scope: scope.set_attr(obj, name, directly(member))


def _unwrap_by_type() -> None:
    """Most of what is asked for its value is no constant, and no list of them."""
    unwrap = core._unwrap_if_constexpr
    plain = {core.tensor, int, float, bool, str, type(None)}
    core._unwrap_if_constexpr = lambda x: x if type(x) in plain else unwrap(x)


def _compute_sums_once() -> None:
    """Drop the second sum, in 64 bits: what it finds is an assertion, and those are off without ``debug``."""
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)


def _check_types_once() -> None:
    """Operands of one signed type, and numbers that it holds, need no common type: most are such."""
    check = TritonSemantic.binary_op_type_checking_impl
    tensor, kinds = core.tensor, (core.int32, core.int64, core.float32, core.float64)
    largest = {id(kind): 2**31 if kind.is_int() else 2**24 for kind in kinds}

    def checked(self: Any, lhs: Any, rhs: Any, *given: Any, **named: Any) -> Any:
        if type(lhs) is tensor and type(rhs) is tensor:
            if lhs.dtype is rhs.dtype and id(lhs.dtype) in largest:
                return (lhs, rhs) if lhs.shape is rhs.shape else self.broadcast_impl_value(lhs, rhs)
        elif type(lhs) is tensor and type(rhs) is int and abs(rhs) < largest.get(id(lhs.dtype), 0):
            return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, lhs.dtype))
        elif type(lhs) is int and type(rhs) is tensor and abs(lhs) < largest.get(id(rhs.dtype), 0):
            return self.broadcast_impl_value(self.scalar_constant(lhs, rhs.dtype), rhs)
        return check(self, lhs, rhs, *given, **named)

    TritonSemantic.binary_op_type_checking_impl = checked


def _remember_dtypes() -> None:
    """NumPy's dtype by the name of Triton's."""
    find = interpreter._get_np_dtype
    found: dict[str, Any] = {}

    def of(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = find(dtype)
        return found[name]

    interpreter._get_np_dtype = of


def _remember_shapes() -> None:
    """What a shape says of a block and of a tensor: both are made at every operation, and nothing changes theirs."""
    block, tensor = core.block_type, core.tensor
    begin_block, begin_tensor = block.__init__, tensor.__init__

    @functools.lru_cache(maxsize=None, typed=True)
    def of_block(*shape: int) -> tuple[Any, int, str]:
        made = block.__new__(block)
        begin_block(made, core.int32, [*shape])
        return made.shape, made.numel, f"<{made.shape}, "

    @functools.cache
    def of_tensor(*shape: int) -> tuple[Any, Any]:
        made = tensor.__new__(tensor)
        begin_tensor(made, None, block(core.int32, [*shape]) if shape else core.int32)
        return made.shape, made.numel

    def begin_known_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = (size.value if isinstance(size, core.constexpr) else size for size in shape)
        self.shape, self.numel, name = of_block(*sizes)
        self.element_ty = element_ty
        self.name = f"{name}{element_ty}>"

    def begin_known_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensor(*type.shape) if type.is_block() else of_tensor()

    block.__init__, tensor.__init__ = begin_known_block, begin_known_tensor
