"""The forward's main loop: a consumer warp group's 64 rows of q over all tiles of k and v that they see."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .lib.mma import WG_ROWS, accumulator, as_matrix, pack_pairs, unpack_operand
from .lib.mods import MINUS_INFINITY, Pairs, opaque, selected
from .lib.softmax import first_update


@gluon.jit
def start_qk(tensors, memory, n, group, TILE_K: gl.constexpr):
    """Issue S = q kᵀ for the n-th tile of k."""
    q_tile = as_matrix(memory.q.buffers.index(group), WG_ROWS, tensors.HEAD_DIM)
    k_tile = as_matrix(memory.k.buffer(n), TILE_K, tensors.HEAD_DIM)
    zeros = gl.zeros([WG_ROWS, TILE_K], gl.float32, accumulator(TILE_K))
    s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if tensors.K_TAIL > 0:
        q_tile = as_matrix(memory.q_tail.index(group), WG_ROWS, tensors.K_TAIL)
        k_tile = as_matrix(memory.k_tail.index(memory.k.stage(n)), TILE_K, tensors.K_TAIL)
        s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def start_pv(p, out, out_tail, tensors, memory, n, TILE_K: gl.constexpr):
    """Issue out += P v for the n-th tile of v, and the same for its tail. Also returns the operand P, to keep alive."""
    v_tile = as_matrix(memory.v.buffer(n), TILE_K, tensors.HEAD_DIM)
    operand = unpack_operand(p, v_tile.dtype, accumulator(tensors.HEAD_DIM), TILE_K)
    out = warpgroup_mma(operand, v_tile, out, is_async=True)
    if tensors.V_TAIL > 0:
        v_tile = as_matrix(memory.v_tail.index(memory.v.stage(n)), TILE_K, tensors.V_TAIL)
        layout: gl.constexpr = gl.DotOperandLayout(0, accumulator(tensors.V_TAIL), 2)
        tail_operand = gl.convert_layout(operand, layout, assert_trivial=True)
        out_tail = warpgroup_mma(tail_operand, v_tile, out_tail, is_async=True)
    return out, out_tail, operand


@gluon.jit
def wait_pv(out, out_tail, operand, V_TAIL: gl.constexpr):
    """Wait for what `start_pv` issued."""
    if V_TAIL > 0:
        out, out_tail, _ = warpgroup_mma_wait(0, [out, out_tail, operand])
    else:
        out, _ = warpgroup_mma_wait(0, [out, operand])
    return out, out_tail


@gluon.jit
def visible(rows, first_column, seq, layout: gl.constexpr, OPAQUE: gl.constexpr = False):
    """Which pairs of the rows (64,) and a tile of columns exist and are not masked.

    Columns are compared in two parts: a thread's are few numbers below 8, and multiples of 8 known when compiled.
    OPAQUE: what is compared is unknown to LLVM; see `opaque`.
    """
    columns = gl.arange(0, seq.INNER_TILE, layout=gl.SliceLayout(0, layout))[None, :]
    seen = gl.full([WG_ROWS, seq.INNER_TILE], True, gl.int1, layout)
    if seq.RIGHT or not seq.INNER_DIVISIBLE:
        last = gl.full([WG_ROWS], 0, gl.int32, gl.SliceLayout(1, layout)) + (seq.inner_len - 1)
        if seq.RIGHT:
            last = gl.minimum(rows + seq.right, last)
        last = (last - first_column)[:, None] - columns % 8
        if OPAQUE:
            last = opaque(last)
        seen = last >= columns // 8 * 8
    if seq.LEFT:
        first = (rows + (seq.left - first_column))[:, None] - columns % 8
        if OPAQUE:
            first = opaque(first)
        seen = seen & (first <= columns // 8 * 8)
    return seen


@gluon.jit
def pairs_of(rows, first_column, seq, tile, layout: gl.constexpr, LAST: gl.constexpr):
    """The pairs of the rows (64,) and a tile of columns, of which all exist unless it may be the LAST."""
    columns = first_column + gl.arange(0, seq.INNER_TILE, layout=gl.SliceLayout(0, layout))[None, :]
    if LAST and not seq.INNER_DIVISIBLE:
        columns = seq.nearest_inner(columns)
    return Pairs(seq.batch_of(tile), tile.head, seq.nearest_outer(rows)[:, None], columns)


@gluon.jit
def with_pairs(mods, memory, n, group, TILE_K: gl.constexpr):
    """The rules for the n-th tile of k: what they read of a `PairTensor` is in shared memory."""
    if memory.pairs.ARGUMENT is not None:
        tile = memory.pairs.load(memory.k.stage(n), group, WG_ROWS, TILE_K)
        mods = mods.reading(tile, memory.pairs.ARGUMENT)
    return mods


@gluon.jit
def left_by_mask(mods, pairs, rows, inner, seq, MASKED: gl.constexpr):
    """Which pairs of an inner tile of columns a rule and the limits leave, if MASKED and there is a rule.

    Called before the wait for S, so that what the rule reads of captured tensors arrives meanwhile.
    """
    seen = inner
    if MASKED and mods.MASK is not None:
        layout: gl.constexpr = accumulator(seq.INNER_TILE)
        seen = mods.restrict(visible(rows, inner * seq.INNER_TILE, seq, layout, True), pairs)
    return seen


@gluon.jit
def changed_scores(s, seen, scores, mods, pairs, rows, inner, seq, MASKED: gl.constexpr):
    """The scores of a product S with an inner tile of columns; -inf where MASKED and hidden.

    seen: from `left_by_mask`.
    """
    s = mods.change(scores.softcap(s), pairs)
    if MASKED:
        if mods.MASK is None:
            layout: gl.constexpr = accumulator(seq.INNER_TILE)
            s = gl.where(visible(rows, inner * seq.INNER_TILE, seq, layout), s, float("-inf"))
        else:
            s = selected(s, seen, MINUS_INFINITY)
    return s


@gluon.jit
def draw(dropout, inner, seq, tile, group):
    """The bits for `Dropout.drop` of an inner tile of columns."""
    TILE_K: gl.constexpr = seq.INNER_TILE
    return dropout.draw(
        tile.start + group * WG_ROWS, inner * TILE_K, seq.batch_of(tile), tile.head, TILE_K, False
    )  # fmt: skip


@gluon.jit
def step(
    softmax, p, out, out_tail, tensors, memory, seq, tile, rows, n, position, scores, mods, group,
    RESCALE: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Issue S of the n-th tile, then out += P v of the tile before; compute the new P while the latter runs.

    The tile of k has arrived; another follows unless ``position`` is the tile's first. RESCALE: see `OnlineSoftmax`.
    group: the number of the warp group, a tensor, so that Triton compiles one function for several of them.
    """
    TILE_K: gl.constexpr = seq.INNER_TILE
    PV_PRODUCTS: gl.constexpr = 1 if tensors.V_TAIL == 0 else 2
    inner = seq.visited(position, tile)
    pending = start_qk(tensors, memory, n, group, TILE_K)
    memory.v.wait_full(n - 1)
    out, out_tail, operand = start_pv(p, out, out_tail, tensors, memory, n - 1, TILE_K)
    bits = draw(mods.dropout, inner, seq, tile, group)
    rules = with_pairs(mods, memory, n, group, TILE_K)
    pairs = pairs_of(rows, inner * TILE_K, seq, tile, accumulator(TILE_K), MASKED)
    seen = left_by_mask(rules, pairs, rows, inner, seq, MASKED)
    s = warpgroup_mma_wait(PV_PRODUCTS, [pending])
    s = changed_scores(s, seen, scores, rules, pairs, rows, inner, seq, MASKED)
    if RESCALE:
        softmax, p, rescale = softmax.update_rescaling(s, scores.scale)
    else:
        softmax, p = softmax.update(s, scores.scale)
    # Also a basic-block boundary: without one, ptxas moves the wait for out above the exponentials.
    memory.k.wait_full(n + 1, position > tile.begin)
    out, out_tail = wait_pv(out, out_tail, operand, tensors.V_TAIL)
    memory.k.release(n)
    if RESCALE:
        out = out * gl.convert_layout(rescale, gl.SliceLayout(1, out.type.layout))[:, None]
        if tensors.V_TAIL > 0:
            out_tail = out_tail * gl.convert_layout(rescale, gl.SliceLayout(1, out_tail.type.layout))[:, None]
    p = mods.dropout.drop_packed(pack_pairs(p, memory.k.buffers.dtype), bits, False)
    return softmax, p, out, out_tail


@gluon.jit
def first_step(tensors, memory, seq, tile, rows, n, scores, mods, group):
    """The softmax and P of a tile's first inner tile, the last along k, and zeros for the output and its tail."""
    TILE_K: gl.constexpr = seq.INNER_TILE
    memory.k.wait_full(n)
    s = start_qk(tensors, memory, n, group, TILE_K)
    inner = seq.visited(tile.end - 1, tile)
    bits = draw(mods.dropout, inner, seq, tile, group)
    rules = with_pairs(mods, memory, n, group, TILE_K)
    ANY_MASK: gl.constexpr = seq.RIGHT or mods.MASK is not None or mods.SCORE is not None
    pairs = pairs_of(rows, inner * TILE_K, seq, tile, accumulator(TILE_K), True)
    seen = left_by_mask(rules, pairs, rows, inner, seq, ANY_MASK)
    s = warpgroup_mma_wait(0, [s])
    if memory.pairs.ARGUMENT is not None:
        # TMA loads the next tile into this buffer, from which warps may still be loading.
        fence_async_shared()
    memory.k.release(n)
    s = changed_scores(s, seen, scores, rules, pairs, rows, inner, seq, ANY_MASK)
    if not ANY_MASK:  # noqa: SIM102 - known when compiled
        if (tile.whole_begin > inner) | seq.ends_partially(tile):
            s = gl.where(visible(rows, inner * TILE_K, seq, accumulator(TILE_K)), s, float("-inf"))
    softmax, p = first_update(s, scores.scale)
    p = mods.dropout.drop_packed(pack_pairs(p, memory.k.buffers.dtype), bits, False)
    out = gl.zeros([WG_ROWS, tensors.HEAD_DIM], gl.float32, accumulator(tensors.HEAD_DIM))
    out_tail = n * 0
    if tensors.V_TAIL > 0:
        out_tail = gl.zeros([WG_ROWS, tensors.V_TAIL], gl.float32, accumulator(tensors.V_TAIL))
    return softmax, p, out, out_tail


@gluon.jit
def steps(
    softmax, p, out, out_tail, tensors, memory, seq, tile, rows, n, begin, end, scores, mods, group,
    RESCALE: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Steps from position ``end`` - 1 down to ``begin``, after that of the n-th tile; also returns the last n."""
    for position in range(end - 1, begin - 1, -1):
        n += 1
        softmax, p, out, out_tail = step(
            softmax, p, out, out_tail, tensors, memory, seq, tile, rows, n, position, scores, mods, group,
            RESCALE, MASKED,
        )  # fmt: skip
    return softmax, p, out, out_tail, n


@gluon.jit
def mainloop(tensors, memory, seq, tile, rows, n, recompute, scores, mods, group):
    """A tile's softmax, last P, unnormalized output, number of the last inner tile, and whether `update` was called.

    ``recompute``: rescale in every step, after an overflow. Tiles that a causal mask or a window cuts are rescaled;
    those that a mask may touch, which may be most, only if some row saw nothing in the first tile.
    """
    softmax, p, out, out_tail = first_step(tensors, memory, seq, tile, rows, n, scores, mods, group)
    memory.k.wait_full(n + 1, tile.begin < tile.end - 1)
    right = gl.maximum(gl.minimum(tile.whole_end, tile.end - 1), tile.begin)
    rescaled = right
    if recompute:
        right = tile.begin
        rescaled = tile.begin
    elif mods.MASK is not None:  # noqa: SIM102 - known when compiled
        if softmax.has_pivots():
            rescaled = tile.end - 1
    left = gl.maximum(gl.minimum(tile.whole_begin, right), tile.begin)
    softmax, p, out, out_tail, n = steps(
        softmax, p, out, out_tail, tensors, memory, seq, tile, rows, n, rescaled, tile.end - 1, scores, mods, group,
        True, True,
    )  # fmt: skip
    if mods.MASK is not None:
        softmax, p, out, out_tail, n = steps(
            softmax, p, out, out_tail, tensors, memory, seq, tile, rows, n, right, rescaled, scores, mods, group,
            False, True,
        )  # fmt: skip
    softmax, p, out, out_tail, n = steps(
        softmax, p, out, out_tail, tensors, memory, seq, tile, rows, n, left, right, scores, mods, group,
        False, False,
    )  # fmt: skip
    if seq.LEFT:
        softmax, p, out, out_tail, n = steps(
            softmax, p, out, out_tail, tensors, memory, seq, tile, rows, n, tile.begin, left, scores, mods, group,
            True, True,
        )  # fmt: skip
    return softmax, p, out, out_tail, n, rescaled > left
