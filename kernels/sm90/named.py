"""Barriers that a multiprocessor has by number, sixteen for each program, beside those that lie in shared memory.

Saying that one has come costs an instruction. With a barrier in shared memory one thread says so for its group, for
which Triton first lets all of them meet. Triton itself uses the lowest numbers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MET = gl.constexpr(7)
"""Where the warp groups of the backward meet."""
FULL = gl.constexpr(8)
"""From here on: parts of dQ that a group has written, a number for each group."""
TAKEN = gl.constexpr(10)
"""From here on: their room, that may be written again."""
Q_FREE = gl.constexpr(12)
"""From here on: tiles of q that groups read no more, a number for each stage."""
DOUT_FREE = gl.constexpr(14)
"""The same of dout."""

GROUP = gl.constexpr(128)
"""Threads of a warp group."""
BOTH = gl.constexpr(256)
"""Threads of the two groups of the backward."""
WARP = gl.constexpr(32)
"""Threads of a warp, which copies or adds."""


@gluon.constexpr_function
def instruction(kind, threads):
    """PTX for one barrier's operation. An operation by elements has to have a result."""
    return f"bar.{kind} $1, {threads}; mov.u32 $0, $1;"


@gluon.jit
def meet(number, THREADS: gl.constexpr):
    """Wait until so many threads have come to a barrier, these among them."""
    gl.inline_asm_elementwise(
        instruction("sync", THREADS), "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def arrive(number, THREADS: gl.constexpr):
    """Come to a barrier of so many threads, without waiting for the others."""
    gl.inline_asm_elementwise(
        instruction("arrive", THREADS), "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1
    )
