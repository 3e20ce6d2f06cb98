"""Operands and results of wgmma: layouts, shared-memory views, 16-bit operands in registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...versions import reinterpret

WG_ROWS = gl.constexpr(64)
"""Rows of a product that one warp group computes: wgmma's M."""


@gluon.constexpr_function
def accumulator(columns):
    """The layout of a warp group's float32 product (64, columns)."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def as_matrix(buffer, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """A buffer (1, 1, ROWS, COLUMNS), as TMA writes it, as the matrix (ROWS, COLUMNS) that wgmma reads."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], buffer.dtype)
    return reinterpret(buffer, buffer.dtype, [ROWS, COLUMNS], layout)


@gluon.jit
def opaque_zero(n):
    """0, unknown to LLVM before this step: what it knows it hoists, and there are no registers for that."""
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r,r", [n], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pack_pairs(x, dtype: gl.constexpr, PINNED: gl.constexpr = False):
    """Neighbours in a row of float32 ``x``, rounded to ``dtype``, two in each int32.

    LLVM carries 16-bit values across a loop's edge one by one, and ptxas then takes two PRMT for each pair. PINNED:
    LLVM does not move it, nor what computes x, behind the waits that follow.
    """
    even, odd = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    name: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return gl.inline_asm_elementwise(
        "cvt.rn." + name + ".f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=not PINNED, pack=1
    )


@gluon.jit
def unpack_operand(pairs, dtype: gl.constexpr, layout: gl.constexpr, COLUMNS: gl.constexpr):
    """The A operand (64, COLUMNS), in registers, of a product of ``layout``, from `pack_pairs`."""
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    x = gl.reshape(gl.join(even, odd), [pairs.shape[0], COLUMNS]).to(dtype, bitcast=True)
    return gl.convert_layout(x, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)
