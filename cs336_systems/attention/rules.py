"""Masks and score changes as calls take them: expressions of rules, and the tensors that the rules captured.

`mods` makes them of functions of a pair; `variants` has those that have a name.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import rules
from ..kernels.mods import code_of
from .blocks import Blocks, dense_mask, find_blocks
from .sizes import Sizes
from .tracing.tables import Table
from .validation import Window


@dataclass(frozen=True, eq=False)
class Mask:
    """Which pairs are visible: an expression of rules and the tensors that they captured.

    Combine masks with ``&``, ``|`` and ``~``; within torch.compile write ``mask.inverted()`` for ``~mask``.
    """

    expression: rules.Mask
    tensors: tuple[Tensor, ...]
    blocks: Blocks | None = None

    def with_blocks(
        self,
        q_len: int,
        k_len: int,
        *,
        batch: int | None = None,
        heads: int | None = None,
        causal: bool | str = False,
        window: Window | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        device: torch.device | str | None = None,
        cache: bool = False,
    ) -> Mask:
        """The same mask with lists of the blocks that it leaves anything of, which kernels then visit alone.

        They serve all calls of the same sizes, ``causal`` and ``window``, as those of all layers of a model, until what
        the mask captured changes. Finding them computes the rules for bounds of each block, and for all pairs of the
        blocks that these leave undecided: integers, their sums, comparisons and products with a number have bounds,
        floating-point numbers and other products do not. That takes no memory in proportion to the pairs, and waits for
        the device.

        Args:
            q_len, k_len: the lengths of the calls, at least 1; max_seqlen_q and max_seqlen_k for packed sequences.
            batch, heads: those of the calls, of q. If None, the sizes that what the mask captured has along the axes
                that it is read at by ``b`` and ``h``. Calls may have any number where the mask tells none apart.
            causal, window: those of the calls, as `attention` takes them.
            cu_seqlens_q, cu_seqlens_k: those of the calls of `attention_varlen`, whose values the lists are for; None
                for calls of `attention`.
            device: of the calls; that of what the mask captured, or torch's default, if None.
            cache: return lists found before for these arguments by a mask with equal rules, whose captured tensors had
                equal bytes, shapes, dtypes and devices. What the mask captured is copied to the CPU in each call, which
                waits for the device, and its SHA-256 taken, so changes in place are seen. The lists of the last 8 such
                calls stay in memory; `blocks.cache.clear` frees them.

        Raises:
            TypeError, ValueError: an argument is not what it has to be, or None where no captured tensor has it.
            RuntimeError: torch.compile or torch.export traces: the lists depend on values.
        """
        if torch.compiler.is_compiling():
            raise RuntimeError("lists of blocks cannot be found where torch.compile traces: make the mask before")
        asked = (q_len, k_len), (batch, heads), causal, window, (cu_seqlens_q, cu_seqlens_k), device, cache
        return dataclasses.replace(self, blocks=find_blocks(self.expression, self.tensors, *asked))

    def to_tensor(
        self, q_len: int, k_len: int, *, batch: int = 1, heads: int = 1, device: torch.device | str | None = None
    ) -> Tensor:
        """The mask as a bool tensor (batch, heads, q_len, k_len), True where a query sees a key: to look at.

        Args:
            device: that of what the mask captured, or torch's default, if None.

        Raises:
            TypeError, ValueError: an argument is no integer from 1 on, or what the mask captured does not fit.
        """
        return dense_mask(self.expression, self.tensors, (batch, heads, q_len, k_len), device)

    def __and__(self, other: Mask) -> Mask:
        return self._with("and", other)

    def __or__(self, other: Mask) -> Mask:
        return self._with("or", other)

    def __invert__(self) -> Mask:
        return self.inverted()

    def inverted(self) -> Mask:
        """``~mask`` under a name: torch.compile can trace a method, but no ``~`` of a class that is not torch's."""
        return Mask(("not", self.expression), self.tensors)

    def _with(self, operator: str, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        return Mask((operator, self.expression, other.expression), self.tensors + other.tensors)


@dataclass(frozen=True, eq=False)
class Scores:
    """What becomes of scores: rules, applied in order, and the tensors that they captured. Join them with ``+``."""

    expression: rules.Scores
    tensors: tuple[Tensor | Table, ...]

    def tensors_of(self, sizes: Sizes) -> tuple[Tensor, ...]:
        """What a call of these sizes captures, tables among it."""
        return tuple(x.of(sizes) if isinstance(x, Table) else x for x in self.tensors)

    def expression_of(self, sizes: Sizes) -> rules.Scores:
        """The rules of a call of these sizes, in which gathered distances have their origin."""
        found, rest = [], iter(self.tensors)
        for name, captured in self.expression:
            numbers, code = [*captured], code_of(name)
            for slot in (slot for slot, item in enumerate(captured) if item is None):
                table = next(rest)
                if isinstance(table, Table) and table.order is None and slot in code.origins:
                    numbers[code.origins[slot]] = sizes.q_len - 1
            found.append((name, tuple(numbers)))
        return tuple(found)

    def __add__(self, other: Scores) -> Scores:
        if not isinstance(other, Scores):
            return NotImplemented
        return Scores(self.expression + other.expression, self.tensors + other.tensors)
