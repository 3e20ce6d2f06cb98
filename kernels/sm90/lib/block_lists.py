"""Lists of the blocks of pairs that a mask leaves anything of; see `cs336_systems.attention.blocks`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...call import BLOCK
from .struct import struct

BLOCK_SIZE = gl.constexpr(BLOCK)


@struct
class BlockLists:
    """A list for each block of outer rows: how many inner blocks are partly and how many wholly visible, their numbers.

    lists: int32, with strides by batch entry, head and block, the last of which is a list's length: its last element
    is for `longest`. Nothing of this is used unless LISTED.
    """

    lists: gl.tensor
    batch_stride: gl.tensor
    head_stride: gl.tensor
    block_stride: gl.tensor
    LISTED: gl.constexpr

    @gluon.jit
    def entry(self, batch, head, start):
        """Where the list of the block of an outer row begins."""
        entry = self.lists
        if self.LISTED:
            entry += batch.to(gl.int64) * self.batch_stride + head.to(gl.int64) * self.head_stride
            entry += start // BLOCK_SIZE * self.block_stride
        return entry

    @gluon.jit
    def longest(self, batch, head, place):
        """The block of outer rows whose list is the ``place``-th longest of a head's."""
        last_element = (place + 1) * self.block_stride - 1
        return gl.load(self.entry(batch, head, 0) + last_element)

    @gluon.jit
    def count(self, entry, INNER_TILE: gl.constexpr):
        """The inner tiles of wholly visible blocks, and those of all visible ones, at least one."""
        STEPS: gl.constexpr = BLOCK_SIZE // INNER_TILE
        whole = gl.load(entry + 1) * STEPS
        return whole, gl.maximum(gl.load(entry) * STEPS + whole, 1)

    @gluon.jit
    def hidden(self, entry, start, last, count, INNER_TILE: gl.constexpr):
        """1 if an outer tile, half of a block, does not see the second half of the first block listed; else 0.

        It is the first half of its block, and ``last`` is the last inner row that it sees.
        """
        begin = gl.load(entry + 2) * BLOCK_SIZE + INNER_TILE
        return ((start % BLOCK_SIZE == 0) & (begin > last) & (count > 1)).to(gl.int32)

    @gluon.jit
    def inner_tile(self, entry, position, start, INNER_TILE: gl.constexpr):
        """The ``position``-th of the listed inner tiles: of each block first the one that the outer row has in its own.

        So with a causal mask each row sees itself in the first one.
        """
        STEPS: gl.constexpr = BLOCK_SIZE // INNER_TILE
        own = start // INNER_TILE % STEPS
        return gl.load(entry + 2 + position // STEPS) * STEPS + (own + STEPS - position % STEPS) % STEPS


@gluon.jit
def new_block_lists(blocks, unused):
    """From a kernel's argument: (lists, strides by batch entry, head and block), or None; then ``unused`` stands in."""
    if blocks is None:
        lists = BlockLists(unused, unused, unused, unused, False)
    else:
        lists = BlockLists(
            blocks[0], gl.to_tensor(blocks[1]), gl.to_tensor(blocks[2]), gl.to_tensor(blocks[3]), True
        )  # fmt: skip
    return lists
