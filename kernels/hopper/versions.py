"""What differs between the versions of Triton that these kernels are compiled with, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.language.core import _aggregate as aggregate

from .config import VERSIONS

__all__ = ["aggregate", "is_supported", "meet_in_group", "runner_of", "tma_add"]

meet_in_group = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Let the warps of a role wait for each other, as Triton knows that they do."""


def is_supported() -> bool:
    """Whether the installed Triton is one of these."""
    return triton.__version__.startswith(VERSIONS)


@builtin
def tma_add(desc, coord, src, _semantic=None):
    """Begin adding a tile in shared memory to one in global memory; the copying unit adds.

    Neither version has a public name for it.
    """
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


def runner_of(compiled: Any, grid: tuple[int, int]) -> tuple[Callable[..., None], Callable[[Any, int], list[Any]]]:
    """A function that runs a compiled kernel, and one that makes its arguments of its ``number``-th descriptor.

    With 3.6 a descriptor can be encoded once for many launches: its launcher wraps one that takes them encoded.
    """
    names = getattr(getattr(compiled.run.launch, "__code__", None), "co_freevars", ())
    run = compiled.run
    needs_scratch = run.global_scratch_size or run.profile_scratch_size
    if not triton.__version__.startswith("3.6.") or "launcher" not in names or needs_scratch:
        with_hooks: Callable[..., None] = compiled[(*grid, 1)]
        return with_hooks, lambda descriptor, number: [descriptor]
    launch = run.launch.__closure__[names.index("launcher")].cell_contents
    described = compiled.metadata.tensordesc_meta
    function, metadata = compiled.function, compiled.packed_metadata
    device = triton.runtime.driver.active.get_current_device()
    stream_of = triton.runtime.driver.active.get_current_stream
    options = run.launch_cooperative_grid, run.launch_pdl, None, None
    hooks = triton.knobs.runtime

    def runner(*arguments: Any) -> None:
        stream = stream_of(device)
        told: tuple[Any, ...] = (None, None, None)
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            of_launch = compiled.launch_metadata((*grid, 1), stream, *arguments)
            told = (of_launch, hooks.launch_enter_hook, hooks.launch_exit_hook)
        launch(*grid, 1, stream, function, *options, metadata, *told, *arguments)

    def encode(descriptor: Any, number: int) -> list[Any]:
        arguments: list[Any] = make_tensordesc_arg(descriptor, described[number])
        return arguments

    return runner, encode
