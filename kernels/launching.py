"""Launching kernels with little host time, for every kernel family.

A launch has some forty integers (sizes, strides, tile shapes) that follow from the tensors' metadata. To derive them,
and to let Triton derive its specialisation again, takes more host time than a short sequence takes on the device. So
a plan holds a `Launcher`, which keeps the compiled binary and those integers; a repeated call passes addresses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .call import rows_like
from .torch_names import current_device
from .versions import compile_options, names_of, runner_of

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether TRITON_INTERPRET was set when the kernels were defined: they then run on CPU tensors, and only there."""


class Launch(NamedTuple):
    """One launch of a kernel: its grid, and its arguments in order: tensors, numbers, constants."""

    grid: tuple[int, int]
    tensors: tuple[Any, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, int]

    def of(self, kernel: Any) -> Any:
        """Compile and launch a kernel, and return what Triton compiled."""
        return kernel[self.grid](*self.tensors, *self.arguments, **self.constants, **self.compile_options)

    @property
    def compile_options(self) -> dict[str, Any]:
        """``options``, and the defaults of all kernels for those it leaves out."""
        return compile_options(self.options)

    def after_tensors(self, kernel: Any) -> tuple[Any, ...]:
        """The arguments of the compiled kernel after the tensors: numbers, then constants in their order."""
        constant_names = names_of(kernel)[len(self.tensors) + len(self.arguments) :]
        return (*self.arguments, *[self.constants[name] for name in constant_names])


class Launcher:
    """A kernel on tensors of fixed metadata, at any addresses."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._known: dict[Any, tuple[Callable[..., None], tuple[Any, ...]]] = {}

    def __call__(self, operands: tuple[Any, ...], describe: Callable[..., Launch], *described: Any) -> None:
        """Run on the current stream.

        Args:
            operands: an address or None for each tensor of the launch; tuples of addresses and numbers where the launch
                has tuples of tensors and numbers.
            describe: returns the launch of the tensors ``described``. It is called for the first call of each
                alignment: Triton compiles pointers to 16-byte boundaries differently from others.
        """
        together = 0
        for x in operands:
            if x is not None:
                together |= x if type(x) is int else bool(x)  # an empty tuple has no addresses
        key = None if together % 16 == 0 else _alignment(operands)
        known = self._known.get(key)
        if known is None:
            self._first(key, describe(*described))
        else:
            run, rest = known
            run(*operands, *rest)

    def _first(self, key: Any, launch: Launch) -> None:
        compiled = launch.of(self._kernel)
        if not INTERPRETED:
            self._known[key] = runner_of(compiled, launch.grid)[0], launch.after_tensors(self._kernel)


def _alignment(operand: Any) -> Any:
    """Whether an address is a multiple of 16; for a tuple a tuple of that."""
    if type(operand) is int:
        return operand % 16 == 0
    return tuple([_alignment(item) for item in operand]) if type(operand) is tuple else True


def address_of(tensor: Tensor | None) -> int | None:
    """The address of a tensor's first element; None for None."""
    return None if tensor is None else tensor.data_ptr()


@functools.cache
def num_sms(device: torch.device) -> int:
    """The streaming multiprocessors of a device; 1 for a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def is_elsewhere(device: torch.device) -> bool:
    """Whether a CUDA device is not the current one, on which Triton launches."""
    return device.type == "cuda" and device.index != current_device()


def output_like(x: Tensor, width: int) -> Callable[[Tensor], Tensor]:
    """What allocates (*x.shape[:-1], width) with axes in memory in the order of x's, for tensors with x's metadata."""
    layout, dtype, device = rows_like(x, width), x.dtype, x.device
    alike = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="meta")
    if width == x.shape[-1] and torch.empty_like(alike).stride() == layout.strides:
        return torch.empty_like  # takes less host time
    return lambda x: torch.empty_strided(layout.shape, layout.strides, dtype=dtype, device=device)
