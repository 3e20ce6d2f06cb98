"""What a launch is passed of the tensors that rules captured."""

from __future__ import annotations

import itertools

import torch

from cs336_systems.attention.call import Arguments, make_call
from cs336_systems.attention.variants import bias
from cs336_systems.kernels.bound_mods import BoundMods, itself
from cs336_systems.kernels.call import Wanted


def types_in(fields):
    return [kind for field in fields for kind in types_in(field)] if isinstance(fields, tuple) else [type(fields)]


def test_which_axes_have_one_element_shows_in_the_types():
    """Triton 3.6 compiles a function once for arguments of the same types, whatever tuples these are in."""
    q = torch.empty(2, 3, 4, 8)
    seen = set()
    for sizes in itertools.product((1, 2), (1, 3), (1, 4), (1, 4)):
        call = make_call(q, q, q, Arguments.of(scores=bias(torch.empty(sizes))))
        seen.add(tuple(types_in(BoundMods.of(call, Wanted()).captured(call.aux, itself))))
    assert len(seen) == 16
