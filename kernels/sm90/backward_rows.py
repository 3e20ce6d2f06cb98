"""Per-row work before and after the backward, bound by memory: lse2 and delta, and dQ in its dtype. Plain Triton."""

import triton
import triton.language as tl

from ..lib.softmax import LOG2_E, lowered
from ..lib.varlen import sequence_of, slot_of, span_of


@triton.jit
def rows_of_program(cu_seqlens, sequences, q_len, padded_len, ROWS: tl.constexpr, PADDING: tl.constexpr):
    """The number of a program's block of ROWS rows, its head, the rows in padded buffers and in tensors, which of them
    exist, and which are of a sequence.

    ``cu_seqlens`` says where packed sequences begin, each of which is padded, or is None.
    """
    tiles = padded_len // ROWS
    # The last rows first: the backward begins with the first heads and ends with the last, so that what one kernel
    # wrote last is still in the L2 cache when the next one begins.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch_head = block // tiles
    first = block % tiles * ROWS
    padded = first + tl.arange(0, ROWS)
    rows = padded
    exist = rows < q_len
    in_sequence = exist
    if cu_seqlens is not None:
        sequence = sequence_of(cu_seqlens, first // PADDING, sequences, PADDING)
        span = span_of(cu_seqlens, sequence, sequences, q_len)
        within = padded - slot_of(cu_seqlens, sequence, PADDING) * PADDING
        rows = span.first + within
        exist = within < span.length
        # Triton 3.9's interpreter takes no mask that a comparison of two numbers is a part of.
        in_sequence = within < tl.where(sequence < sequences, span.length, 0)
    return block, batch_head, padded, rows, exist, in_sequence


@triton.jit(do_not_specialize=["heads", "q_len", "sequences"])
def prepare_kernel(
    out, dout, lse, dlse, lse2, delta, dq, turns, cu_seqlens,
    out_strides, dout_strides, heads, q_len, padded_len, sequences,
    HEAD_DIM: tl.constexpr, PADDED_HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, PADDING: tl.constexpr,
    HAS_TURNS: tl.constexpr,
):  # fmt: skip
    """Grid: a program for each ROWS rows of (batch_heads of q, padded_len), a multiple of ROWS.

    Writes lse2, the `lowered` log-sum-exp in exponents of 2, +inf for rows that see nothing or do not exist, so that
    their P is 0; delta = rowsum(out * dout) - dlse; zeros to turns, and to dq (padded_len, PADDED_HEAD_DIM) unless
    HAS_TURNS: `dq_reducer` stores it first. Rows after the last packed sequence count as not existing.
    """
    block, batch_head, padded, rows, _, exist = rows_of_program(cu_seqlens, sequences, q_len, padded_len, ROWS, PADDING)
    columns = tl.arange(0, triton.next_power_of_2(PADDED_HEAD_DIM))[None, :]
    batch = tl.cast(batch_head // heads, tl.int64)
    head = tl.cast(batch_head % heads, tl.int64)
    wide_rows = tl.cast(rows, tl.int64)[:, None]
    inside = exist[:, None] & (columns < HEAD_DIM)
    out += batch * out_strides[0] + head * out_strides[1]
    dout += batch * dout_strides[0] + head * dout_strides[1]
    o = tl.load(out + wide_rows * out_strides[2] + columns, mask=inside, other=0.0).to(tl.float32)
    do = tl.load(dout + wide_rows * dout_strides[2] + columns, mask=inside, other=0.0).to(tl.float32)
    source = tl.cast(batch_head, tl.int64) * q_len + rows
    row_lse = tl.load(lse + source, mask=exist, other=float("-inf"))
    total = tl.sum(o * do, 1)
    if dlse is not None:
        total -= tl.load(dlse + source, mask=exist, other=0.0)
    target = tl.cast(batch_head, tl.int64) * padded_len + padded
    # A score of +inf makes P NaN.
    exponent = tl.where(row_lse == float("inf"), float("nan"), lowered(row_lse) * LOG2_E)
    tl.store(lse2 + target, tl.where(row_lse == float("-inf"), float("inf"), exponent))
    tl.store(delta + target, total)
    if not HAS_TURNS:
        zeros = tl.zeros([ROWS, triton.next_power_of_2(PADDED_HEAD_DIM)], tl.float32)
        tl.store(dq + target[:, None] * PADDED_HEAD_DIM + columns, zeros, mask=columns < PADDED_HEAD_DIM)
    tl.store(turns + block, 0)


@triton.jit(do_not_specialize=["heads", "q_len", "sequences"])
def finish_kernel(
    sums, turns, dq, cu_seqlens, dq_strides, heads, q_len, padded_len, sequences, scale,
    HEAD_DIM: tl.constexpr, PADDED_HEAD_DIM: tl.constexpr, DQ_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, PADDING: tl.constexpr, DQ_TILE: tl.constexpr, HAS_TURNS: tl.constexpr,
):  # fmt: skip
    """Grid as above. Scales the float32 sums (batch_heads, padded_len, PADDED_HEAD_DIM) and writes dq.

    The sums of every 64 rows lie in tiles of DQ_COLUMNS columns, each in the order of accumulator fragments.
    With HAS_TURNS those of DQ_TILE rows are there if their first turn is not 0; else no tile of keys visited them.
    """
    tl.static_assert(ROWS == 64)
    block, batch_head, _, rows, exist, _ = rows_of_program(cu_seqlens, sequences, q_len, padded_len, ROWS, PADDING)
    sums += tl.cast(block, tl.int64) * ROWS * PADDED_HEAD_DIM
    dq += tl.cast(batch_head // heads, tl.int64) * dq_strides[0] + tl.cast(batch_head % heads, tl.int64) * dq_strides[1]
    targets = dq + tl.cast(rows, tl.int64)[:, None] * dq_strides[2]
    for tile in tl.static_range(PADDED_HEAD_DIM // DQ_COLUMNS):
        values = tl.load(sums + tile * ROWS * DQ_COLUMNS + tl.arange(0, ROWS * DQ_COLUMNS))
        if HAS_TURNS:
            values = tl.where(tl.load(turns + block // (DQ_TILE // ROWS) * (DQ_TILE // ROWS)) > 0, values, 0.0)
        # Eight columns, sixteen rows, a row of eight, two columns, eight rows below, a column.
        values = tl.permute(tl.reshape(values, [DQ_COLUMNS // 8, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
        columns = tile * DQ_COLUMNS + tl.arange(0, DQ_COLUMNS)[None, :]
        inside = exist[:, None] & (columns < HEAD_DIM)
        values = tl.reshape(values, [ROWS, DQ_COLUMNS]) * scale
        tl.store(targets + columns, values.to(dq.dtype.element_ty), mask=inside)
