"""What a call's rules captured, as the kernels for Hopper take it."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from ..bound_mods import BoundMods, View, axes_with_elements
from ..call import BLOCK, Aux, Call, Wanted
from ..layouts import ALIGNMENT, has_tma_strides
from ..mods import AXES, Code, code_of

NOTHING_WANTED = Wanted()


def bound_mods(call: Call, wanted: Wanted = NOTHING_WANTED) -> BoundMods:
    """A call's rules, without the soft cap, which these kernels compute themselves."""
    return BoundMods.of(dataclasses.replace(call, options=call.options._replace(softcap=None)), wanted)


def entries_share_pairs(call: Call) -> bool:
    """Whether rules read the same element at a pair in several entries of a batch, which packed sequences are not."""
    if call.q.ndim < 4 or call.q.shape[0] == 1:
        return False
    return any({"row", "column"} <= axes and "batch" not in axes for axes in axes_with_elements(call))


class PairArgument(NamedTuple):
    """A tensor that score changes read at each pair, such as a bias, of which TMA brings tiles.

    argument: its number among all that score changes captured. position: among the tensors. axes: of `mods.AXES`.
    """

    argument: int
    position: int
    axes: tuple[str, ...]

    def of(self, aux: Aux) -> Tensor | None:
        """The tensor (batch or 1, heads or 1, rows, columns); None where TMA cannot read from its address."""
        if self.address(aux) is None:
            return None
        x = aux.score_aux[self.position]
        for place, axis in enumerate(AXES[:2]):
            x = x if axis in self.axes else x.unsqueeze(place)
        return x

    def address(self, aux: Aux) -> int | None:
        """Its address; None where TMA cannot read from it."""
        address = aux.score_aux[self.position].data_ptr()
        return None if address % ALIGNMENT else address


def pair_tensor(call: Call) -> PairArgument | None:
    """The first one with 16-bit numbers and strides that TMA takes; None without one. Decided by metadata alone."""
    if not call.options.scores:
        return None
    slots = [(code_of(name), slot) for name, captured in call.options.scores for slot in range(len(captured))]
    for argument, (item, (code, slot)) in enumerate(zip(bound_mods(call).score_args, slots, strict=True)):
        if isinstance(item, View) and _comes_in_tiles(call, code, slot, call.aux.score_aux[item.position]):
            return PairArgument(argument, item.position, code.axes[slot])
    return None


def _comes_in_tiles(call: Call, code: Code, slot: int, x: Tensor) -> bool:
    if code.axes.get(slot, ())[-2:] != AXES[2:] or 1 in x.shape[-2:]:
        return False
    # TMA reads zeros for pairs that do not exist; of those the score change must make no NaN and no infinity.
    is_safe = slot in code.affine or (call.q_len % BLOCK == 0 and call.k_len % BLOCK == 0)
    return is_safe and x.dtype in (torch.float16, torch.bfloat16) and has_tma_strides(x)
