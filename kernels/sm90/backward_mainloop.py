"""The backward's loop over tiles of q and dout, for all kinds of consumers, which pass a step."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..versions import barrier


@gluon.constexpr_function
def masked_ends(left, right, masked, listed):
    """Whether some of the inner tiles before those that are visited without a mask are masked, and some after them.

    left, right: whether outer rows have these limits. masked: whether any pair may be hidden. listed: whether inner
    tiles are listed, the masked ones first.
    """
    after = bool(right and not masked and not listed)
    return bool(left) or not after, after


@gluon.jit
def unmasked(tile_map, tile, BEFORE: gl.constexpr, AFTER: gl.constexpr):
    """The range of inner tiles that are visited without a mask. BEFORE, AFTER: the `masked_ends`.

    It is empty where some of the outer rows do not exist: their scores are 0, not -inf. Inner rows that do not
    exist need no mask.
    """
    left = gl.minimum(gl.maximum(tile.whole_begin, tile.begin), tile.end)
    right = tile.end
    if AFTER:
        right = gl.minimum(gl.maximum(tile.whole_end, left), tile.end)
    if tile_map.MASKED:
        left = tile.end
    if tile.start + tile_map.OUTER_TILE > tile_map.outer_len:
        if BEFORE:
            left = tile.end
        else:
            left = tile.begin
        right = left
    return left, right


@gluon.jit
def mainloop(
    STEP: gl.constexpr, dk, dv, memory, tile, seq, keys, n, heads_per_kv, padded_len, dq, scores, mods,
    CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """dK and dV after a STEP for each tile of q and dout that sees the keys, of each query head, and the next n.

    dq: where the warp group adds to the first head's dQ, if it does that itself; else None.
    """
    COLUMNS: gl.constexpr = HEAD_DIM + memory.K_TAIL
    if dq is not None and seq.varlen.VARLEN:
        dq += seq.padded_inner_start().to(gl.int64) * COLUMNS
    ENDS: gl.constexpr = masked_ends(seq.LEFT, seq.RIGHT, seq.MASKED, seq.blocks.LISTED)
    BEFORE: gl.constexpr = ENDS[0]
    AFTER: gl.constexpr = ENDS[1]
    left, right = unmasked(seq, tile, BEFORE, AFTER)
    # Else Triton synchronizes the warp group before the first wait of every step.
    barrier()
    for member in range(seq.heads_to_visit(heads_per_kv)):
        head = tile.head * heads_per_kv + member
        visits = seq.for_member(tile, member, heads_per_kv)
        if seq.blocks.LISTED:
            left, right = unmasked(seq, visits, BEFORE, AFTER)
        # Each loop has the machine code of a step.
        if BEFORE:
            for inner in range(visits.begin, left):
                dk, dv = STEP(
                    dk, dv, memory, seq, visits, head, keys, n, inner, dq, scores, mods, True, CONSUMER, HEAD_DIM
                )  # fmt: skip
                n += 1
        if not seq.MASKED:
            for inner in range(left, right):
                dk, dv = STEP(
                    dk, dv, memory, seq, visits, head, keys, n, inner, dq, scores, mods, False, CONSUMER, HEAD_DIM
                )  # fmt: skip
                n += 1
        if AFTER:
            for inner in range(right, visits.end):
                dk, dv = STEP(
                    dk, dv, memory, seq, visits, head, keys, n, inner, dq, scores, mods, True, CONSUMER, HEAD_DIM
                )  # fmt: skip
                n += 1
        if dq is not None:
            dq += gl.to_tensor(padded_len).to(gl.int64) * COLUMNS
    return dk, dv, n
