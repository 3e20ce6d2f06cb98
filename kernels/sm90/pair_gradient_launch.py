"""Launches of `pair_gradient_kernel`."""

from __future__ import annotations

import triton
from torch import Tensor

from ..bound_mods import dropout_operand, itself
from ..call import Aux, Call, Wanted
from ..launching import Launch, Launcher
from ..triton.mod_gradients import empty_buffer, reduce_buffer
from .launches import band_arguments, pair_operand, score_scales, tma_descriptor, with_batch
from .lib.mma import WG_ROWS
from .lib.mods import in_gluon
from .pair_gradients import pair_gradient_kernel
from .row_launches import RowBuffers
from .rule_arguments import bound_mods, pair_itemsize, pair_tensor
from .tiles import padded_head_dim

ROWS = WG_ROWS.value
KEYS = 128
"""The keys of a tile; with float32 numbers for its pairs, and 128 columns, half of them, so that two CTAs fit."""


class PairGradients:
    """The gradients of what score changes captured with an element for each pair, for calls with this metadata."""

    def __init__(self, call: Call, buffers: RowBuffers, wanted: Wanted) -> None:
        self._options, self._buffers, self._wanted = call.options, buffers, wanted
        self._mods, self._pairs = bound_mods(call, wanted), pair_tensor(call)
        self._shape = (*with_batch(call.q)[0].shape[:3], call.k_len)
        self._launchers = {number: Launcher(pair_gradient_kernel) for number in self._mods.computed_by("pair")}

    @property
    def positions(self) -> frozenset[int]:
        """The numbers of the tensors."""
        return frozenset(self._mods.terms[number].position for number in self._launchers)

    def new_targets(self, aux: Aux) -> dict[int, Tensor]:
        """By the number of a term, an uninitialised gradient (batch or 1, heads or 1, q_len, k_len)."""
        lengths, terms = self._shape[2:], self._mods.terms
        return {number: empty_buffer(terms[number], self._shape, lengths, 0, aux) for number in self._launchers}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, memory: Tensor, aux: Aux) -> dict[int, Tensor]:
        """By the numbers of tensors, after the backward, whose buffers ``memory`` holds."""
        lse2, delta, *_ = self._buffers.addresses(memory.data_ptr())
        found = {}
        for number, target in self.new_targets(aux).items():
            term, launcher = self._mods.terms[number], self._launchers[number]
            operands = (
                *(q.data_ptr(), dout.data_ptr(), k.data_ptr(), v.data_ptr(), lse2, delta, target.data_ptr()),
                self._mods.captured(aux, Tensor.data_ptr),
                None if self._pairs is None else self._pairs.address(aux),
                dropout_operand(self._options, aux, Tensor.data_ptr),
            )
            launcher(operands, self._launch, q, k, v, dout, memory, aux, target, number)
            found[term.position] = reduce_buffer(term, target, self._shape, aux)
        return found

    def _launch(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, memory: Tensor, aux: Aux, target: Tensor, number: int
    ) -> Launch:
        call = Call(q, k, v, self._options, aux)
        return pair_gradient_launch(call, self._wanted, dout, target, number, self._buffers, memory)


def pair_gradient_launch(
    call: Call, wanted: Wanted, dout: Tensor, target: Tensor, number: int, buffers: RowBuffers, memory: Tensor
) -> Launch:
    """The launch for the term of a number, into its gradient (batch or 1, heads or 1, q_len, k_len)."""
    q, k, v, dout = with_batch(call.q, call.k, call.v, dout)
    batch, heads, q_len, k_len = *q.shape[:3], call.k_len
    mods, pairs = bound_mods(call, wanted), pair_tensor(call)
    left, right = call.band
    head_dim = padded_head_dim(call.head_dim)
    keys = KEYS // 2 if pair_itemsize(call) == 4 and head_dim == 128 else KEYS
    tiled = (q, ROWS), (dout, ROWS), (k, keys), (v, keys)
    lse2, delta, *_ = buffers.views(memory)
    tiles = triton.cdiv(q_len, ROWS) * triton.cdiv(k_len, keys)
    return Launch(
        (target.shape[:2].numel() * tiles, 1),
        (
            *(tma_descriptor(x, rows, head_dim, is_packed=False) for x, rows in tiled),
            *(lse2, delta, target, mods.captured(call.aux, itself), pair_operand(call, ROWS, keys)),
            dropout_operand(call.options, call.aux, itself),
        ),
        (
            *(heads, heads // k.shape[1], q_len, k_len, buffers.rows, *band_arguments(call.band)),
            *(batch // target.shape[0], heads // target.shape[1], *score_scales(call.options), 0),
        ),
        {
            "HEAD_DIM": head_dim, "TILE_K": keys, "LEFT": left is not None, "RIGHT": right is not None,
            "SOFTCAP": call.options.softcap is not None, **mods.code(backward=True, into=in_gluon),
            "PAIR_ARGUMENT": None if pairs is None else pairs.argument, "TERM": number,
        },
        {"num_warps": 4},
    )  # fmt: skip
