"""Every private or moving name of Triton and Gluon that this library uses, and nothing else.

Those of torch are in `torch_names`, which imports no Triton. A name is private where Triton neither exports nor
documents it, and moving where the versions in `KNOWN` spell it differently. Each stands here once, with the reason for
it and the public name that it gives way to.

Importing this module never fails. Where the installed Triton is not in `KNOWN`, or lacks a name, `why_not_gluon` says
so, and the portable kernels, which need public names alone, take every call. It says so of torch as well.
"""

from __future__ import annotations

import functools
import inspect
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import triton

from . import torch_names
from .torch_names import find

KNOWN = ("3.6.", "3.7.", "3.8.", "3.9.")
"""Versions of Triton for which every kernel is compiled, inspected and run."""

SINCE_3_8 = KNOWN[2:]

_LIST = ", ".join(f"{version}x" for version in KNOWN)

needed: list[tuple[str, ...]] = []
"""Names that the Gluon kernels need, each with its other spellings."""
missing: list[str] = []
"""Those of them that the installed Triton lacks."""


def _need(*names: str) -> Any:
    """`find`, for what the Gluon kernels cannot do without."""
    value = find(*names)
    needed.append(names)
    if value is None:
        missing.append(" or ".join(names))
    return value


_GLUON = "triton.experimental.gluon"
_TMA = f"{_GLUON}.language.nvidia.hopper.tma"

# Classes of values in a kernel. Public since 3.8 as `gluon.aggregate`.
aggregate: Any = _need(f"{_GLUON}:aggregate", "triton.language.core:_aggregate")

# A barrier of the warps of one partition. `barrier` since 3.7.
barrier: Any = _need(f"{_GLUON}.language:barrier", f"{_GLUON}.language:thread_barrier")

# TMA copies. `async_load` and `async_store` since 3.8; the older names raise in 3.9.
async_load: Any = _need(f"{_TMA}:async_load", f"{_TMA}:async_copy_global_to_shared")
async_store: Any = _need(f"{_TMA}:async_store", f"{_TMA}:async_copy_shared_to_global")

# Shared memory seen as another shape or layout: `reinterpret(memory, dtype, shape, layout)`. A public method since 3.9.
_SHARED = f"{_GLUON}.language:shared_memory_descriptor"
reinterpret: Any = _need(f"{_SHARED}.reinterpret", f"{_SHARED}._reinterpret")

# How a descriptor is encoded for TMA, so that it is encoded once for many launches. There is no public name for it.
_encode: Any = _need("triton.backends.nvidia.driver:make_tensordesc_arg")

# What a kernel's source is compiled from and for when no GPU is there. That of Gluon is public since 3.9.
_ASTSource: Any = find("triton.compiler:ASTSource")
_GluonASTSource: Any = find(f"{_GLUON}:GluonASTSource", f"{_GLUON}._runtime:GluonASTSource")
_GPUTarget: Any = find("triton.backends.compiler:GPUTarget")

# A hash of Triton's files, a part of every key of its cache, computed once a process. There is no public name for it.
hash_of_triton: Callable[[], Any] = find("triton.runtime.cache:triton_key") or (lambda: None)

DISASSEMBLER = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
"""The program that the wheel carries. There is no public name for where it is."""


def _make_async_atomic_add() -> Any:
    """A TMA reduction before 3.8, whose builder has it and whose language does not."""
    builtin = _need(f"{_GLUON}.language._core:builtin")
    add = _need("triton._C.libtriton:ir.DESCRIPTOR_REDUCE_KIND.ADD")
    if builtin is None or add is None:
        return None

    @builtin
    def async_atomic_add(tensor_desc, coord, src, _semantic=None):
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(add, tensor_desc.handle, coord, src.handle)

    return async_atomic_add


# Adds a tile in shared memory to one in global memory. Public since 3.8 as `tma.async_atomic_add`.
async_atomic_add: Any = find(f"{_TMA}:async_atomic_add") or _make_async_atomic_add()


def is_known() -> bool:
    """Whether the installed Triton is one of `KNOWN`."""
    return triton.__version__.startswith(KNOWN)


def why_not_gluon() -> str | None:
    """Why the kernels written in Gluon cannot be used with the installed Triton and torch; None if they can.

    The first call that finds a reason warns, once a process.
    """
    reason: str | None
    if not is_known():
        reason = f"they are written for triton {_LIST}; got {triton.__version__}"
    elif missing:
        reason = f"triton {triton.__version__} lacks {', '.join(missing)}"
    else:
        reason = torch_names.why_unknown()
    if reason is None:
        return None
    _warn(
        f"cs336_systems computes attention with its portable Triton kernels, which are slower on this GPU than those "
        f"for Hopper: {reason}. Install one of triton {_LIST} with the torch that it comes with, one of "
        f"{torch_names.LIST}, or a newer cs336_systems."
    )
    return reason


@functools.cache
def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)


def compile_options(asked: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Options of Triton's compiler: those that a launch asks for, and those of every kernel that it leaves open.

    Triton 3.9 warns where ``enable_fp_fusion`` is left open, and 3.10 will leave multiplications and additions apart.
    Triton 3.8 and 3.9 pass ``--regAllocOptLevel=2`` to ptxas, to work around a defect of its 13th release. Kernels
    that use all registers then spill several times as much. 4 is what ptxas does by itself, and the last of two such
    options counts.
    """
    options: dict[str, Any] = {"enable_fp_fusion": True}
    if triton.__version__.startswith(SINCE_3_8) and "ptx_options" not in asked and not triton.knobs.runtime.interpret:
        own = triton.knobs.nvidia.ptxas_options
        options["ptx_options"] = "--regAllocOptLevel=4" + (f" {own}" if own else "")
    return {**options, **asked}


def default_ptx_options() -> dict[str, Any]:
    """What a launch asks for so that ptxas gets Triton's own options, without the level of `compile_options`."""
    return {"ptx_options": triton.knobs.nvidia.ptxas_options}


def runner_of(compiled: Any, grid: tuple[int, int]) -> tuple[Callable[..., None], Callable[[Any, int], list[Any]]]:
    """A function that launches a compiled kernel on the current stream, and one that encodes a descriptor for it.

    The second takes a `TensorDescriptor` and its number among the kernel's descriptors, and returns the arguments to
    pass for it. Triton's own launch, ``compiled[grid]``, encodes every descriptor at every launch and calls several
    Python functions; this calls the launcher in C directly. Where that is not found, as with a version that is not
    known, or where a kernel needs scratch memory, it is ``compiled[grid]``.
    """
    launch, options, annotations = _c_launcher(compiled)
    if launch is None:
        return compiled[(*grid, 1)], lambda descriptor, number: [descriptor]
    driver = triton.runtime.driver.active
    device, stream_of = driver.get_current_device(), driver.get_current_stream
    function, metadata = compiled.function, compiled.packed_metadata
    hooks = triton.knobs.runtime
    whole = triton.__version__.startswith("3.6.")

    def run(*arguments: Any) -> None:
        stream = stream_of(device)
        hooked: tuple[Any, ...] = (None, None, None)
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            about = compiled.launch_metadata((*grid, 1), stream, *arguments)
            hooked = about, hooks.launch_enter_hook, hooks.launch_exit_hook
        if whole:
            launch(*grid, 1, stream, function, *options, None, None, metadata, *hooked, *arguments)
        else:
            launch(*grid, 1, stream, function, *options, metadata, *hooked, None, None, *annotations, arguments)

    described: Any = getattr(compiled.metadata, "tensordesc_meta", None)
    # Since 3.8 it takes a third argument, for descriptors that are arguments of the launch, and does not use it.
    more = (None,) if triton.__version__.startswith(SINCE_3_8) else ()

    def encode(descriptor: Any, number: int) -> list[Any]:
        arguments: list[Any] = _encode(descriptor, described[number], *more)
        return arguments

    return run, encode


def _c_launcher(compiled: Any) -> tuple[Callable[..., None] | None, tuple[Any, ...], tuple[Any, ...]]:
    """Triton's launcher in C, or None; what it takes after the function; and, since 3.7, how to read the arguments."""
    run = compiled.run
    needs_memory = run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False)
    if needs_memory or not is_known():
        return None, (), ()
    options = run.launch_cooperative_grid, run.launch_pdl
    if triton.__version__.startswith("3.6."):
        # A module for each signature. For descriptors, its function is wrapped in one that encodes them.
        names = getattr(getattr(run.launch, "__code__", None), "co_freevars", ())
        if "launcher" in names:
            return run.launch.__closure__[names.index("launcher")].cell_contents, options, ()
        return (None if names else run.launch), options, ()
    launch = getattr(triton.runtime.driver.active.utils, "launch", None)
    return launch, options, (run.arg_annotations, run.kernel_signature)


def find_key(kernel: Any) -> None:
    """Compute what Triton's cache on disk knows a kernel's source by.

    Of functions that call one another, Triton 3.6 and 3.7 hash the first in full and the others without what is on its
    way to them. So the key of a kernel depends on what was hashed before it, and every process has to hash the kernels
    in the same order, one at a time.
    """
    if not triton.knobs.runtime.interpret:
        _ = kernel.cache_key


def driver() -> Any:
    """Triton's driver. Where Triton's cache is empty, the first one that asks waits for a C compiler."""
    return triton.runtime.driver.active


def build_launcher(compiled: Any) -> None:
    """Compile a kernel's launcher into Triton's cache, where its first launch finds it.

    Before 3.7 each signature has one, on which a C compiler works for 0.3 s. Since then all kernels share one.
    """
    if triton.__version__.startswith("3.6."):
        driver().launcher_cls(compiled.src, compiled.metadata)


def names_of(kernel: Any) -> Sequence[str]:
    """The names of a kernel's parameters. There is no public name for them but those of its Python function."""
    names: Sequence[str] | None = getattr(kernel, "arg_names", None)
    return [*inspect.signature(kernel.fn).parameters] if names is None else names


def parameters_of(kernel: Any) -> list[tuple[str, bool, bool]]:
    """Of each parameter of a kernel its name, whether it is a constant, and whether Triton specialises its values."""
    return [(found.name, found.is_constexpr, not found.do_not_specialize) for found in kernel.params]


def compiled_for(capability: int, kernel: Any, described: Sequence[Any], options: dict[str, int]) -> Any:
    """A kernel compiled for a compute capability, from its signature, the values of constants, and attributes.

    Raises:
        RuntimeError: the installed Triton lacks what compiles for a GPU that is not there.
    """
    make_source = _GluonASTSource if kernel.is_gluon() else _ASTSource
    if make_source is None or _GPUTarget is None:
        raise RuntimeError(
            f"triton {triton.__version__} compiles no kernel for a GPU that is not there as known ones do"
        )
    return triton.compile(make_source(kernel, *described), target=_GPUTarget("cuda", capability, 32), options=options)
