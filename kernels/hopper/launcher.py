"""Launching kernels with descriptors cheaply: each is encoded once for an address, and kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ..launching import Launch
from .versions import runner_of

MOST_ENCODED = 1024
"""Descriptors kept by one launcher, at addresses that the allocator gives out again and again."""


class At:
    """What a descriptor asks of its tensor, without keeping a tensor alive."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._address = address

    def data_ptr(self) -> int:
        """Where the tensor begins."""
        return self._address


class TiledLauncher:
    """A kernel on tensors of fixed metadata, at addresses that are multiples of 16 bytes.

    The kernel's first arguments are descriptors.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._run: Callable[..., None] | None = None
        self._encoded: dict[tuple[int, int], list[Any]] = {}

    def __call__(self, described: tuple[int, ...], others: tuple[int, ...], describe: Callable[[], Launch]) -> None:
        """Run on the current stream, on what lies at the addresses of descriptors, and at other ones."""
        if self._run is None:
            self._first(len(described), describe())
            return
        arguments: list[Any] = []
        for number, address in enumerate(described):
            arguments += self._encoded.get((number, address)) or self._encode(number, address)
        self._run(*arguments, *others, *self._rest)

    def _first(self, count: int, launch: Launch) -> None:
        compiled = launch.of(self._kernel)
        self._descriptors = [
            dataclasses.replace(descriptor, base=At(0, descriptor.base.dtype)) for descriptor in launch.tensors[:count]
        ]
        self._rest = launch.after_tensors(self._kernel)
        self._run, self._make = runner_of(compiled, launch.grid)

    def _encode(self, number: int, address: int) -> list[Any]:
        template = self._descriptors[number]
        descriptor = dataclasses.replace(template, base=At(address, template.base.dtype))
        if len(self._encoded) >= MOST_ENCODED:
            self._encoded.clear()
        encoded = self._encoded[number, address] = self._make(descriptor, number)
        return encoded
