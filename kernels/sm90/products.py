"""The forward's products, of columns in one tile or two."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from .tiles import GROUP, as_matrix, unpacked


@gluon.jit
def scores_of(memory, number, layout: gl.constexpr, MEMBER: gl.constexpr, HEAD_DIM: gl.constexpr, TILE_K: gl.constexpr):
    """Begin the product of q with a tile of keys."""
    q_tile = as_matrix(memory.q.tiles.index(MEMBER), GROUP, HEAD_DIM)
    k_tile = as_matrix(memory.k.tile(number), TILE_K, HEAD_DIM)
    nothing = gl.zeros([GROUP, TILE_K], gl.float32, layout)
    scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
    if memory.KEY_MORE > 0:
        q_tile = as_matrix(memory.q_more.index(MEMBER), GROUP, memory.KEY_MORE)
        k_tile = as_matrix(memory.k_more.index(memory.k.stage(number)), TILE_K, memory.KEY_MORE)
        scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def add_values(weights, out, out_more, memory, number, HEAD_DIM: gl.constexpr, TILE_K: gl.constexpr):
    """Begin adding a tile of values to the output, and to its columns beyond; and the operand, which has to stay."""
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    v_tile = as_matrix(memory.v.tile(number), TILE_K, HEAD_DIM)
    operand = unpacked(weights, v_tile.dtype, out_layout, TILE_K)
    out = warpgroup_mma(operand, v_tile, out, is_async=True)
    if memory.VALUE_MORE > 0:
        more_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, memory.VALUE_MORE, 16])
        v_tile = as_matrix(memory.v_more.index(memory.v.stage(number)), TILE_K, memory.VALUE_MORE)
        operand_of_more = gl.convert_layout(operand, gl.DotOperandLayout(0, more_layout, 2), assert_trivial=True)
        out_more = warpgroup_mma(operand_of_more, v_tile, out_more, is_async=True)
    return out, out_more, operand


@gluon.jit
def finished(out, out_more, operand, VALUE_MORE: gl.constexpr):
    """Wait for what `add_values` began."""
    if VALUE_MORE > 0:
        out, out_more, _ = warpgroup_mma_wait(0, [out, out_more, operand])
    else:
        out, _ = warpgroup_mma_wait(0, [out, operand])
    return out, out_more
