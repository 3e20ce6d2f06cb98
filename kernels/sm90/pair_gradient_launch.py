"""Launches of `pair_gradient_kernel`."""

from __future__ import annotations

import functools
import math

import torch
import triton
from torch import Tensor

from ..bound_mods import Term, dropout_operand, itself
from ..call import Aux, Call, Wanted
from ..launching import Launch, Launcher, num_sms
from ..layouts import ALIGNMENT
from ..mods import AXES
from ..triton.mod_gradients import num_bands, reduce_buffer
from .launches import DTYPES, band_arguments, pair_operand, score_scales, tma_descriptor, with_batch
from .lib.mma import WG_ROWS
from .lib.mods import in_gluon
from .pair_gradients import pair_gradient_kernel
from .row_launches import RowBuffers
from .rule_arguments import bound_mods, loads_pairs, pair_itemsize, pair_tensor
from .tiles import padded_head_dim

ROWS = WG_ROWS.value
KEYS, WIDE_KEYS = 128, 64
"""The keys of a tile; WIDE_KEYS where what is read at its pairs, or the gradient, are float32 numbers."""

STAGES = {(64, KEYS): (2, 2), (64, WIDE_KEYS): (2, 2), (128, KEYS): (1, 1), (128, WIDE_KEYS): (2, 1)}
"""By head_dim and keys: of q and k, and of dout and v."""


class PairGradients:
    """The gradients of what score changes captured with an element for each pair or distance.

    For calls with this metadata.
    """

    def __init__(self, call: Call, buffers: RowBuffers, wanted: Wanted) -> None:
        self._options, self._buffers, self._wanted = call.options, buffers, wanted
        self._mods, self._pairs = bound_mods(call, wanted), pair_tensor(call)
        self._shape = (*with_batch(call.q)[0].shape[:3], call.k_len)
        numbers = self._mods.computed_by("pair", "distance")
        self._launchers = {number: Launcher(pair_gradient_kernel) for number in numbers}

    @property
    def positions(self) -> frozenset[int]:
        """The numbers of the tensors."""
        return frozenset(self._mods.terms[number].position for number in self._launchers)

    def new_targets(self, aux: Aux) -> dict[int, Tensor]:
        """By the number of a term, what the kernel writes: an uninitialised gradient, for TMA, or sums of distances.

        The gradient is (batch or 1, heads or 1, q_len, k_len). The sums, flat, are followed by what CTAs need.
        """
        return {number: self._new_target(self._mods.terms[number], aux) for number in self._launchers}

    def _new_target(self, term: Term, aux: Aux) -> Tensor:
        tensor = aux.score_aux[term.position]
        if term.computed_by == "distance":
            sums = math.prod(self._sums_shape(term))
            ctas = min(num_sms(tensor.device), sums // (4 * KEYS))
            return torch.empty(sums + ctas * 2 * ROWS * KEYS, dtype=torch.float32, device=tensor.device)
        *shape, columns = [size if axis in term.axes else 1 for axis, size in zip(AXES, self._shape, strict=True)]
        dtype = tensor.dtype if tensor.dtype in DTYPES else torch.float32
        row = triton.cdiv(columns * dtype.itemsize, ALIGNMENT) * ALIGNMENT // dtype.itemsize
        return torch.empty(*shape, row, dtype=dtype, device=tensor.device)[..., :columns]

    def _sums_shape(self, term: Term) -> tuple[int, ...]:
        """Of the kernel's two consumers: (2, batch or 1, heads or 1, bands, 2, keys)."""
        batch, heads, q_len, k_len = self._shape
        return 2, *matrices_of(term, batch, heads), num_bands(q_len, k_len, KEYS), 2, KEYS

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, memory: Tensor, workspace: Tensor, aux: Aux
    ) -> dict[int, Tensor]:
        """By the numbers of tensors, after the backward, whose buffers ``memory`` holds."""
        lse2, delta, *_ = self._buffers.addresses(memory.data_ptr())
        found = {}
        for number, target in self.new_targets(aux).items():
            term, launcher = self._mods.terms[number], self._launchers[number]
            operands = (
                *(q.data_ptr(), dout.data_ptr(), k.data_ptr(), v.data_ptr(), target.data_ptr(), lse2, delta),
                workspace.data_ptr(),
                self._mods.captured(aux, Tensor.data_ptr),
                None if self._pairs is None else self._pairs.address(aux),
                dropout_operand(self._options, aux, Tensor.data_ptr),
            )
            launcher(operands, self._launch, q, k, v, dout, memory, workspace, aux, target, number)
            if term.computed_by == "distance":
                shape = self._sums_shape(term)
                target = target[: math.prod(shape)].view(shape).sum(0)
            found[term.position] = reduce_buffer(term, target, self._shape, aux)
        return found

    def _launch(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, memory: Tensor, workspace: Tensor, aux: Aux,
        target: Tensor, number: int,
    ) -> Launch:  # fmt: skip
        call = Call(q, k, v, self._options, aux)
        described = call, self._wanted, dout, target, number, self._buffers, memory, workspace, num_sms(q.device)
        return pair_gradient_launch(*described)


def matrices_of(term: Term, batch: int, heads: int) -> tuple[int, int]:
    """The batch entries and heads that a tensor has elements for, 1 if they share them."""
    return batch if "batch" in term.axes else 1, heads if "head" in term.axes else 1


def pair_gradient_launch(
    call: Call, wanted: Wanted, dout: Tensor, target: Tensor, number: int, buffers: RowBuffers, memory: Tensor,
    workspace: Tensor, num_sms: int,
) -> Launch:  # fmt: skip
    """The launch for the term of a number, into its target (`PairGradients.new_targets`)."""
    q, k, v, dout = with_batch(call.q, call.k, call.v, dout)
    batch, heads, q_len, k_len = *q.shape[:3], call.k_len
    mods, pairs = bound_mods(call, wanted), pair_tensor(call)
    left, right = call.band
    head_dim = padded_head_dim(call.head_dim)
    of_distances = mods.terms[number].computed_by == "distance"
    # Of distances there is no tile of the gradient in shared memory, and tiles have to be square.
    is_wide = not of_distances and 4 in (pair_itemsize(call), target.element_size())
    keys = WIDE_KEYS if is_wide else KEYS
    # Without any tile of pairs, stages are as many as where a tile has fewer keys.
    qk_stages, stages = STAGES[head_dim, WIDE_KEYS if is_wide or (of_distances and pairs is None) else KEYS]
    tiled = (q, ROWS), (dout, ROWS), (k, keys), (v, keys)
    lse2, delta, *_ = buffers.views(memory)
    of_batch, of_heads = matrices_of(mods.terms[number], batch, heads)
    shared = batch // of_batch, heads // of_heads
    operand = pair_operand(call, ROWS, keys)
    of_pairs = shared if operand is None else operand.shape[:2]
    same_pairs = not of_distances and all(1 in sizes for sizes in zip(shared, of_pairs, strict=True))
    # Where tensors have an element for each pair, rules clamp: see `launches.is_divisible`.
    divisible = of_distances and k_len % keys == 0 and not loads_pairs(call, by_tma=True)
    into = functools.partial(in_gluon, whole_tiles=divisible)
    tiles = triton.cdiv(q_len, 2 * ROWS) * triton.cdiv(k_len, keys)
    tiles = of_batch * of_heads * (num_bands(q_len, k_len, keys) if of_distances else tiles)
    return Launch(
        (min(num_sms, tiles), 1),
        (
            *(tma_descriptor(x, rows, head_dim, is_packed=False) for x, rows in tiled),
            target if of_distances else tma_descriptor(target, ROWS, keys, is_packed=False),
            *(lse2, delta, workspace, mods.captured(call.aux, itself), operand),
            dropout_operand(call.options, call.aux, itself),
        ),
        (
            *(of_batch * of_heads, heads, heads // k.shape[1], q_len, k_len, buffers.rows, *band_arguments(call.band)),
            *(*shared, *score_scales(call.options), 0),
        ),
        {
            "HEAD_DIM": head_dim, "TILE_K": keys, "QK_STAGES": qk_stages, "STAGES": stages,
            "LEFT": left is not None, "RIGHT": right is not None,
            "SOFTCAP": call.options.softcap is not None, **mods.code(backward=True, into=into),
            "PAIR_ARGUMENT": None if pairs is None else pairs.argument,
            "SAME_PAIRS": same_pairs, "TERM": number, "DISTANCES": of_distances, "INNER_DIVISIBLE": divisible,
            "PRODUCER_REGISTERS": 24, "CONSUMER_REGISTERS": 240,
        },
        {"num_warps": 4, "maxnreg": 168},
    )  # fmt: skip
