"""Tiles on their way between shared memory, registers and products."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

GROUP = gl.constexpr(64)
"""Rows of a warp group: what one of its product instructions computes."""


@gluon.jit
def as_matrix(tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """A tile (1, 1, ROWS, COLUMNS), which is how copies write it, as products read it."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], tile.dtype)
    return tile._reinterpret(tile.dtype, [ROWS, COLUMNS], layout)


@gluon.jit
def packed(values, dtype: gl.constexpr):
    """Pairs of neighbours in a row, rounded to ``dtype``, as one 32-bit number each.

    What a loop carries from one turn to the next as 16-bit numbers takes two instructions more for each pair.
    """
    even, odd = gl.split(gl.reshape(values, [values.shape[0], values.shape[1] // 2, 2]))
    name: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return gl.inline_asm_elementwise(
        "cvt.rn." + name + ".f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpacked(pairs, dtype: gl.constexpr, layout: gl.constexpr, WIDTH: gl.constexpr):
    """The left operand of a product whose result has ``layout``, from `packed` numbers."""
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    values = gl.reshape(gl.join(even, odd), [pairs.shape[0], WIDTH]).to(dtype, bitcast=True)
    return gl.convert_layout(values, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


@gluon.jit
def store_rows(target, stride, room, out, first_row, length):
    """Write 64 rows of a matrix of ``length`` rows through shared memory, where each thread finds 16 bytes in a row."""
    WIDTH: gl.constexpr = out.shape[1]
    THREADS: gl.constexpr = WIDTH // 8 if WIDTH < 256 else 32
    pieces: gl.constexpr = gl.BlockedLayout([1, 8], [32 // THREADS, THREADS], [4, 1], [1, 0])
    room.store(out)
    laid_out = room.load(pieces)
    rows = first_row + gl.arange(0, GROUP, layout=gl.SliceLayout(1, pieces))
    columns = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, pieces))
    places = target + rows.to(gl.int64)[:, None] * stride + columns[None, :]
    gl.store(places, laid_out, mask=(rows < length)[:, None])
