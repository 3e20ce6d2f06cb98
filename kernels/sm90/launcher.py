"""Launching a compiled kernel with as little host time as possible."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..launching import Launch
from ..versions import runner_of

MAX_ENTRIES = 1024
"""Addresses that a launcher keeps arguments for. The allocator hands out the same ones again and again."""

Addresses = tuple[int | None, ...]


class Address:
    """Stands in for a tensor as the base of a descriptor, so that no tensor is kept alive."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._address = address

    def data_ptr(self) -> int:
        """The address."""
        return self._address


class Compiled(NamedTuple):
    """A compiled kernel: how to launch it and encode its descriptors, the latter by position, the arguments after."""

    run: Callable[..., None]
    encode: Callable[[Any, int], list[Any]]
    descriptors: dict[int, TensorDescriptor]
    rest: tuple[Any, ...]


class Launcher:
    """Launches one kernel on tensors of fixed metadata at any addresses.

    Triton compiles a kernel again where pointers are not multiples of 16 bytes, and encodes TMA descriptors at every
    launch. This keeps the compiled kernel by alignment, and all arguments, encoded, by the tensors' addresses.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[bool, ...], Compiled] = {}
        self._encoded: dict[tuple[int, int], list[Any]] = {}
        self._arguments: dict[Addresses, tuple[Callable[..., None], list[Any]]] = {}

    def __call__(self, addresses: Addresses) -> bool:
        """Launch on the current stream, with None for tensors that are not given.

        False, without a launch, where nothing is compiled for such addresses: then call `first`.
        """
        found = self._arguments.get(addresses) or self._add(addresses)
        if found is None:
            return False
        run, arguments = found
        run(*arguments)
        return True

    def first(self, launch: Launch) -> None:
        """Compile the kernel for tensors aligned like these, and launch it."""
        compiled = launch.of(self._kernel)
        bases = [x.base if isinstance(x, TensorDescriptor) else x for x in launch.tensors]
        descriptors = {
            position: dataclasses.replace(x, base=Address(0, x.base.dtype))
            for position, x in enumerate(launch.tensors)
            if isinstance(x, TensorDescriptor)
        }
        run, encode = runner_of(compiled, launch.grid)
        key = _alignment(tuple(None if x is None else x.data_ptr() for x in bases))
        self._compiled[key] = Compiled(run, encode, descriptors, launch.after_tensors(self._kernel))

    def _add(self, addresses: Addresses) -> tuple[Callable[..., None], list[Any]] | None:
        compiled = self._compiled.get(_alignment(addresses))
        if compiled is None:
            return None
        if len(self._arguments) >= MAX_ENTRIES:
            self._arguments.clear()
            self._encoded.clear()
        arguments: list[Any] = []
        for position, address in enumerate(addresses):
            template = compiled.descriptors.get(position)
            if template is None or address is None:
                arguments.append(address)
                continue
            encoded = self._encoded.get((position, address))
            if encoded is None:
                descriptor = dataclasses.replace(template, base=Address(address, template.base.dtype))
                encoded = compiled.encode(descriptor, [*compiled.descriptors].index(position))
                self._encoded[position, address] = encoded
            arguments += encoded
        found = self._arguments[addresses] = compiled.run, [*arguments, *compiled.rest]
        return found


def _alignment(addresses: Addresses) -> tuple[bool, ...]:
    return tuple([address is None or address % 16 == 0 for address in addresses])
