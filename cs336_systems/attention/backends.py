"""What computes attention, and the ways that have neither kernels nor an autograd Function of this library."""

from __future__ import annotations

import torch

from ..kernels.call import Call
from . import naive, op, sdpa
from .plan import Run
from .validation import Implementation


class Backend:
    """One way to compute attention.

    Attributes:
        name: what `explain` calls it.
        implementation: the ``impl`` that asks for it.
    """

    name: str
    implementation: Implementation

    def passed_over(self, call: Call) -> str | None:
        """Why ``impl="auto"`` does not ask it for this call, or None if it does."""
        return None

    def supports(self, call: Call) -> str | None:
        """Why this backend cannot compute a call, or None if it can."""
        return None

    def plan(self, call: Call) -> Run:
        """What computes calls with the metadata of this one."""
        raise NotImplementedError


class SDPA(Backend):
    """torch's scaled_dot_product_attention."""

    name = "sdpa"
    implementation = Implementation.SDPA

    def supports(self, call: Call) -> str | None:
        return sdpa.supports(call)

    def plan(self, call: Call) -> Run:
        options = call.options
        return lambda q, k, v, aux: (sdpa.sdpa_by_sequence(q, k, v, options, aux), None)


class Compiled(Backend):
    """The naive formula through torch.compile; only on request, since compiling takes seconds."""

    name = "compiled"
    implementation = Implementation.COMPILED

    def passed_over(self, call: Call) -> str | None:
        return "it takes seconds to compile, and only runs if asked for"

    def supports(self, call: Call) -> str | None:
        if op.transforming():
            return "torch.func does not transform what torch.compile made; compile the transform, of impl='naive'"
        return why_not_decode(call)

    def plan(self, call: Call) -> Run:
        options, return_lse = call.options, call.return_lse
        function = naive.naive if torch.compiler.is_compiling() else naive.compiled
        return lambda q, k, v, aux: function(q, k, v, options, return_lse, aux)


class Naive(Backend):
    """The formula, with every score in memory."""

    name = "naive"
    implementation = Implementation.NAIVE

    def plan(self, call: Call) -> Run:
        options, return_lse = call.options, call.return_lse
        return lambda q, k, v, aux: naive.naive(q, k, v, options, return_lse, aux)


def why_not_decode(call: Call) -> str | None:
    """Why what takes no KV cache does not compute a call."""
    return None if call.aux.cache_lengths is None else "it takes no KV cache lengths that the device alone knows"
