"""What of Gluon differs between the versions of Triton that these kernels are compiled with, and nothing else."""

import triton
from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin
from triton.language.core import _aggregate as aggregate

SUPPORTED = ("3.6.", "3.7.")
"""Versions that the compile tests cover."""

__all__ = ["SUPPORTED", "aggregate", "is_supported", "tma_add"]


def is_supported() -> bool:
    """Whether the installed Triton is one of these."""
    return triton.__version__.startswith(SUPPORTED)


@builtin
def tma_add(desc, coord, src, _semantic=None):
    """Begin adding a tile in shared memory to one in global memory; the copying unit adds.

    Neither version has a public name for it.
    """
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)
