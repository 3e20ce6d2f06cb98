"""A bias that depends on the distance of query and key alone.

Shaw et al., "Self-attention with relative position representations" (2018), made relative positions part of the score;
Raffel et al., "T5" (2020), add a learned number for each head and bucket of distances.
"""

from torch import Tensor

from ..rules import Scores
from .arguments import integer, tensor
from .recorded import FLOATS, recorded_scores

_relative_bias = recorded_scores(
    lambda score, b, h, q_idx, kv_idx, table, origin: score + table[b, h, kv_idx - q_idx + origin], (FLOATS, 3), int
)


def relative_bias(table: Tensor, origin: int | None = None) -> Scores:
    """score + table[..., j - i + origin], for query i and key j; the table may need a gradient.

    A call reads q_len + k_len - 1 elements, those of the distances j - i from 1 - q_len to k_len - 1. The table may
    have further ones on both sides, whose gradient is 0: one table serves all lengths up to some limit.

    i and j count from 0 on in q and in k, whatever ``causal`` says, so with the origin in the middle the first query is
    at the place of the first key. Where the last query belongs to the last key, as with a cache of past keys, the
    places of both are k_len - q_len less apart than j - i: either take an origin so much smaller, or fill the table
    accordingly.

    Args:
        table: (batch or 1, heads or 1, length) or (heads or 1, length), floating-point numbers; length is at least
            q_len + k_len - 1, or 1 for one number for all distances.
        origin: the index of distance 0, from q_len - 1 to length - k_len. The middle, length // 2, if None: where
            q_len = k_len = n, the n - 1 of a table of length 2n - 1.

    Raises:
        TypeError: ``table`` is no tensor, or ``origin`` no integer.
        ValueError: ``table`` has other axes or a dtype that is not floating-point. A call raises it where the table is
            too short on either side of its origin, or is for other heads or batch entries.
    """
    if tensor("table", table).ndim not in (2, 3) or not table.is_floating_point():
        got = f"{tuple(table.shape)} {table.dtype}"
        raise ValueError(f"table must be ([batch,] heads, length) floating-point numbers; got {got}")
    middle = table.shape[-1] // 2
    return _relative_bias(
        table if table.ndim == 3 else table[None], middle if origin is None else integer("origin", origin)
    )
