"""Launching kernels with little host time, for every kernel family.

A launch has some forty integers (sizes, strides, tile shapes) that follow from the tensors' metadata. To derive them,
and to let Triton derive its specialisation again, takes more host time than a short sequence takes on the device. So
a plan holds a `Launcher`, which keeps the compiled binary and those integers; a repeated call passes addresses.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .garbage import collection_paused
from .layouts import rows_like
from .torch_names import current_device
from .versions import build_launcher, compile_options, driver, find_key, hash_of_triton, names_of, runner_of

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether TRITON_INTERPRET was set when the kernels were defined: they then run on CPU tensors, and only there."""


MAX_ENTRIES = 1024
"""Operands that a launcher keeps arguments for. The allocator hands out the same addresses again and again."""


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

    def compile(self, kernel: Any, device: torch.device) -> None:
        """Compile a kernel for a device, and its launcher, without a launch; the tensors need no data."""
        options = self.constants | self.compile_options
        with torch.cuda.device(device):
            build_launcher(kernel.warmup(*self.tensors, *self.arguments, grid=self.grid, **options))

    @property
    def compile_options(self) -> dict[str, Any]:
        """``options``, and the defaults of all kernels for those it leaves out."""
        return compile_options(self.options)

    def after_tensors(self, kernel: Any) -> tuple[Any, ...]:
        """The arguments of the compiled kernel after the tensors: numbers, then constants in their order."""
        constant_names = names_of(kernel)[len(self.tensors) + len(self.arguments) :]
        return (*self.arguments, *[self.constants[name] for name in constant_names])


class Address:
    """Stands in for a tensor as the base of a descriptor, so that no tensor is kept alive."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._address = address

    def data_ptr(self) -> int:
        """The address."""
        return self._address


class Compiled(NamedTuple):
    """A compiled kernel: how to launch it, and to encode its TMA descriptors by position; its last arguments."""

    run: Callable[..., None]
    encode: Callable[[Any, int], list[Any]]
    descriptors: dict[int, Any]
    rest: tuple[Any, ...]


class Launcher:
    """A kernel on tensors of fixed metadata, at any addresses.

    Triton compiles a kernel again for pointers that are not multiples of 16 bytes, and encodes TMA descriptors at every
    launch. This keeps the compiled kernel by alignment, and all arguments, encoded, by the operands.
    """

    def __init__(self, kernel: Any) -> None:
        find_key(kernel)
        self._kernel = kernel
        self._compiled: dict[Any, Compiled] = {}
        self._encoded: dict[tuple[int, int], list[Any]] = {}
        self._arguments: dict[tuple[Any, ...], tuple[Callable[..., None], list[Any]]] = {}

    def __call__(self, operands: tuple[Any, ...], describe: Callable[..., Launch], *described: Any) -> None:
        """Run on the current stream.

        Args:
            operands: an address or None for each tensor of the launch; tuples of addresses and numbers where the launch
                has tuples of tensors and numbers.
            describe: returns the launch of what is ``described``. It is called for the first call of each alignment.
        """
        found = self._arguments.get(operands) or self._add(operands)
        if found is None:
            self._first(operands, describe(*described))
        else:
            run, arguments = found
            run(*arguments)

    def _first(self, operands: tuple[Any, ...], launch: Launch) -> None:
        with collection_paused():
            wait([*start_compiler(), *_in_background.get(self._kernel, ())])
            compiled = launch.of(self._kernel)
        if INTERPRETED:
            return
        descriptors = {
            position: dataclasses.replace(x, base=Address(0, x.base.dtype))
            for position, x in enumerate(launch.tensors)
            if hasattr(x, "base")
        }
        made = Compiled(*runner_of(compiled, launch.grid), descriptors, launch.after_tensors(self._kernel))
        self._compiled[_alignment(operands)] = made

    def _add(self, operands: tuple[Any, ...]) -> tuple[Callable[..., None], list[Any]] | None:
        compiled = self._compiled.get(_alignment(operands))
        if compiled is None:
            return None
        if len(self._arguments) >= MAX_ENTRIES:
            self._arguments.clear()
            self._encoded.clear()
        arguments: list[Any] = []
        for position, operand in enumerate(operands):
            template = compiled.descriptors.get(position)
            if template is None or operand is None:
                arguments.append(operand)
                continue
            encoded = self._encoded.get((position, operand))
            if encoded is None:
                descriptor = dataclasses.replace(template, base=Address(operand, template.base.dtype))
                encoded = compiled.encode(descriptor, [*compiled.descriptors].index(position))
                self._encoded[position, operand] = encoded
            arguments += encoded
        found = self._arguments[operands] = compiled.run, [*arguments, *compiled.rest]
        return found


_in_background: dict[Any, list[Future[None]]] = {}
"""By kernel what `compile_ahead` compiles."""


def compile_ahead(launches: Iterable[tuple[Any, Launch]], device: torch.device) -> None:
    """Compile kernels in other threads, for launches of tensors that need no data.

    A `Launcher` of the same kernel waits for them. What does not compile raises where it is launched.
    """
    if INTERPRETED:
        return
    described = [*launches]
    for kernel, _ in described:
        find_key(kernel)
    wait(start_compiler())
    for kernel, launch in described:
        running = [future for future in _in_background.get(kernel, ()) if not future.done()]
        _in_background[kernel] = [*running, _compilers().submit(launch.compile, kernel, device)]


@functools.cache
def start_compiler() -> list[Future[Any]]:
    """Begin what Triton does once a process before it compiles, in other threads.

    It hashes its own files, and has a C compiler build its driver: 0.4 s each, in which other threads run.
    """
    steps = () if INTERPRETED else (hash_of_triton, driver)
    return [_compilers().submit(step) for step in steps]


@functools.cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, "triton-compile")


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


@functools.cache
def launches_early(device: torch.device) -> bool:
    """Whether a device has programmatic dependent launch: a kernel starts before the one that it waits for is done."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def is_elsewhere(device: torch.device) -> bool:
    """Whether a CUDA device is not the current one, on which Triton launches."""
    return device.type == "cuda" and device.index != current_device()


def output_like(x: Tensor, width: int) -> Callable[[Tensor], Tensor]:
    """What allocates (*x.shape[:-1], width) with axes in memory in the order of x's, for tensors with x's metadata."""
    layout, dtype, device = rows_like(x, width), x.dtype, x.device
    # Of x itself: on the meta device empty_like imports sympy, which takes a second or two.
    if width == x.shape[-1] and torch.empty_like(x).stride() == layout.strides:
        return torch.empty_like  # takes less host time
    return lambda x: torch.empty_strided(layout.shape, layout.strides, dtype=dtype, device=device)
