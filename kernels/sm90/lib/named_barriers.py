"""The sixteen hardware barriers of a CTA, which have numbers: PTX's `bar.sync` and `bar.arrive`.

An arrival costs one instruction. At an mbarrier one thread arrives for its warp group, and Triton first synchronizes
the group. Triton itself uses the lowest numbers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

DQ_TAIL_FULL = gl.constexpr(5)
"""From here on, one for each consumer warp group: as `DQ_FULL`, of the tail's columns."""
PAIRS_EMPTY = gl.constexpr(6)
"""No consumer of the backward reads the tile of pairs any more, where there is one; never with tails."""
DS_WRITTEN = gl.constexpr(7)
"""Both consumer warp groups of the backward have written their dS."""
DQ_FULL = gl.constexpr(8)
"""From here on, one for each consumer warp group: it has written its half of a dQ tile to shared memory."""
DQ_EMPTY = gl.constexpr(10)
"""The same: the dQ reducer has read that half."""
PIECE_EMPTY = gl.constexpr(8)
"""From here on, one for each stage, where no dQ reducer is: no consumer reads the piece of q or dout any more."""
Q_EMPTY = gl.constexpr(12)
"""From here on, one for each stage: no consumer reads the tile of q any more."""
DOUT_EMPTY = gl.constexpr(14)
"""The same of dout."""

WARP_GROUP = gl.constexpr(128)
"""Threads of a warp group."""
CONSUMERS = gl.constexpr(256)
"""Threads of the backward's two consumer warp groups."""
WARP = gl.constexpr(32)
"""Threads of a warp, such as the producer."""


@gluon.constexpr_function
def instruction(operation, threads):
    """PTX for one operation. Elementwise assembly must have a result."""
    return f"bar.{operation} $1, {threads}; mov.u32 $0, $1;"


@gluon.jit
def sync(number, THREADS: gl.constexpr):
    """Wait until THREADS threads have arrived at a barrier, the calling ones among them."""
    gl.inline_asm_elementwise(
        instruction("sync", THREADS), "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def arrive(number, THREADS: gl.constexpr):
    """Arrive at a barrier of THREADS threads without waiting for the others."""
    gl.inline_asm_elementwise(
        instruction("arrive", THREADS), "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1
    )
