"""Launching kernels cheaply: the host side that every kernel family shares.

A launch needs some forty integers (sizes, strides, tile shapes) that depend on nothing but the tensors' metadata.
Deriving them and letting Triton derive its specialisation again costs more host time than a short sequence takes on the
device. So what follows from metadata is worked out once, in a plan kept by `Plans`; a plan's `Launcher` keeps the
compiled binary and those integers, and a repeated call passes addresses only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor

from . import tuning
from .versions import compile_options, names_of, runner_of

MOST_PLANS = 4096
"""Plans kept of a kind; beyond that all are dropped and made anew as they are needed."""

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether TRITON_INTERPRET was set when the kernels were defined: then they run on CPU tensors, and only there."""

Plan = TypeVar("Plan")


class Plans(Generic[Plan]):
    """Plans by the metadata that they follow from."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, Plan] = {}
        self._version = tuning.version()

    def get(self, key: Hashable, make: Callable[[], Plan]) -> Plan:
        """The plan for ``key``, which must determine all that ``make`` returns (tile configurations apart)."""
        if self._version != tuning.version():
            self._plans.clear()
            self._version = tuning.version()
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = make()
        return plan


class Launch(NamedTuple):
    """One launch of a kernel: the grid of programs, and its arguments in order: tensors, numbers, constants."""

    grid: tuple[int, int]
    tensors: tuple[Any, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, int]

    def of(self, kernel: Any) -> Any:
        """Have Triton compile and launch a kernel so, and return what it compiled."""
        return kernel[self.grid](*self.tensors, *self.arguments, **self.constants, **self.compile_options)

    @property
    def compile_options(self) -> dict[str, Any]:
        """``options``, and those of every kernel that they leave open."""
        return compile_options(self.options)

    def after_tensors(self, kernel: Any) -> tuple[Any, ...]:
        """What a runner of the compiled kernel takes after the tensors: numbers, then constants in their order."""
        constant_names = names_of(kernel)[len(self.tensors) + len(self.arguments) :]
        return (*self.arguments, *[self.constants[name] for name in constant_names])


class Launcher:
    """A kernel on tensors of fixed metadata, at any addresses."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._known: dict[tuple[Any, ...], tuple[Callable[..., None], tuple[Any, ...]]] = {}

    def __call__(self, addresses: tuple[Any, ...], describe: Callable[[], Launch]) -> None:
        """Run on the current stream. ``describe`` is asked at the first call, and when the alignment is a new one.

        Among the addresses may be tuples with addresses and numbers, as the launch has tuples with tensors and numbers.

        Triton compiles pointers to 16-byte boundaries differently from others.
        """
        # Written out for the addresses themselves, because it is part of the host time of every launch.
        alignment = tuple([x is None or (x % 16 == 0 if type(x) is int else _aligned(x)) for x in addresses])
        known = self._known.get(alignment)
        if known is None:
            self._first(alignment, describe())
        else:
            run, rest = known
            run(*addresses, *rest)

    def _first(self, alignment: tuple[Any, ...], launch: Launch) -> None:
        compiled = launch.of(self._kernel)
        if not INTERPRETED:
            self._known[alignment] = runner_of(compiled, launch.grid)[0], launch.after_tensors(self._kernel)


def _aligned(address: Any) -> Any:
    """Whether an address is a multiple of 16; the same of all that a tuple holds."""
    if type(address) is int:
        return address % 16 == 0
    return tuple([_aligned(item) for item in address]) if type(address) is tuple else True


def address_of(tensor: Tensor | None) -> int | None:
    """Where a tensor's first element is; None for None."""
    return None if tensor is None else tensor.data_ptr()


def is_elsewhere(device: torch.device) -> bool:
    """Whether a CUDA device is not the current one, where Triton launches, wherever the tensors are."""
    return device.type == "cuda" and device.index != torch.cuda.current_device()
