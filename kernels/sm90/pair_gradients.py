"""The gradient of a tensor that score changes read at each pair, such as a bias.

A CTA, one warp group, computes a tile of it. For each batch entry and head that share the tensor it computes S = q kᵀ
and dP = dout vᵀ again, and adds dS, times the derivative by the element, to a sum in registers. Tiles for the next ones
are loaded as soon as a product has read its own; and two CTAs share a multiprocessor.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..versions import async_load, barrier
from .backward_consumer import probabilities
from .forward_mainloop import pairs_of, visible
from .lib.block_lists import new_block_lists
from .lib.dropout import new_dropout
from .lib.mma import WG_ROWS, accumulator, as_matrix
from .lib.mods import ZERO, Mods
from .lib.pair_tiles import new_pair_tensor, pair_bytes
from .lib.pipeline import new_barriers, new_buffers
from .lib.softmax import ScoreScale
from .lib.struct import struct
from .lib.tile_map import TileMap
from .lib.varlen import new_varlen

DYNAMIC = (
    *("heads", "heads_per_kv", "q_len", "k_len", "padded_len", "left", "right", "shared_batches", "shared_heads"),
    "unused",
)
"""Arguments without specialization."""


@struct
class Operands:
    """The tiles of a product (rows, keys): descriptors and buffers, and the mbarrier at which they arrive."""

    of_rows: tma.tensor_descriptor
    of_keys: tma.tensor_descriptor
    rows: gl.shared_memory_descriptor
    keys: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor

    @gluon.jit
    def load(self, batch, head, kv_head, row, column, MORE_BYTES: gl.constexpr):
        """Load both tiles. MORE_BYTES: of what else arrives with them."""
        mbarrier.expect(self.full, 2 * (self.rows.numel + self.keys.numel) + MORE_BYTES)
        async_load(self.of_rows, [batch, head, row, 0], self.full, self.rows)
        async_load(self.of_keys, [batch, kv_head, column, 0], self.full, self.keys)

    @gluon.jit
    def start(self, turn, HEAD_DIM: gl.constexpr, TILE_K: gl.constexpr):
        """Issue the product when the tiles have arrived."""
        mbarrier.wait(self.full, turn & 1)
        zeros = gl.zeros([WG_ROWS, TILE_K], gl.float32, accumulator(TILE_K))
        keys = as_matrix(self.keys, TILE_K, HEAD_DIM).permute((1, 0))
        return warpgroup_mma(as_matrix(self.rows, WG_ROWS, HEAD_DIM), keys, zeros, use_acc=False, is_async=True)


@gluon.jit
def new_operands(of_rows, of_keys):
    """Allocate them."""
    rows, keys = new_buffers(of_rows, 1).index(0), new_buffers(of_keys, 1).index(0)
    return Operands(of_rows, of_keys, rows, keys, new_barriers(1, 1).index(0))


@gluon.jit
def load_scores(qk, pair_tensor, tiles, batch, head, heads_per_kv, row, column):
    """Load the tiles of q and k of a batch entry and head, and what is read at their pairs."""
    ROWS: gl.constexpr = qk.rows.shape[-2]
    KEYS: gl.constexpr = qk.keys.shape[-2]
    PAIR_BYTES: gl.constexpr = pair_bytes(pair_tensor.ARGUMENT, pair_tensor.desc.dtype, ROWS, KEYS)
    qk.load(batch, head, head // heads_per_kv, row, column, PAIR_BYTES)
    if pair_tensor.ARGUMENT is not None:
        pair_tensor.load(batch, head, row, column, qk.full, tiles.buffer(0, 0))


@gluon.jit(do_not_specialize=DYNAMIC)
def pair_gradient_kernel(
    q, dout, k, v, lse2, delta, target, captured, pairs, dropout,
    heads, heads_per_kv, q_len, k_len, padded_len, left, right, shared_batches, shared_heads,
    exponent_scale, softcap_scale, natural, unused,
    HEAD_DIM: gl.constexpr, TILE_K: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
    MASK: gl.constexpr, SCORE: gl.constexpr, PAIR_ARGUMENT: gl.constexpr, TERM: gl.constexpr,
):  # fmt: skip
    """Grid: the matrices of the target, (batch, heads, q_len, k_len), contiguous, times its tiles.

    ``shared_batches`` batch entries and ``shared_heads`` heads, 1 or all, share each matrix. q to v are TMA descriptors
    of tiles of WG_ROWS rows and TILE_K keys; lse2, delta and scales: as of `backward_kernel`. TERM: which of the
    derivatives that SCORE computes; captured, natural, MASK, SCORE: see `Mods`; pairs, PAIR_ARGUMENT: see
    `lib.pair_tiles`.
    """
    layout: gl.constexpr = accumulator(TILE_K)
    varlen = new_varlen(None, None, unused, unused, unused, False)
    seq = TileMap(
        unused, heads, q_len, k_len, left, right, unused, varlen, new_block_lists(None, unused),
        WG_ROWS, TILE_K, LEFT, RIGHT, False, False, False, False, False,
    )  # fmt: skip
    scores = ScoreScale(exponent_scale, softcap_scale, SOFTCAP)
    mods = Mods(captured, natural, new_dropout(dropout, heads, 1, unused), MASK, SCORE)
    pair_tensor = new_pair_tensor(pairs, PAIR_ARGUMENT, q)
    qk = new_operands(q, k)
    gradients = new_operands(dout, v)
    tiles = pair_tensor.new_tiles(1, 1, qk.rows)
    fence_async_shared()
    barrier()

    tiles_q = gl.cdiv(q_len, WG_ROWS)
    tiles_k = gl.cdiv(k_len, TILE_K)
    matrix = gl.program_id(0) // tiles_k // tiles_q
    first_row = gl.program_id(0) // tiles_k % tiles_q * WG_ROWS
    first_column = gl.program_id(0) % tiles_k * TILE_K
    first_batch = matrix // (heads // shared_heads)
    first_head = matrix % (heads // shared_heads)
    rows = first_row + gl.arange(0, WG_ROWS, layout=gl.SliceLayout(1, layout))
    end_batch = first_batch + shared_batches
    end_head = first_head + shared_heads
    if RIGHT:
        end_batch = gl.where(first_column > first_row + WG_ROWS - 1 + right, first_batch, end_batch)
    if LEFT:
        end_batch = gl.where(first_column + TILE_K - 1 < first_row + left, first_batch, end_batch)
    seen = visible(rows, first_column, seq, layout)
    total = gl.zeros([WG_ROWS, TILE_K], gl.float32, layout)
    if first_batch < end_batch:
        load_scores(qk, pair_tensor, tiles, first_batch, first_head, heads_per_kv, first_row, first_column)
        gradients.load(first_batch, first_head, first_head // heads_per_kv, first_row, first_column, 0)
    turn = 0
    for batch in range(first_batch, end_batch):
        for head in range(first_head, end_head):
            is_last = head + 1 == end_head
            next_batch = gl.where(is_last, batch + 1, batch)
            next_head = gl.where(is_last, first_head, head + 1)
            s = qk.start(turn, HEAD_DIM, TILE_K)
            dp = gradients.start(turn, HEAD_DIM, TILE_K)
            row_places = (gl.to_tensor(batch) * heads + head).to(gl.int64) * padded_len + rows
            row_lse2 = gl.load(lse2 + row_places)
            row_delta = gl.load(delta + row_places)
            bits = mods.dropout.draw(first_row, first_column, batch, head, TILE_K, False)
            s = scores.softcap(warpgroup_mma_wait(1, [s]))
            rules = mods
            if tiles.ARGUMENT is not None:
                rules = mods.reading(tiles.load(0, 0, WG_ROWS, TILE_K), tiles.ARGUMENT)
                # TMA loads the next tile into this buffer, from which warps may still be loading.
                fence_async_shared()
            barrier()
            if next_batch < end_batch:
                load_scores(qk, pair_tensor, tiles, next_batch, next_head, heads_per_kv, first_row, first_column)
            here = pairs_of(rows, first_column, seq, seq.tile(batch, head, first_row), layout, True)
            changed, terms = rules.terms(s, here)
            p = probabilities(changed * scores.scale - row_lse2[:, None])
            p = gl.where(seen, rules.hide(p, here, ZERO), 0.0)
            dp = mods.dropout.scale(mods.dropout.drop(warpgroup_mma_wait(0, [dp]), bits, False))
            barrier()
            if next_batch < end_batch:
                gradients.load(next_batch, next_head, next_head // heads_per_kv, first_row, first_column, 0)
            total += p * (dp - row_delta[:, None]) * terms[TERM]
            turn += 1
    columns = first_column + gl.arange(0, TILE_K, layout=gl.SliceLayout(0, layout))[None, :]
    target += matrix.to(gl.int64) * q_len * k_len + first_row.to(gl.int64) * k_len
    places = (rows - first_row)[:, None] * k_len + columns
    gl.store(target + places, total.to(target.dtype.element_ty), mask=(rows < q_len)[:, None] & (columns < k_len))
