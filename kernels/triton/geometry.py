"""What the kernels must know of a call besides its tensors: sizes, head groups, mask alignment, padded widths."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from .. import tuning


def arithmetic_of(tensor: Tensor) -> tuning.Arithmetic:
    """How products of this tensor's dtype are computed; for float32 torch's precision setting decides."""
    if tensor.dtype != torch.float32:
        return "half"
    return "float32" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def padded(width: int) -> int:
    """The width of a tile that holds a head dimension: a power of two, and at least what a tensor core takes."""
    return max(16, triton.next_power_of_2(width))


def in_pipeline(tensor: Tensor) -> bool:
    """Whether tiles of a 16-bit matrix are certain to be copied ahead: strides and mask leave pieces of 4 bytes."""
    *others, column = tensor.stride()
    pairs = not tensor.shape[-1] % 2 and not any(stride % 2 for stride in others)
    return pairs and column == 1 and tensor.data_ptr() % 16 == 0


def in_units(tensors: list[Tensor]) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """The strides of each tensor, those before the last in multiples of a unit of its own, and the units.

    `matrix` takes both. Triton finds out by itself that a stride is a multiple of 16: the unit is 1 where all are.
    """
    strides, units = [], []
    for tensor in tensors:
        *steps, column = tensor.stride()
        common = math.gcd(16, *steps)
        unit = 1 if common == 16 else min(common, 8)
        strides.append((*[step // unit for step in steps], column))
        units.append(unit)
    return strides, tuple(units)


@dataclass(frozen=True)
class Geometry:
    """Derived once for each new combination of shapes."""

    q_leading: tuple[int, ...]
    kv_leading: tuple[int, ...]
    q_len: int
    k_len: int
    head_dim: int
    v_head_dim: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> Geometry:
        """The geometry of q (*leading, q_len, d), k (*leading, k_len, d) and v (*leading, k_len, dv)."""
        return cls(tuple(q.shape[:-2]), tuple(k.shape[:-2]), q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1])

    @property
    def q_matrices(self) -> int:
        return math.prod(self.q_leading)

    @property
    def kv_matrices(self) -> int:
        return math.prod(self.kv_leading)

    @property
    def block(self) -> int:
        """The wider of the two padded head dimensions."""
        return padded(max(self.head_dim, self.v_head_dim))

    def slices(self, arithmetic: tuning.Arithmetic, *widths: int) -> int:
        """How many slices of columns it takes to write these widths."""
        return max(-(-width // tuning.columns_of_a_tile(self.block, arithmetic)) for width in widths)

    @property
    def sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The leading sizes of q and of k and v. The first is never read: 0 keeps kernels from specialising on it."""
        return (0, *self.q_leading[1:]), (0, *self.kv_leading[1:])

    @property
    def group(self) -> int:
        """How many heads of q share one of k and v."""
        return self.q_matrices // self.kv_matrices

    @property
    def heads(self) -> int:
        """Of q: its last leading axis, if there is another before it."""
        return self.q_leading[-1] if len(self.q_leading) > 1 else 1

    @property
    def widths(self) -> dict[str, int]:
        """Head dimensions, and the widths of the tiles that hold them."""
        return {
            "HEAD_DIM": self.head_dim,
            "V_HEAD_DIM": self.v_head_dim,
            "BLOCK_D": padded(self.head_dim),
            "BLOCK_DV": padded(self.v_head_dim),
        }

    def constants(self, config: tuning.TileConfig, arithmetic: tuning.Arithmetic) -> dict[str, Any]:
        """The compile-time arguments of an attention kernel that say how it is tiled."""
        columns = tuning.columns_of_a_tile(self.block, arithmetic)
        blocks = {"BLOCK_D": min(padded(self.head_dim), columns), "BLOCK_DV": min(padded(self.v_head_dim), columns)}
        return {**self.widths, **blocks, "TILE_Q": config.tile_q, "TILE_K": config.tile_k}
