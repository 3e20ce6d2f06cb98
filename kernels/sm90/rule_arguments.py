"""What a call's rules captured, as the kernels for Hopper take it."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from .. import rules
from ..bound_mods import BoundMods, View, axes_with_elements, tensors_read
from ..call import BLOCK, Aux, Call, Wanted
from ..layouts import ALIGNMENT, has_tma_strides
from ..mods import AXES, code_of

NOTHING_WANTED = Wanted()
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.bool)
"""Of tensors that come in tiles."""


def bound_mods(call: Call, wanted: Wanted = NOTHING_WANTED) -> BoundMods:
    """A call's rules, without the soft cap, which these kernels compute themselves."""
    return BoundMods.of(dataclasses.replace(call, options=call.options._replace(softcap=None)), wanted)


def entries_share_pairs(call: Call) -> bool:
    """Whether rules read the same element at a pair in several entries of a batch, which packed sequences are not."""
    if call.q.ndim < 4 or call.q.shape[0] == 1:
        return False
    return any({"row", "column"} <= axes and "batch" not in axes for axes in axes_with_elements(call))


class PairArgument(NamedTuple):
    """A tensor that rules read at each pair, such as a bias or a dense mask, of which TMA brings tiles.

    argument: its number among all that the mask, and then score changes, captured. is_of_mask: which of them captured
    it. position: among the tensors of these. axes: of `mods.AXES`.
    """

    argument: int
    is_of_mask: bool
    position: int
    axes: tuple[str, ...]

    def of(self, aux: Aux) -> Tensor | None:
        """The tensor (batch or 1, heads or 1, rows, columns); None where TMA cannot read from its address.

        Bools are bytes, and entries or heads of stride 0 are one.
        """
        return None if self.address(aux) is None else self._in_tiles(self.captured(aux))

    def address(self, aux: Aux) -> int | None:
        """Its address; None where TMA cannot read from it."""
        address = self.captured(aux).data_ptr()
        return None if address % ALIGNMENT else address

    def comes_in_tiles(self, aux: Aux) -> bool:
        """Whether TMA takes its dtype and strides."""
        x = self.captured(aux)
        if self.axes[-2:] != AXES[2:] or 1 in x.shape[-2:] or x.dtype not in DTYPES:
            return False
        return has_tma_strides(self._in_tiles(x))

    def captured(self, aux: Aux) -> Tensor:
        """The tensor as it is."""
        return (aux.mask_aux if self.is_of_mask else aux.score_aux)[self.position]

    def _in_tiles(self, x: Tensor) -> Tensor:
        x = x.view(torch.uint8) if x.dtype is torch.bool else x
        for place, axis in enumerate(AXES[:2]):
            x = x if axis in self.axes else x.unsqueeze(place)
            x = x if x.stride(place) else x.narrow(place, 0, 1)
        return x


def pair_itemsize(call: Call) -> int:
    """The bytes of an element of the `pair_tensor`; 0 without one."""
    pairs = pair_tensor(call)
    return 0 if pairs is None else pairs.captured(call.aux).element_size()


def loads_pairs(call: Call, *, by_tma: bool) -> bool:
    """Whether rules load a number for each pair from a tensor: any but the `pair_tensor`, if that comes ``by_tma``.

    A table of distances is none.
    """
    pairs = pair_tensor(call) if by_tma else None
    in_tiles = None if pairs is None else pairs.captured(call.aux)
    return any(x is not in_tiles and (not axes or {*AXES[2:]} <= {*axes}) for axes, x in tensors_read(call))


def pair_tensor(call: Call) -> PairArgument | None:
    """The first of score changes, or else of the mask, that comes in tiles; None without one. By metadata alone.

    None for packed sequences: what it has for pairs past a sequence's end may be anything.
    """
    if call.is_packed:
        return None
    mods, options = bound_mods(call), call.options
    before = len(mods.mask_args)
    for is_of_mask, leaves, arguments in (
        (False, options.scores, enumerate(mods.score_args, before)),
        (True, rules.leaves(options.mask), enumerate(mods.mask_args)),
    ):
        slots = [(code_of(name), slot) for name, captured in leaves for slot in range(len(captured))]
        for (argument, item), (code, slot) in zip(arguments, slots, strict=True):
            # TMA reads zeros for pairs that do not exist; of those a score change must make no NaN and no infinity.
            is_safe = is_of_mask or slot in code.affine or call.q_len % BLOCK == call.k_len % BLOCK == 0
            if is_safe and isinstance(item, View):
                found = PairArgument(argument, is_of_mask, item.position, code.axes.get(slot, ()))
                if found.comes_in_tiles(call.aux):
                    return found
    return None
