"""Tiles of a tensor with an element for each pair, such as a bias or a dense mask. They arrive with tiles of k or q."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from ...versions import async_load
from .mma import accumulator, as_matrix
from .pipeline import new_buffers
from .struct import struct


@struct
class PairTensor:
    """Its descriptor, of (batch or 1, heads or 1, rows, columns); and its number among what rules captured (`Mods`).

    Nothing of this is used if ARGUMENT is None.
    """

    desc: tma.tensor_descriptor
    ARGUMENT: gl.constexpr

    @gluon.jit
    def new_tiles(self, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, unused):
        """Shared memory for a tile of each stage and consumer; ``unused`` stands in where there are none."""
        buffers = unused
        if self.ARGUMENT is not None:
            buffers = new_buffers(self.desc, STAGES * CONSUMERS)
        return PairTiles(buffers, CONSUMERS, self.ARGUMENT)

    @gluon.jit
    def load(self, batch, head, row, column, full, tile):
        """Load the tile from a row and column on. Outside of the tensor it has zeros."""
        batch = gl.minimum(batch, self.desc.shape[0] - 1)
        head = gl.minimum(head, self.desc.shape[1] - 1)
        async_load(self.desc, [batch, head, row, column], full, tile)


@struct
class PairTiles:
    """Shared memory for tiles of a `PairTensor` with that ARGUMENT."""

    buffers: gl.shared_memory_descriptor
    CONSUMERS: gl.constexpr
    ARGUMENT: gl.constexpr

    @gluon.jit
    def buffer(self, stage, consumer):
        """The tile of a stage and a consumer."""
        return self.buffers.index(stage * self.CONSUMERS + consumer)

    @gluon.jit
    def load(self, stage, consumer, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
        """The same in the registers that a product of these rows and columns has; not 0 stands for True."""
        tile = as_matrix(self.buffer(stage, consumer), ROWS, COLUMNS).load(accumulator(COLUMNS))
        if tile.dtype == gl.uint8:
            # Neighbours in a row, which came together. LLVM would gather the bits of compared bytes in one integer.
            tile = gl.inline_asm_elementwise(
                "{.reg .b32 both; cvt.u32.u16 both, $2; and.b32 $0, both, 0xff; and.b32 $1, both, 0xff00;}",
                "=r,=r,h", [tile], dtype=gl.int32, is_pure=True, pack=2,
            )  # fmt: skip
        return tile


@gluon.constexpr_function
def pair_bytes(argument, dtype, rows, columns):
    """Bytes of a tile of a `PairTensor`; 0 without one."""
    return 0 if argument is None else rows * columns * dtype.primitive_bitwidth // 8


@gluon.jit
def new_pair_tensor(desc, ARGUMENT: gl.constexpr, unused):
    """From a kernel's argument, a descriptor or None; then ``unused`` stands in."""
    if desc is None:
        made = PairTensor(unused, None)
    else:
        made = PairTensor(desc, ARGUMENT)
    return made
