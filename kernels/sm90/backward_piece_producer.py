"""The backward's shared memory and producer warp for head dimensions above 256; see `backward_pieces`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..versions import async_load
from .backward_producer import new_pipeline, produce
from .lib import named_barriers
from .lib.mma import WG_ROWS
from .lib.pipeline import NamedPipeline, new_barriers, new_buffers
from .lib.scheduler import TileScheduler, new_scheduler
from .lib.struct import struct


@struct
class PieceMemory:
    """What warps share.

    k, v, k_empty, v_empty: as of `SharedMemory`; v and v_empty are k's if OF_V.
    pieces: a pipeline of pieces of q if OF_V, else of dout, PIECES for each tile; whole: one of tiles of the other.
    lse2 and delta, of the rows of a tile, arrive with its first piece, but in separate buffers: consumers release that
    piece while they may still be loading them. When they release the next tile's first piece they have used them.
    scores: two tiles (keys, rows of q) of P if OF_V, else one of dS.
    """

    scheduler: TileScheduler
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    pieces: NamedPipeline
    whole: NamedPipeline
    lse2: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    scores: gl.shared_memory_descriptor
    PIECES: gl.constexpr
    OF_V: gl.constexpr
    K_TAIL: gl.constexpr

    @gluon.jit
    def drain(self, n):
        """Wait until all of n tiles are released."""
        self.pieces.drain(n * self.PIECES)
        self.whole.drain(n)


@gluon.jit
def new_piece_memory(tensors, STAGES: gl.constexpr, PIECES: gl.constexpr, OF_V: gl.constexpr, VARLEN: gl.constexpr):
    """Allocate it; STAGES are of the pieces."""
    COUNT: gl.constexpr = 2 if OF_V else 1
    # A power of 2, large enough that TMA overwrites a buffer only after the next tile's first piece is released.
    ROW_BUFFERS: gl.constexpr = 2 if PIECES >= STAGES else 4
    dtype: gl.constexpr = tensors.q.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WG_ROWS, WG_ROWS], dtype)
    k_empty = new_barriers(1, 2).index(0)
    scheduler = new_scheduler(2, VARLEN)
    k = new_buffers(tensors.k, 1)
    lse2 = new_buffers(tensors.lse2, ROW_BUFFERS)
    if OF_V:
        v, v_empty, delta = k, k_empty, lse2
        pieces = new_pipeline(tensors.q, STAGES, named_barriers.PIECE_EMPTY)
        whole = new_pipeline(tensors.dout, 1, named_barriers.Q_EMPTY)
    else:
        v = new_buffers(tensors.v, 1)
        v_empty = new_barriers(1, 2).index(0)
        delta = new_buffers(tensors.delta, ROW_BUFFERS)
        pieces = new_pipeline(tensors.dout, STAGES, named_barriers.PIECE_EMPTY)
        whole = new_pipeline(tensors.q, 1, named_barriers.Q_EMPTY)
    scores = gl.allocate_shared_memory(dtype, [COUNT, WG_ROWS, WG_ROWS], layout)
    return PieceMemory(scheduler, k, v, k_empty, v_empty, pieces, whole, lse2, delta, scores, PIECES, OF_V, 0)


@gluon.jit
def row_buffer(buffers, n):
    """The buffer of lse2 or delta for the n-th tile."""
    return buffers.index(n & (buffers.shape[0] - 1))


@gluon.jit
def piece_producer(tensors, memory, tile_map, heads_per_kv, PERSISTENT: gl.constexpr):
    """The producer warp, with this memory."""
    produce(tensors, memory, tile_map, heads_per_kv, PERSISTENT, load_pieces)


@gluon.jit
def load_pieces(tensors, memory, seq, tile, heads_per_kv, member, row, turn, n, first):
    """`load_step` for this memory. k or v, of which the pieces' product is, comes with the first piece of a tile."""
    OF_V: gl.constexpr = memory.OF_V
    STAGES: gl.constexpr = memory.pieces.stages
    KEY_BYTES: gl.constexpr = WG_ROWS * tensors.k.block_shape[-1] * 2
    if OF_V:
        desc, keys_desc, keys_buffer, keys_empty = tensors.q, tensors.k, memory.k, memory.k_empty
    else:
        desc, keys_desc, keys_buffer, keys_empty = tensors.dout, tensors.v, memory.v, memory.v_empty
    WIDTH: gl.constexpr = desc.block_shape[-1]
    BYTES: gl.constexpr = WG_ROWS * WIDTH * 2
    ROW_BYTES: gl.constexpr = WG_ROWS * (4 if OF_V else 8)
    head = tile.head * heads_per_kv + member
    row_coords = [tile.batch_head * heads_per_kv + member, seq.padded_inner_start() + row]
    for piece in gl.static_range(memory.PIECES):
        if piece == STAGES:
            # Not later: until consumers have released a piece.
            load_whole(tensors, memory, seq, tile, head, row, turn, n, first)
        number = n * memory.PIECES + piece
        memory.pieces.wait_empty(number)
        full = memory.pieces.full_barrier(number)
        if piece == 0:
            mbarrier.expect(full, BYTES + ROW_BYTES + KEY_BYTES, pred=n == first)
            mbarrier.expect(full, BYTES + ROW_BYTES, pred=n > first)
            async_load(tensors.lse2, row_coords, full, row_buffer(memory.lse2, n))
            if not OF_V:
                async_load(tensors.delta, row_coords, full, row_buffer(memory.delta, n))
        else:
            mbarrier.expect(full, BYTES)
        coords = seq.inner_coords(tile.batch, head, row, piece * WIDTH)
        async_load(desc, coords, full, memory.pieces.buffer(number))
        if piece == 0:  # noqa: SIM102 - known when compiled
            if n == first:
                mbarrier.wait(keys_empty, (turn - 1) & 1, pred=turn > 0)
                key_coords = seq.outer_coords(tile.batch, tile.head, tile.start, 0)
                async_load(keys_desc, key_coords, full, keys_buffer.index(0))
    if memory.PIECES <= STAGES:
        load_whole(tensors, memory, seq, tile, head, row, turn, n, first)


@gluon.jit
def load_whole(tensors, memory, seq, tile, head, row, turn, n, first):
    """Load the n-th whole tile; k with the first of q."""
    BYTES: gl.constexpr = WG_ROWS * tensors.k.block_shape[-1] * 2
    coords = seq.inner_coords(tile.batch, head, row, 0)
    memory.whole.wait_empty(n)
    full = memory.whole.full_barrier(n)
    if memory.OF_V:
        mbarrier.expect(full, BYTES)
        async_load(tensors.dout, coords, full, memory.whole.buffer(n))
    else:
        mbarrier.expect(full, 2 * BYTES, pred=n == first)
        mbarrier.expect(full, BYTES, pred=n > first)
        async_load(tensors.q, coords, full, memory.whole.buffer(n))
        if n == first:
            mbarrier.wait(memory.k_empty, (turn - 1) & 1, pred=turn > 0)
            k_coords = seq.outer_coords(tile.batch, tile.head, tile.start, 0)
            async_load(tensors.k, k_coords, full, memory.k.index(0))
