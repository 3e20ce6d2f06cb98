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
    """The gradients of what score changes captured, for calls with this metadata."""

    def __init__(self, call: Call, buffers: RowBuffers, wanted: Wanted) -> None:
        self._options, self._buffers, self._wanted = call.options, buffers, wanted
        self._mods, self._pairs = bound_mods(call, wanted), pair_tensor(call)
        self._shape = (*with_batch(call.q)[0].shape[:3], call.k_len)
        self._launchers = [Launcher(pair_gradient_kernel) for _ in self._mods.terms]

    def new_targets(self, aux: Aux) -> list[Tensor]:
        """What the kernel writes for each term: an uninitialised gradient, for TMA, or sums.

        The gradient is (batch or 1, heads or 1, q_len, k_len). The sums, flat, are followed by what CTAs need.
        """
        return [self._new_target(term, aux) for term in self._mods.terms]

    def _new_target(self, term: Term, aux: Aux) -> Tensor:
        tensor = aux.score_aux[term.position]
        if term.computed_by != "pair":
            sums = math.prod(self._sums_shape(term))
            scratch = 2 * ROWS * KEYS * num_sms(tensor.device) if term.computed_by == "distance" else 0
            return torch.empty(sums + scratch, dtype=torch.float32, device=tensor.device)
        *shape, columns = [size if axis in term.axes else 1 for axis, size in zip(AXES, self._shape, strict=True)]
        dtype = tensor.dtype if tensor.dtype in DTYPES else torch.float32
        row = triton.cdiv(columns * dtype.itemsize, ALIGNMENT) * ALIGNMENT // dtype.itemsize
        return torch.empty(*shape, row, dtype=dtype, device=tensor.device)[..., :columns]

    def _sums_shape(self, term: Term) -> tuple[int, ...]:
        """Those of `triton.mod_gradients.empty_buffer`, from each of the kernel's consumers that writes them."""
        batch, heads, q_len, k_len = self._shape
        matrices = matrices_of(term, batch, heads)
        if term.computed_by == "row":
            return 1, *matrices, q_len
        return 2, *matrices, *((k_len,) if term.computed_by == "column" else (num_bands(q_len, k_len, KEYS), 2, KEYS))

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, memory: Tensor, workspace: Tensor, aux: Aux
    ) -> tuple[Tensor | None, ...]:
        """The gradients, None for tensors without a term, after the backward, whose buffers ``memory`` holds."""
        lse2, delta, *_ = self._buffers.addresses(memory.data_ptr())
        found: list[Tensor | None] = [None] * len(aux.score_aux)
        terms = zip(self._mods.terms, self._launchers, self.new_targets(aux), strict=True)
        for number, (term, launcher, target) in enumerate(terms):
            operands = (
                *(q.data_ptr(), dout.data_ptr(), k.data_ptr(), v.data_ptr(), target.data_ptr(), lse2, delta),
                workspace.data_ptr(),
                self._mods.captured(aux, Tensor.data_ptr),
                None if self._pairs is None else self._pairs.address(aux),
                dropout_operand(self._options, aux, Tensor.data_ptr),
            )
            launcher(operands, self._launch, q, k, v, dout, memory, workspace, aux, target, number)
            if term.computed_by != "pair":
                shape = self._sums_shape(term)
                sums = target[: math.prod(shape)].view(shape)
                target = sums[0] if term.computed_by == "row" else sums.sum(0)
            found[term.position] = reduce_buffer(term, target, self._shape, aux)
        return tuple(found)

    def _launch(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, memory: Tensor, workspace: Tensor, aux: Aux,
        target: Tensor, number: int,
    ) -> Launch:  # fmt: skip
        call = Call(q, k, v, self._options, aux)
        described = call, self._wanted, dout, target, number, self._buffers, memory, workspace, num_sms(q.device)
        return pair_gradient_launch(*described)


def matrices_of(term: Term, batch: int, heads: int) -> tuple[int, int]:
    """The batch entries and heads whose tiles are not added up by the kernel."""
    if term.computed_by in ("row", "column"):
        return batch, heads
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
    term = mods.terms[number]
    walk = None if term.computed_by == "pair" else term.computed_by
    # Where CTAs walk there is no tile of the gradient in shared memory, and tiles have to be square.
    is_wide = walk is None and 4 in (pair_itemsize(call), target.element_size())
    keys = WIDE_KEYS if is_wide else KEYS
    # Without any tile of pairs, stages are as many as where a tile has fewer keys.
    qk_stages, stages = STAGES[head_dim, WIDE_KEYS if is_wide or (walk and pairs is None) else KEYS]
    tiled = (q, ROWS), (dout, ROWS), (k, keys), (v, keys)
    lse2, delta, *_ = buffers.views(memory)
    of_batch, of_heads = matrices_of(term, batch, heads)
    shared = batch // of_batch, heads // of_heads
    operand = pair_operand(call, ROWS, keys)
    of_pairs = shared if operand is None else operand.shape[:2]
    same_pairs = walk is None and all(1 in sizes for sizes in zip(shared, of_pairs, strict=True))
    # Where tensors have an element for each pair, rules clamp: see `launches.is_divisible`.
    divisible = walk is not None and k_len % keys == 0 and not loads_pairs(call, by_tma=True)
    into = functools.partial(in_gluon, whole_tiles=divisible)
    of_rows, of_keys = triton.cdiv(q_len, 2 * ROWS), triton.cdiv(k_len, keys)
    counts = {None: of_rows * of_keys, "row": of_rows, "column": of_keys, "distance": of_rows + of_keys - 1}
    return Launch(
        (min(num_sms, of_batch * of_heads * counts[walk]), 1),
        (
            *(tma_descriptor(x, rows, head_dim, is_packed=False) for x, rows in tiled),
            target if walk else tma_descriptor(target, ROWS, keys, is_packed=False),
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
            "SAME_PAIRS": same_pairs, "TERM": number, "WALK": walk, "INNER_DIVISIBLE": divisible,
            "PRODUCER_REGISTERS": 24, "CONSUMER_REGISTERS": 240,
        },
        {"num_warps": 4, "maxnreg": 168},
    )  # fmt: skip
