"""Values of an emulated kernel: registers, addresses, descriptors, shared memory."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from . import accesses
from .accesses import Loaded


class Dtype:
    """Triton's name of a dtype of torch."""

    def __init__(self, of: torch.dtype) -> None:
        self.of = of

    def is_floating(self):
        return self.of.is_floating_point

    @property
    def primitive_bitwidth(self):
        return 8 * self.of.itemsize


DTYPES = {
    name: Dtype(of)
    for name, of in {
        "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64,
        "int1": torch.bool, "uint8": torch.uint8,
        "int8": torch.int8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64,
    }.items()
}  # fmt: skip
UNSIGNED = DTYPES["uint32"] = Dtype(torch.int64)
"""torch compares no numbers of this dtype: they are int64 here."""
BY_TORCH = {dtype.of: dtype for dtype in DTYPES.values() if dtype is not UNSIGNED}


def plain(value: Any) -> Any:
    """A torch tensor for a `Value`, anything else as it is."""
    return value.x if isinstance(value, Value) else value


def value_of(x: Any) -> Any:
    """A kernel's argument: numbers are tensors, as they are in a kernel; bools, which are constants there, are not."""
    if isinstance(x, torch.Tensor):
        return Pointer(x)
    if isinstance(x, tuple):
        return tuple(map(value_of, x))
    return Value(torch.tensor(x)) if isinstance(x, (int, float)) and not isinstance(x, bool) else x


class Value:
    """A tensor in registers, or a scalar."""

    def __init__(self, x: torch.Tensor, loaded: Loaded | None = None) -> None:
        self._x, self.loaded = x, loaded

    @property
    def x(self):
        """The tensor, which is used now."""
        if self.loaded is not None:
            self.loaded.load.finish()
            self.loaded = None
        return self._x

    dtype = property(lambda self: BY_TORCH[self._x.dtype])
    shape = property(lambda self: [*self._x.shape])
    numel = property(lambda self: self._x.numel())
    type = property(lambda self: SimpleNamespace(layout=None))

    def to(self, dtype, bitcast=False):
        # A conversion may come as late as what uses it.
        if dtype is UNSIGNED:
            return Value(self._x.long() & 0xFFFFFFFF, self.loaded)
        return Value(self._x.view(dtype.of) if bitcast else self._x.to(dtype.of), self.loaded)

    def __getitem__(self, index):
        return Value(self._x[index], self.loaded)

    def __neg__(self):
        return Value(-self.x)

    def __bool__(self):
        return bool(self.x)

    def __index__(self):
        return int(self.x)

    __hash__ = None  # type: ignore[assignment]


def _truncated(one, other):
    return torch.div(one, other, rounding_mode="trunc")


def _binary(apply: Callable[..., Any], swapped: bool) -> Callable[..., Any]:
    def method(self, other):
        if isinstance(other, Pointer):
            return NotImplemented
        one, two = plain(self), plain(other)
        return Value(apply(two, one) if swapped else apply(one, two))

    return method


_OPERATORS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv}
_OPERATORS |= {"floordiv": _truncated, "mod": torch.fmod, "and": operator.and_, "or": operator.or_}
_OPERATORS |= {"xor": operator.xor, "lshift": operator.lshift, "rshift": operator.rshift}
for _name, _apply in _OPERATORS.items():
    setattr(Value, f"__{_name}__", _binary(_apply, False))
    setattr(Value, f"__r{_name}__", _binary(_apply, True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Value, f"__{_name}__", _binary(getattr(operator, _name), False))


class Pointer:
    """Addresses of elements of the storage of a tensor."""

    def __init__(self, x: torch.Tensor, offset: Any = None) -> None:
        size = x.untyped_storage().nbytes() // x.element_size()
        self.flat = torch.as_strided(x, (size,), (1,), 0)
        self.offset = torch.tensor(x.storage_offset()) if offset is None else offset

    dtype = property(lambda self: SimpleNamespace(element_ty=BY_TORCH[self.flat.dtype]))

    def __add__(self, steps):
        return Pointer(self.flat, self.offset + plain(steps))

    __radd__ = __add__


class TensorDescriptor:
    """What TMA copies tiles by; beyond ``shape`` it reads zeros and writes nothing."""

    def __init__(self, base, shape, strides, block_shape, layout) -> None:
        self.base, self.shape, self.strides = base, shape, strides
        self.block_shape, self.layout, self.dtype = block_shape, layout, BY_TORCH[base.dtype]
        self.addresses = functools.cache(self._addresses)

    def _addresses(self, *coords):
        """Of a block's elements in the base's storage, and which of them are within the shape."""
        assert len(coords) == len(self.shape) == len(self.block_shape)
        pointer = Pointer(self.base)
        address, within = pointer.offset, torch.tensor(True)
        for axis, (first, size) in enumerate(zip(coords, self.block_shape, strict=True)):
            place = (torch.arange(size) + first).view([-1 if n == axis else 1 for n in range(len(coords))])
            within = within & (place >= 0) & (place < self.shape[axis])
            # Addresses wrap around, as those of 64 bits do.
            stride = (self.strides[axis] + 2**63) % 2**64 - 2**63
            address = address + place * stride
        return pointer.flat, torch.where(within, address, 0), within.expand(address.shape)

    def read(self, coords):
        flat, address, within = self.addresses(*map(int, coords))
        return torch.where(within, flat[address], 0)

    def write(self, coords, x, accumulate=False):
        flat, address, within = self.addresses(*map(int, coords))
        flat.index_put_((address[within],), x.reshape(address.shape)[within], accumulate=accumulate)


class Shared:
    """Shared memory, a view of it."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    dtype = property(lambda self: BY_TORCH[self.x.dtype])
    shape = property(lambda self: [*self.x.shape])
    numel = property(lambda self: self.x.numel())
    layout = None

    def index(self, place):
        return Shared(self.x[int(place)])

    def slice(self, start, length, dim=0):
        return Shared(self.x.narrow(dim, int(start), length))

    def permute(self, order):
        return Shared(self.x.permute(*order))

    def load(self, layout=None):
        return Value(self.x.clone(), accesses.load(self.x))

    def store(self, value):
        accesses.write(self.x, by_tma=False)
        self.x.copy_(value.x)

    def reinterpret(self, dtype, shape, layout):
        assert self.x.is_contiguous()
        return Shared(self.x.view(-1).view(dtype.of)[: math.prod(shape)].view(shape))
