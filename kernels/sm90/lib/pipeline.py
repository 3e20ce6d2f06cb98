"""Pipelines of shared-memory buffers: one warp fills them by TMA, consumer warp groups read and release them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from . import named_barriers
from .struct import struct


@gluon.jit
def stage(self, n):
    """The stage of the n-th tile. Consumers wait for this number: masking bits is faster than dividing signed ones."""
    if self.stages & (self.stages - 1) == 0:
        return n & (self.stages - 1)
    else:
        return n % self.stages


@gluon.jit
def parity(self, n):
    """The phase parity of the n-th tile's mbarriers."""
    if self.stages & (self.stages - 1) == 0:
        return (n & self.stages) // self.stages
    else:
        return (n // self.stages) & 1


@gluon.jit
def buffer(self, n):
    """The buffer of the n-th tile."""
    return self.buffers.index(self.stage(n))


@gluon.jit
def full_barrier(self, n):
    """The mbarrier that the n-th tile's loads complete."""
    return self.full.index(self.stage(n))


@gluon.jit
def wait_full(self, n, pred=True):
    """Wait until the n-th tile has arrived; not at all unless ``pred``."""
    mbarrier.wait(self.full_barrier(n), self.parity(n), pred=pred)


@struct
class Pipeline:
    """``stages`` buffers, each with an mbarrier "full" and an mbarrier "empty".

    Tiles are counted from 0 over all that a CTA loads; tile n lies in stage n % stages.
    """

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr

    # Not inherited: before Triton 3.8 an aggregate keeps no fields of a base class, since then it takes no plain base.
    stage, parity, buffer, full_barrier, wait_full = stage, parity, buffer, full_barrier, wait_full

    @gluon.jit
    def wait_empty(self, n):
        """Wait until the tile before the n-th one in its stage is released."""
        before = n - self.stages
        mbarrier.wait(self.empty.index(self.stage(before)), self.parity(before), pred=before >= 0)

    @gluon.jit
    def release(self, n):
        """The calling warps do not read the n-th tile any more."""
        mbarrier.arrive(self.empty.index(self.stage(n)), count=1)


@struct
class NamedPipeline:
    """A `Pipeline` whose buffers are released at named barriers, from number ``empty`` on, by ``readers`` threads."""

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.constexpr
    readers: gl.constexpr
    stages: gl.constexpr

    stage, parity, buffer, full_barrier, wait_full = stage, parity, buffer, full_barrier, wait_full

    @gluon.jit
    def wait_empty(self, n):
        """Wait until the tile before the n-th one in its stage is released. The producer calls it once for each n."""
        if n >= self.stages:
            named_barriers.sync(self.empty + self.stage(n), self.readers + named_barriers.WARP)

    @gluon.jit
    def drain(self, n):
        """Wait until all of n tiles are released: no barrier may be left with only some of its threads arrived."""
        for late in range(max(n - self.stages, 0), n):
            named_barriers.sync(self.empty + self.stage(late), self.readers + named_barriers.WARP)

    @gluon.jit
    def release(self, n):
        """The calling warps do not read the n-th tile any more."""
        named_barriers.arrive(self.empty + self.stage(n), self.readers + named_barriers.WARP)


@gluon.jit
def new_barriers(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """An mbarrier for each stage, complete after ARRIVALS arrivals.

    Each must be waited for somewhere. Triton takes one that is not for dead and gives its memory to tiles; the GPU
    treats that memory as an mbarrier until the CTA ends, and writes it back when it switches between processes.
    """
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(barriers.index(stage), count=ARRIVALS)
    return barriers


@gluon.jit
def new_buffers(desc, COUNT: gl.constexpr):
    """Shared memory for COUNT of a descriptor's tiles."""
    shape: gl.constexpr = [COUNT] + desc.block_shape  # noqa: RUF005 - Gluon knows no starred lists
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
