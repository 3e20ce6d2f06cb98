"""What the backward needs for each row of q before it, and makes of dQ after it: plain Triton, bound by memory."""

import triton
import triton.language as tl

from ..triton.sequences import sequence_of, slot_of, span_of
from ..triton.softmax import LOG2_E, lowered


@triton.jit
def rows_of_program(starts, sequences, q_len, padded, ROWS: tl.constexpr, FILLED_UP: tl.constexpr):
    """The matrix of a program, its rows among those that are filled up, where in the matrix they are, and which exist.

    And which of these belong to a sequence. ``starts`` lists packed ones, each of which is filled up, or is None.
    """
    tiles = padded // ROWS
    matrix = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * ROWS
    filled_up = first + tl.arange(0, ROWS)
    rows = filled_up
    exist = rows < q_len
    belong = exist
    if starts is not None:
        sequence = sequence_of(starts, first // FILLED_UP, sequences, FILLED_UP)
        span = span_of(starts, sequence, sequences, q_len)
        within = filled_up - slot_of(starts, sequence, FILLED_UP) * FILLED_UP
        rows = span.first + within
        exist = within < span.length
        # Triton 3.9's interpreter takes no mask that a comparison of two numbers is a part of.
        belong = within < tl.where(sequence < sequences, span.length, 0)
    return matrix, filled_up, rows, exist, belong


@triton.jit(do_not_specialize=["q_len", "sequences"])
def prepare_kernel(
    out,
    dout,
    lse,
    dlse,
    exponents,
    delta,
    dq,
    added,
    starts,
    out_strides,
    dout_strides,
    heads,
    q_len,
    padded,
    sequences,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    FILLED_UP: tl.constexpr,
):
    """Grid: a program for each ROWS rows of each matrix of q; ``padded``, a multiple of ROWS, is how many a matrix has.

    Writes the `lowered` log-sum-exp in exponents of 2, +inf for rows that see nothing or do not exist, so that their
    weights are 0; delta, the sum of out * dout less the gradient of the log-sum-exp; zeros to the (padded, WIDTH) rows
    of dQ, and that nobody has added to them. Rows after the last of packed sequences count as ones that do not exist.
    """
    matrix, filled_up, rows, _, exist = rows_of_program(starts, sequences, q_len, padded, ROWS, FILLED_UP)
    columns = tl.arange(0, WIDTH)[None, :]
    batch = tl.cast(matrix // heads, tl.int64)
    head = tl.cast(matrix % heads, tl.int64)
    wide_rows = tl.cast(rows, tl.int64)[:, None]
    inside = exist[:, None] & (columns < HEAD_DIM)
    out += batch * out_strides[0] + head * out_strides[1]
    dout += batch * dout_strides[0] + head * dout_strides[1]
    o = tl.load(out + wide_rows * out_strides[2] + columns, mask=inside, other=0.0).to(tl.float32)
    do = tl.load(dout + wide_rows * dout_strides[2] + columns, mask=inside, other=0.0).to(tl.float32)
    own = tl.cast(matrix, tl.int64) * q_len + rows
    row_lse = tl.load(lse + own, mask=exist, other=float("-inf"))
    total = tl.sum(o * do, 1)
    if dlse is not None:
        total -= tl.load(dlse + own, mask=exist, other=0.0)
    target = tl.cast(matrix, tl.int64) * padded + filled_up
    # Rows that see nothing, or are none, have no weights, and those with a score of +inf have NaN.
    exponent = tl.where(row_lse == float("inf"), float("nan"), lowered(row_lse) * LOG2_E)
    tl.store(exponents + target, tl.where(row_lse == float("-inf"), float("inf"), exponent))
    tl.store(delta + target, total)
    tl.store(dq + target[:, None] * WIDTH + columns, tl.zeros([ROWS, WIDTH], tl.float32))
    tl.store(added + tl.program_id(0), 0)


@triton.jit(do_not_specialize=["q_len", "sequences"])
def finish_kernel(
    sums,
    dq,
    starts,
    dq_strides,
    heads,
    q_len,
    padded,
    sequences,
    scale,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    FILLED_UP: tl.constexpr,
):
    """Grid as above. Scales the sums (matrices, padded, WIDTH) in float32 and writes them in dQ's dtype and layout.

    The sums of every 64 rows lie in parts of PART columns, in the order in which `tiles.add` adds to them.
    """
    tl.static_assert(ROWS == 64)
    matrix, _, rows, exist, _ = rows_of_program(starts, sequences, q_len, padded, ROWS, FILLED_UP)
    sums += tl.cast(tl.program_id(0), tl.int64) * ROWS * WIDTH
    dq += tl.cast(matrix // heads, tl.int64) * dq_strides[0] + tl.cast(matrix % heads, tl.int64) * dq_strides[1]
    places = dq + tl.cast(rows, tl.int64)[:, None] * dq_strides[2]
    for part in tl.static_range(WIDTH // PART):
        values = tl.load(sums + part * ROWS * PART + tl.arange(0, ROWS * PART))
        # Eight columns, sixteen rows, a row of eight, two columns, eight rows below, a column.
        values = tl.permute(tl.reshape(values, [PART // 8, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
        columns = part * PART + tl.arange(0, PART)[None, :]
        inside = exist[:, None] & (columns < HEAD_DIM)
        values = tl.reshape(values, [ROWS, PART]) * scale
        tl.store(places + columns, values.to(dq.dtype.element_ty), mask=inside)
