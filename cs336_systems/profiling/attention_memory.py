"""What attention has to keep in memory, by the formulas: each tensor's bytes, and what so many quadratic ones hold.

Of batch B, H heads (1 where there is no head axis), length N, head dimension d and s bytes an element, attention as it
is written on paper makes scores and probabilities of B·H·N² elements each. How many tensors of that size an
implementation keeps from the forward pass for the backward decides how long a sequence can be: the scores, the masked
scores and the probabilities (3), two of these, the probabilities alone (1), or none, as FlashAttention does, which
keeps a log-sum-exp for each query in their place.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_QUADRATIC = 3
_LSE_BYTES = 4
"""A log-sum-exp is float32 whatever the inputs are."""


@dataclass(frozen=True)
class AttentionSizes:
    """The sizes of a call in which queries, keys and values have the same length, heads and head dimension.

    Attributes:
        batch, heads, length, head_dim: heads are 1 where there is no head axis.
        element_bytes: of q, k, v and everything made of them: 4 for float32, 2 for float16 and bfloat16.
    """

    batch: int
    heads: int
    length: int
    head_dim: int
    element_bytes: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")

    @property
    def rows(self) -> int:
        """Queries of all heads: B·H·N."""
        return self.batch * self.heads * self.length

    @property
    def output_bytes(self) -> int:
        """Of the output, and of each of q, k and v: B·H·N·d·s."""
        return self.rows * self.head_dim * self.element_bytes

    @property
    def quadratic_bytes(self) -> int:
        """Of one tensor of all pairs of queries and keys: B·H·N²·s."""
        return self.rows * self.length * self.element_bytes

    def held_bytes(self, quadratic: int) -> int:
        """What is held for the backward, without the inputs: the output, and so many quadratic tensors.

        With none there is the log-sum-exp besides. Raises ValueError for a negative number.
        """
        if quadratic < 0:
            raise ValueError(f"quadratic must be at least 0; got {quadratic}")
        return self.output_bytes + (quadratic * self.quadratic_bytes if quadratic else self.rows * _LSE_BYTES)

    def quadratic_kept(self, held_bytes: float) -> float:
        """How many quadratic tensors of this size a measured figure is, beyond the output."""
        return (held_bytes - self.output_bytes) / self.quadratic_bytes


@dataclass(frozen=True)
class Share:
    """A line of the account: what it is, its formula, and its bytes."""

    name: str
    formula: str
    bytes: int


def memory_account(sizes: AttentionSizes) -> list[Share]:
    """The tensors of attention as it is written on paper, then what is held if 3, 2, 1 and 0 quadratic ones are kept.

    B is the batch, H the heads, N the length, d the head dimension, s the bytes of an element.
    """
    tensors = [
        Share("inputs", "3·B·H·N·d·s", 3 * sizes.output_bytes),
        Share("scores", "B·H·N²·s", sizes.quadratic_bytes),
        Share("probabilities", "B·H·N²·s", sizes.quadratic_bytes),
        Share("output", "B·H·N·d·s", sizes.output_bytes),
    ]
    for kept in range(MOST_QUADRATIC, -1, -1):
        times = "" if kept == 1 else f"{kept}·"
        formula = f"B·H·N·d·s + {times}B·H·N²·s" if kept else f"B·H·N·d·s + {_LSE_BYTES}·B·H·N"
        tensors.append(Share(f"held with {kept}", formula, sizes.held_bytes(kept)))
    return tensors
