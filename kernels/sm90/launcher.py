"""Launching kernels with descriptors cheaply: each is encoded once for an address, and kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..launching import Launch
from ..versions import runner_of

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
    """A kernel on tensors of fixed metadata, the first of them described, at addresses that are multiples of 16."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._launch: tuple[Callable[..., None], Callable[[Any, int], list[Any]]] | None = None
        self._encoded: dict[tuple[int, int], list[Any]] = {}

    def __call__(self, addresses: tuple[Any, ...], describe: Callable[[], Launch]) -> None:
        """Run on the current stream, on what lies at these addresses; none where a tensor may be missing."""
        if self._launch is None:
            self._first(describe())
            return
        run, encode = self._launch
        count = len(self._descriptors)
        arguments: list[Any] = []
        for key in enumerate(addresses[:count]):
            arguments += self._encoded.get(key) or self._encode(encode, *key)
        run(*arguments, *addresses[count:], *self._rest)

    def _first(self, launch: Launch) -> None:
        compiled = launch.of(self._kernel)
        self._descriptors = [
            dataclasses.replace(tensor, base=At(0, tensor.base.dtype))
            for tensor in launch.tensors
            if isinstance(tensor, TensorDescriptor)
        ]
        self._rest = launch.after_tensors(self._kernel)
        self._launch = runner_of(compiled, launch.grid)  # last: another thread takes it for a sign that all is there

    def _encode(self, encode: Callable[[Any, int], list[Any]], number: int, address: int) -> list[Any]:
        template = self._descriptors[number]
        descriptor = dataclasses.replace(template, base=At(address, template.base.dtype))
        if len(self._encoded) >= MOST_ENCODED:
            self._encoded.clear()
        encoded = self._encoded[number, address] = encode(descriptor, number)
        return encoded
