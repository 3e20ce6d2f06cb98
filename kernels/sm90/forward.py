"""FlashAttention forward with specialized warps, after FlashAttention-3 (Shah et al., 2024).

A producer warp loads tiles of q, k and v into shared memory by TMA. Each of up to three consumer warp groups has 64
rows of q; it issues the next S before P v of this step, and computes the next P while the tensor cores run the latter.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ..lib.softmax import LOG2_E
from ..versions import async_store
from .forward_mainloop import mainloop, start_pv, wait_pv
from .forward_producer import Tensors, new_memory, producer
from .lib.block_lists import new_block_lists
from .lib.dropout import new_dropout
from .lib.mma import WG_ROWS, accumulator, as_matrix
from .lib.mods import Mods
from .lib.pair_tiles import new_pair_tensor
from .lib.scheduler import RECOMPUTE, STOP
from .lib.softmax import ScoreScale
from .lib.tile_map import TileMap
from .lib.varlen import new_varlen

DYNAMIC = (
    *("batch_heads", "heads", "heads_per_kv", "q_len", "k_len", "left", "right", "section"),
    *("sequences", "max_seqlen_q", "max_seqlen_k"),
)
"""Arguments without specialization: one compiled kernel takes any values of them."""


@gluon.jit
def consumer(
    CONSUMER: gl.constexpr, tensors, memory, tile_map, scores, mods, SEPARATE_OUT: gl.constexpr,
):  # fmt: skip
    """A consumer warp group: attention of its 64 rows of each tile."""
    layout: gl.constexpr = accumulator(tile_map.INNER_TILE)
    n = 0
    turn = 0
    command, batch, head, start = memory.scheduler.pop(turn, 4)
    while command != STOP:
        recompute = command == RECOMPUTE
        seq = memory.scheduler.pop_sequence(turn, tile_map, 4)
        tile = seq.listed(seq.tile(batch, head, start), head)
        first_row = tile.start + CONSUMER * WG_ROWS
        rows = first_row + gl.arange(0, WG_ROWS, layout=gl.SliceLayout(1, layout))
        memory.q.wait_full(turn)
        softmax, p, out, out_tail, n, updated = mainloop(
            tensors, memory, seq, tile, rows, n, recompute, scores, mods, gl.to_tensor(CONSUMER)
        )
        if SEPARATE_OUT:
            memory.q.release(turn)
        memory.v.wait_full(n)
        out, out_tail, operand = start_pv(p, out, out_tail, tensors, memory, n, tile_map.INNER_TILE)
        out, out_tail = wait_pv(out, out_tail, operand, tensors.V_TAIL)
        n += 1
        ok = softmax.is_overflow_free(out, updated, scores.scale)
        if tensors.V_TAIL > 0:
            ok = ok & softmax.is_overflow_free(out_tail, updated, scores.scale)
        ok = ok | recompute
        sink = None
        if tensors.SINKS:
            sink = gl.load(tensors.sinks + tile.head).to(gl.float32) * LOG2_E
        inverse_sum, row_lse = softmax.finalize(scores.scale, sink)
        inverse_sum = mods.dropout.scale(inverse_sum)
        lse = tile_map.per_row(tensors.lse, tile, seq)
        epilogue(out, out_tail, inverse_sum, row_lse, lse, rows, tensors, memory, seq, tile, first_row, CONSUMER)
        if not SEPARATE_OUT:
            tma.store_wait(0)
            memory.q.release(turn)
        if not recompute:
            memory.overflow.set(turn, CONSUMER, 1 - ok.to(gl.int32))
        turn += 1
        command, batch, head, start = memory.scheduler.pop(turn, 4)
    tma.store_wait(0)


@gluon.jit
def epilogue(
    out, out_tail, inverse_sum, row_lse, lse, rows, tensors, memory, seq, tile, first_row, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Store the log-sum-exp, and the normalized output by TMA, which the next tile's steps overlap."""
    dtype: gl.constexpr = memory.k.buffers.dtype
    out *= gl.convert_layout(inverse_sum, gl.SliceLayout(1, out.type.layout))[:, None]
    gl.store(lse + rows, row_lse, mask=rows < seq.outer_len)
    tma.store_wait(0)
    buffer = memory.out.index(CONSUMER)
    as_matrix(buffer, WG_ROWS, tensors.HEAD_DIM).store(out.to(dtype))
    if tensors.V_TAIL > 0:
        out_tail *= gl.convert_layout(inverse_sum, gl.SliceLayout(1, out_tail.type.layout))[:, None]
        tail_buffer = memory.out_tail.index(CONSUMER)
        as_matrix(tail_buffer, WG_ROWS, tensors.V_TAIL).store(out_tail.to(dtype))
    fence_async_shared()
    async_store(tensors.out, seq.outer_coords(tile.batch, tile.head, first_row, 0), buffer)
    if tensors.V_TAIL > 0:
        coords = seq.outer_coords(tile.batch, tile.head, first_row, tensors.HEAD_DIM)
        async_store(tensors.out_tail, coords, tail_buffer)


@gluon.jit(do_not_specialize=DYNAMIC)
def forward_kernel(
    q, k, v, out, q_tail, k_tail, v_tail, out_tail, lse, workspace, cu_seqlens_q, cu_seqlens_k,
    captured, pairs, blocks, dropout, sinks,
    batch_heads, heads, heads_per_kv, q_len, k_len, left, right, section, scale, softcap_scale, natural,
    sequences, max_seqlen_q, max_seqlen_k,
    HEAD_DIM: gl.constexpr, K_TAIL: gl.constexpr, V_TAIL: gl.constexpr,
    TILE_K: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
    MASK: gl.constexpr, SCORE: gl.constexpr, PAIR_ARGUMENT: gl.constexpr, BATCH_INNER: gl.constexpr,
    INNER_DIVISIBLE: gl.constexpr,
    SEPARATE_OUT: gl.constexpr, PERSISTENT: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid: as many CTAs as the GPU runs at once, or fewer.

    q to out are TMA descriptors of HEAD_DIM columns; tails are those of the remaining columns, None where there are
    none (`Tensors`). workspace: int32, a counter and the retry list (`lib.scheduler`). scale and softcap_scale: see
    `ScoreScale`; captured, natural, MASK, SCORE: see `Mods`; pairs, PAIR_ARGUMENT: see `lib.pair_tiles`; blocks: see
    `lib.block_lists`; dropout: see `lib.dropout.new_dropout`; sinks: a logit for each head, or None; cu_seqlens,
    sequences, max_seqlen: see `lib.varlen`; other names: see `TileMap` and `tiles.ForwardConfig`.
    """
    if K_TAIL == 0:
        q_tail, k_tail = q, k
    if V_TAIL == 0:
        v_tail, out_tail = v, out
    SINKS: gl.constexpr = sinks is not None
    if not SINKS:
        sinks = lse
    tensors = Tensors(
        q, k, v, out, q_tail, k_tail, v_tail, out_tail, lse, workspace, sinks,
        new_pair_tensor(pairs, PAIR_ARGUMENT, q), HEAD_DIM, K_TAIL, V_TAIL, SINKS,
    )  # fmt: skip
    scores = ScoreScale(scale, softcap_scale, SOFTCAP)
    if MASK is None and SCORE is None:
        captured = ()
    mods = Mods(captured, natural, new_dropout(dropout, heads, 1, sequences), MASK, SCORE)
    varlen = new_varlen(cu_seqlens_q, cu_seqlens_k, sequences, max_seqlen_q, max_seqlen_k, BOTTOM_RIGHT)
    tile_map = TileMap(
        batch_heads, heads, q_len, k_len, left, right, section, varlen, new_block_lists(blocks, sequences),
        CONSUMERS * WG_ROWS, TILE_K, LEFT, RIGHT, MASK is not None and blocks is None, BATCH_INNER, INNER_DIVISIBLE,
        # Of lists the longest are, in most masks, those of the last rows.
        RIGHT or blocks is not None, False,
    )  # fmt: skip
    memory = new_memory(tensors, CONSUMERS, STAGES, SEPARATE_OUT, varlen.VARLEN)
    fence_async_shared()
    if CONSUMERS == 1:
        gl.warp_specialize([
            (consumer, (0, tensors, memory, tile_map, scores, mods, SEPARATE_OUT)),
            (producer, (tensors, memory, tile_map, heads_per_kv, PERSISTENT)),
        ], [1], [PRODUCER_REGISTERS])  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (0, tensors, memory, tile_map, scores, mods, SEPARATE_OUT)),
            (consumer, (1, tensors, memory, tile_map, scores, mods, SEPARATE_OUT)),
            (producer, (tensors, memory, tile_map, heads_per_kv, PERSISTENT)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (0, tensors, memory, tile_map, scores, mods, SEPARATE_OUT)),
            (consumer, (1, tensors, memory, tile_map, scores, mods, SEPARATE_OUT)),
            (consumer, (2, tensors, memory, tile_map, scores, mods, SEPARATE_OUT)),
            (producer, (tensors, memory, tile_map, heads_per_kv, PERSISTENT)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
