"""The gradient of a tensor that score changes read at each pair, such as a bias.

A CTA computes tiles of it, of 128 rows of q, one after another; two consumer warp groups have 64 of the rows each. For
each batch entry and head that share the tensor they compute S = q kᵀ and dP = dout vᵀ again, and add dS, times the
derivative by the element, to a sum in registers. A producer warp claims tiles and loads what the products read.

For what differs along rows, keys or distances (column - row) alone a CTA walks from tile to tile (`PairMap`), adds up
all of them in the same registers, and in the end their rows, columns or diagonals.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma_wait

from ..versions import async_store, barrier
from .backward_consumer import probabilities
from .forward_mainloop import pairs_of, visible
from .lib.block_lists import new_block_lists
from .lib.dropout import new_dropout
from .lib.mma import WG_ROWS, accumulator, as_matrix, opaque_zero
from .lib.mods import ZERO, Mods
from .lib.pair_tiles import new_pair_tensor
from .lib.scheduler import STOP
from .lib.softmax import ScoreScale
from .lib.tile_map import TileMap
from .lib.varlen import new_varlen
from .pair_gradient_producer import PairMap, Tensors, new_memory, producer

DYNAMIC = (
    *("matrices", "heads", "heads_per_kv", "q_len", "k_len", "padded_len", "left", "right"),
    *("shared_batches", "shared_heads", "unused"),
)
"""Arguments without specialization."""


@gluon.jit
def consumer(
    CONSUMER: gl.constexpr, tensors, memory, pair_map, padded_len, scores, mods,
    HEAD_DIM: gl.constexpr, TERM: gl.constexpr,
):  # fmt: skip
    """A consumer warp group: the sums of 64 rows of each tile."""
    seq = pair_map.seq
    TILE_K: gl.constexpr = seq.INNER_TILE
    layout: gl.constexpr = accumulator(TILE_K)
    n = 0
    turn = 0
    of_pairs = 0
    command, _, _, index = memory.scheduler.pop(turn, 4)
    while command != STOP:
        matrix, first_row, first_column = pair_map.place(index)
        first_batch, first_head, count = pair_map.entries(matrix, first_row, first_column)
        length = pair_map.length(first_row, first_column)
        first_row += CONSUMER * WG_ROWS
        rows = first_row + gl.arange(0, WG_ROWS, layout=gl.SliceLayout(1, layout))
        total = gl.zeros([WG_ROWS, TILE_K], gl.float32, layout)
        for number in range(count):
            batch, head = pair_map.entry(first_batch, first_head, number)
            is_first = (number == 0) | (not tensors.SAME_PAIRS)
            is_last = (number == count - 1) | (not tensors.SAME_PAIRS)
            for along in range(length):
                row, column = pair_map.step(first_row, first_column, along)
                total += term(
                    CONSUMER, tensors, memory, seq, padded_len, scores, mods, rows + (row - first_row), row, column,
                    batch, head, n, of_pairs, is_first, is_last, HEAD_DIM, TERM,
                )  # fmt: skip
                of_pairs += is_last.to(gl.int32)
                n += 1
        if pair_map.WALK == "row":
            of_matrix = tensors.sums + matrix.to(gl.int64) * seq.outer_len
            gl.store(of_matrix + rows, gl.sum(total, 1), mask=rows < seq.outer_len)
        elif pair_map.WALK == "column":
            columns = first_column + gl.arange(0, TILE_K, layout=gl.SliceLayout(0, layout))
            of_matrix = tensors.sums + (matrix + CONSUMER * pair_map.matrices).to(gl.int64) * seq.inner_len
            gl.store(of_matrix + columns, gl.sum(total, 0), mask=columns < seq.inner_len)
        elif pair_map.WALK == "distance":
            store_diagonals(CONSUMER, tensors, pair_map, matrix, first_row, first_column, total)
        else:
            tma.store_wait(0)
            buffer = memory.sums.index(CONSUMER)
            as_matrix(buffer, WG_ROWS, TILE_K).store(total.to(buffer.dtype))
            fence_async_shared()
            async_store(tensors.target, [first_batch, first_head, first_row, first_column], buffer)
        turn += 1
        command, _, _, index = memory.scheduler.pop(turn, 4)
    tma.store_wait(0)


@gluon.jit
def term(
    CONSUMER: gl.constexpr, tensors, memory, seq, padded_len, scores, mods, rows, first_row, first_column,
    batch, head, n, of_pairs, is_first, is_last, HEAD_DIM: gl.constexpr, TERM: gl.constexpr,
):  # fmt: skip
    """What a batch entry and head add to the sums of the rows: dS times the derivative by the element.

    is_first, is_last: whether the tile of pairs is a new one, and whether it is not needed any more.
    """
    TILE_K: gl.constexpr = seq.INNER_TILE
    layout: gl.constexpr = accumulator(TILE_K)
    # Else LLVM keeps which pairs exist from step to step, and there are no registers for that.
    rows += opaque_zero(n)
    s = memory.qk.start(n, CONSUMER, HEAD_DIM, TILE_K)
    places = (batch * seq.heads + head).to(gl.int64) * padded_len + rows
    lse2 = gl.load(tensors.lse2 + places)
    delta = gl.load(tensors.delta + places)
    bits = mods.dropout.draw(first_row, first_column, batch, head, TILE_K, False)
    s = scores.softcap(warpgroup_mma_wait(0, [s]))
    memory.qk.rows.release(n)
    rules = mods
    if tensors.pairs.ARGUMENT is not None:
        memory.pairs.wait_full(of_pairs, is_first)
        tile = as_matrix(memory.pairs.buffers.index(CONSUMER), WG_ROWS, TILE_K).load(layout)
        rules = mods.reading(tile, tensors.pairs.ARGUMENT)
        if is_last:
            # TMA loads the next tile into this buffer, from which warps may still be loading.
            fence_async_shared()
            memory.pairs.release(of_pairs)
    here = pairs_of(rows, first_column, seq, seq.tile(batch, head, first_row), layout, True)
    changed, terms = rules.terms(s, here)
    dp = memory.gradients.start(n, CONSUMER, HEAD_DIM, TILE_K)
    p = probabilities(changed * scores.scale - lse2[:, None])
    seen = visible(rows, first_column, seq, layout)
    # Before dP arrives, so that the derivatives need no registers then.
    p = rules.chained(gl.where(seen, rules.hide(p, here, ZERO), 0.0), terms[TERM])
    dp = mods.dropout.scale(mods.dropout.drop(warpgroup_mma_wait(0, [dp]), bits, False))
    memory.gradients.rows.release(n)
    return p * (dp - delta[:, None])


@gluon.jit
def store_diagonals(
    CONSUMER: gl.constexpr, tensors, pair_map, matrix, first_row, first_column, total,
):  # fmt: skip
    """Sum 64 rows of a band's tile along its diagonals, and store the sum for each column - row of the tile.

    Threads hold parts of rows. They exchange them through global memory, where no more than this CTA's L1 and the L2
    cache see them; there is no shared memory left.
    """
    COLUMNS: gl.constexpr = pair_map.seq.INNER_TILE
    layout: gl.constexpr = total.type.layout
    rows = gl.arange(0, WG_ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    of_rows, of_keys = pair_map.tiles()
    bands = of_rows + of_keys - 1
    numbers = gl.to_tensor(pair_map.matrices * bands).to(gl.int64) * (4 * COLUMNS)
    scratch = tensors.sums + numbers + (2 * gl.program_id(0) + CONSUMER) * (WG_ROWS * COLUMNS)
    # No thread reads what it holds any more.
    barrier()
    gl.store(scratch + rows[:, None] * COLUMNS + columns[None, :], total)
    barrier()
    of_threads: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    places = gl.arange(0, 2 * COLUMNS, layout=of_threads)
    sums = gl.zeros([2 * COLUMNS], gl.float32, of_threads)
    for row in range(WG_ROWS):
        column = places - COLUMNS + CONSUMER * WG_ROWS + row
        exists = (column >= 0) & (column < COLUMNS)
        sums += gl.load(scratch + row * COLUMNS + column, mask=exists, other=0.0)
    band = first_column // COLUMNS - first_row // COLUMNS + of_rows - 1
    matrix += CONSUMER * pair_map.matrices
    gl.store(tensors.sums + (matrix.to(gl.int64) * bands + band) * (2 * COLUMNS) + places, sums)


@gluon.jit(do_not_specialize=DYNAMIC)
def pair_gradient_kernel(
    q, dout, k, v, target, lse2, delta, workspace, captured, pairs, dropout,
    matrices, heads, heads_per_kv, q_len, k_len, padded_len, left, right, shared_batches, shared_heads,
    exponent_scale, softcap_scale, natural, unused,
    HEAD_DIM: gl.constexpr, TILE_K: gl.constexpr, QK_STAGES: gl.constexpr, STAGES: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
    MASK: gl.constexpr, SCORE: gl.constexpr, PAIR_ARGUMENT: gl.constexpr, SAME_PAIRS: gl.constexpr, TERM: gl.constexpr,
    WALK: gl.constexpr, INNER_DIVISIBLE: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid: as many CTAs as the GPU runs at once, or fewer.

    q to v are TMA descriptors of tiles of WG_ROWS rows and TILE_K keys, target is that of the gradient, ``matrices`` of
    (q_len, k_len); ``shared_batches`` batch entries and ``shared_heads`` heads, 1 or all, share each. lse2, delta and
    scales: as of `backward_kernel`; workspace: see `lib.scheduler`. TERM: which of the derivatives that SCORE computes;
    captured, natural, MASK, SCORE: see `Mods`; pairs, PAIR_ARGUMENT: see `lib.pair_tiles`; SAME_PAIRS: see `Tensors`.

    With a WALK (`PairMap`) target is a pointer to float32 numbers: (matrices, q_len) sums of rows; (2, matrices, k_len)
    sums of columns, which the two consumers write; or (2, matrices, bands, 2 * TILE_K) sums of diagonals, for each
    band, the lower left one first, and each column - row of a tile, from -TILE_K on. Behind these are 128 * TILE_K
    numbers for each CTA, see `store_diagonals`.
    """
    varlen = new_varlen(None, None, unused, unused, unused, False)
    seq = TileMap(
        unused, heads, q_len, k_len, left, right, unused, varlen, new_block_lists(None, unused),
        2 * WG_ROWS, TILE_K, LEFT, RIGHT, False, False, INNER_DIVISIBLE, False, False,
    )  # fmt: skip
    pair_map = PairMap(seq, matrices, heads_per_kv, shared_batches, shared_heads, WALK)
    scores = ScoreScale(exponent_scale, softcap_scale, SOFTCAP)
    mods = Mods(captured, natural, new_dropout(dropout, heads, 1, unused), MASK, SCORE)
    sums = lse2
    if WALK is not None:
        sums = target
        target = q
    tensors = Tensors(
        q, dout, k, v, target, sums, new_pair_tensor(pairs, PAIR_ARGUMENT, q), lse2, delta, workspace, SAME_PAIRS
    )  # fmt: skip
    memory = new_memory(tensors, QK_STAGES, STAGES, WALK)
    fence_async_shared()
    gl.warp_specialize([
        (consumer, (0, tensors, memory, pair_map, padded_len, scores, mods, HEAD_DIM, TERM)),
        (consumer, (1, tensors, memory, pair_map, padded_len, scores, mods, HEAD_DIM, TERM)),
        (producer, (tensors, memory, pair_map)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
