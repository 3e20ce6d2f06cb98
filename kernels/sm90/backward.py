"""FlashAttention backward with specialized warps: CTAs own tiles of keys, and dQ is added up in global memory.

k and v of a tile stay in shared memory while tiles of q and dout, with two numbers for each of their rows, come through
pipelines. Two consumer warp groups compute: `backward_consumer`, `backward_split`, `backward_wide`.
The outer axis is k, the inner one q.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from .backward_consumer import consumer, waits_for_never
from .backward_piece_producer import new_piece_memory, piece_producer
from .backward_pieces import piece_consumer
from .backward_producer import Tensors, new_memory, producer
from .backward_split import split_consumer
from .backward_wide import wide_consumer
from .dq_reducer import dq_reducer
from .lib.block_lists import new_block_lists
from .lib.dropout import new_dropout
from .lib.mma import WG_ROWS
from .lib.mods import Mods
from .lib.pair_tiles import new_pair_tensor
from .lib.softmax import ScoreScale
from .lib.tile_map import TileMap
from .lib.varlen import new_varlen

DYNAMIC = (
    *("batch_heads", "heads", "heads_per_kv", "q_len", "k_len", "padded_len", "left", "right", "section"),
    *("sequences", "max_seqlen_q", "max_seqlen_k"),
)
"""Arguments without specialization: one compiled kernel takes any values of them."""


@gluon.jit
def consumer_of_keys(
    CONSUMER: gl.constexpr, tensors, memory, tile_map, heads_per_kv, scale, scores, mods, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """A consumer warp group with 64 of 128 keys, of the kind for HEAD_DIM columns and their tail."""
    if tensors.K_TAIL > 0 and HEAD_DIM > WG_ROWS:
        split_consumer(CONSUMER, tensors, memory, tile_map, heads_per_kv, scale, scores, mods, HEAD_DIM)
    else:
        consumer(CONSUMER, tensors, memory, tile_map, heads_per_kv, scale, scores, mods, HEAD_DIM)


@gluon.jit(do_not_specialize=DYNAMIC)
def backward_kernel(
    q, dout, k, v, lse2, delta, dk, dv, dq, turns, q_tail, k_tail, dk_tail, dout_tail, v_tail, dv_tail, workspace,
    cu_seqlens_q, cu_seqlens_k,
    captured, pairs, blocks, dropout,
    batch_heads, heads, heads_per_kv, q_len, k_len, padded_len, left, right, section,
    scale, exponent_scale, softcap_scale, natural, sequences, max_seqlen_q, max_seqlen_k,
    HEAD_DIM: gl.constexpr, K_TAIL: gl.constexpr, V_TAIL: gl.constexpr,
    TILE_Q: gl.constexpr, TILE_K: gl.constexpr, STAGES: gl.constexpr, PAIR_STAGES: gl.constexpr, PIECES: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
    MASK: gl.constexpr, SCORE: gl.constexpr, PAIR_ARGUMENT: gl.constexpr, BATCH_INNER: gl.constexpr,
    INNER_DIVISIBLE: gl.constexpr,
    PERSISTENT: gl.constexpr, DETERMINISTIC: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid: as many CTAs as the GPU runs at once, or fewer.

    q to dv are TMA descriptors, tails those of the K_TAIL or V_TAIL columns beyond HEAD_DIM or None; batch_heads and
    heads are k's. lse2 and delta are (batch_heads of q, padded_len), lse2 in exponents of 2 and +inf where there is no
    row. dq, float32 in the order of accumulator fragments, is a descriptor of rows of DQ_ROW numbers, or a pointer if
    TILE_K is 64. turns, DETERMINISTIC: see `dq_reducer`. workspace: see `lib.scheduler`; exponent_scale, softcap_scale:
    see `ScoreScale`; captured, natural, MASK, SCORE: see `Mods`; pairs, PAIR_ARGUMENT: see `lib.pair_tiles`; blocks:
    see `lib.block_lists`; dropout: see `lib.dropout.new_dropout`; BATCH_INNER: see `TileMap`.
    PIECES: if not 0, see `backward_pieces`; it computes dV if dk is None, dK and dQ if dv is None.
    """
    varlen = new_varlen(cu_seqlens_k, cu_seqlens_q, sequences, max_seqlen_k, max_seqlen_q, BOTTOM_RIGHT)
    # Key j is seen by the rows from j - right to j - left.
    tile_map = TileMap(
        batch_heads, heads, k_len, q_len, -right, -left, section, varlen, new_block_lists(blocks, sequences),
        TILE_K, TILE_Q, RIGHT, LEFT, MASK is not None and blocks is None, BATCH_INNER, INNER_DIVISIBLE, LEFT, True,
    )  # fmt: skip
    scores = ScoreScale(exponent_scale, softcap_scale, SOFTCAP)
    if MASK is None and SCORE is None:
        captured = ()
    mods = Mods(captured, natural, new_dropout(dropout, heads, heads_per_kv, sequences), MASK, SCORE)
    OF_V: gl.constexpr = dk is None
    if OF_V:
        dk = dv
    if dv is None:
        dv = dk
    if K_TAIL == 0:
        q_tail, k_tail, dk_tail = q, k, dk
    if V_TAIL == 0:
        dout_tail, v_tail, dv_tail = dout, v, dv
    tensors = Tensors(
        q, dout, k, v, lse2, delta, dk, dv, q_tail, k_tail, dk_tail, dout_tail, v_tail, dv_tail, workspace,
        new_pair_tensor(pairs, PAIR_ARGUMENT, q), K_TAIL, V_TAIL, DETERMINISTIC,
    )  # fmt: skip
    SPLIT: gl.constexpr = K_TAIL > 0 and HEAD_DIM > WG_ROWS
    NEVER: gl.constexpr = TILE_K > WG_ROWS and not SPLIT and waits_for_never(TILE_Q, SOFTCAP, SCORE)
    if PIECES > 0:
        memory = new_piece_memory(tensors, STAGES, PIECES, OF_V, varlen.VARLEN)
    else:
        memory = new_memory(tensors, dq, STAGES, PAIR_STAGES, NEVER, varlen.VARLEN)
    fence_async_shared()
    if PIECES > 0:
        gl.warp_specialize([
            (piece_consumer, (
                0, tensors, dq, memory, tile_map, heads_per_kv, padded_len, scale, scores, mods, HEAD_DIM,
            )),
            (piece_consumer, (
                1, tensors, dq, memory, tile_map, heads_per_kv, padded_len, scale, scores, mods, HEAD_DIM,
            )),
            (piece_producer, (tensors, memory, tile_map, heads_per_kv, PERSISTENT)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    elif TILE_K == WG_ROWS:
        gl.warp_specialize([
            (wide_consumer, (
                0, tensors, dq, memory, tile_map, heads_per_kv, padded_len, scale, scores, mods, HEAD_DIM,
            )),
            (wide_consumer, (
                1, tensors, dq, memory, tile_map, heads_per_kv, padded_len, scale, scores, mods, HEAD_DIM,
            )),
            (producer, (tensors, memory, tile_map, heads_per_kv, PERSISTENT)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer_of_keys, (0, tensors, memory, tile_map, heads_per_kv, scale, scores, mods, HEAD_DIM)),
            (consumer_of_keys, (1, tensors, memory, tile_map, heads_per_kv, scale, scores, mods, HEAD_DIM)),
            (producer, (tensors, memory, tile_map, heads_per_kv, PERSISTENT)),
            (dq_reducer, (
                dq, turns, memory, tile_map, heads_per_kv, padded_len, HEAD_DIM + K_TAIL, DETERMINISTIC,
            )),
        ], [4, 1, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
