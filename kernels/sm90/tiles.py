"""Tiles on their way between shared memory, registers and products."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..versions import reinterpret

GROUP = gl.constexpr(64)
"""Rows of a warp group: what one of its product instructions computes."""


@gluon.jit
def as_matrix(tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """A tile (1, 1, ROWS, COLUMNS), which is how copies write it, as products read it."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], tile.dtype)
    return reinterpret(tile, tile.dtype, [ROWS, COLUMNS], layout)


@gluon.jit
def packed(values, dtype: gl.constexpr, STAYS: gl.constexpr = False):
    """Pairs of neighbours in a row, rounded to ``dtype``, as one 32-bit number each.

    What a loop carries from one turn to the next as 16-bit numbers takes two instructions more for each pair. STAYS:
    LLVM leaves it before the waits that follow, and so what computes the values.
    """
    even, odd = gl.split(gl.reshape(values, [values.shape[0], values.shape[1] // 2, 2]))
    name: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return gl.inline_asm_elementwise(
        "cvt.rn." + name + ".f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=not STAYS, pack=1
    )


@gluon.jit
def unpacked(pairs, dtype: gl.constexpr, layout: gl.constexpr, WIDTH: gl.constexpr):
    """The left operand of a product whose result has ``layout``, from `packed` numbers."""
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    values = gl.reshape(gl.join(even, odd), [pairs.shape[0], WIDTH]).to(dtype, bitcast=True)
    return gl.convert_layout(values, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


@gluon.constexpr_function
def additions(quads):
    """Instructions that add so many times four numbers of a thread to where its pointer points."""
    lines = []
    for quad in range(quads):
        numbers = ", ".join("$" + str(quads + 4 * quad + place) for place in range(4))
        lines.append(f"red.global.add.v4.f32 [${5 * quads} + {2048 * quad}], {{{numbers}}};")
    return " ".join(lines)


@gluon.constexpr_function
def operands_of_additions(quads):
    """The registers of results, which say nothing, of numbers and of pointers, which are all the same."""
    return ",".join(["=r"] * quads + ["r"] * (4 * quads) + ["l"] * (4 * quads))


@gluon.jit
def add(target, values):
    """Add a product's result (64, width), from registers, to as many numbers in global memory.

    There they lie in the order in which threads hold them: of every eight columns one group of four numbers of each
    thread, two in a row and two eight rows below. So an instruction of a warp adds to 512 bytes in a row.
    """
    QUADS: gl.constexpr = values.shape[1] // 8
    layout: gl.constexpr = values.type.layout
    rows = gl.arange(0, GROUP, layout=gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, values.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    thread = rows // 16 * 32 + rows % 8 * 4 + columns % 8 // 2
    gl.inline_asm_elementwise(
        additions(QUADS), operands_of_additions(QUADS), [values, (target + thread * 4).to(gl.int64)],
        dtype=gl.int8, is_pure=False, pack=4 * QUADS,
    )  # fmt: skip
