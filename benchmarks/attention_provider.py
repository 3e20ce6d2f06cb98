"""What the attention benchmark measures: one provider is one implementation of attention, ours or anybody's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from benchmarks.attention_presets import Problem
from cs336_systems.profiling.flops import Pass

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

Layout = Literal["as given", "heads first", "length first"]
"""How a provider takes its tensors: (batch, heads, length, d) with no head axis where the problem has none; the same
with the axis always there; or (batch, length, heads, d)."""

Group = Literal["ours", "torch", "peers"]
GROUPS: tuple[Group, ...] = ("ours", "torch", "peers")

KERNELS, KERNELS_LABEL = "flash", "ours"
"""This library's kernels: the name of the implementation, and its label in plots with other libraries' kernels, where
"flash" would read as FlashAttention."""


def accepts_all(problem: Problem, which: Pass) -> str | None:
    """A `refusal` that refuses nothing."""
    return None


@dataclass(frozen=True)
class Provider:
    """One implementation under measurement.

    `bind` makes the function that is timed, for one problem; what it prepares is not timed. `context` is entered
    around measurements. `missing` says why the provider cannot be used on this machine at all, `refusal` why it cannot
    do one problem and pass. A call that raises one of `refusals`, or any exception with one of `refusal_phrases` in its
    message, has said the same; with `warns_why` the reasons are the warnings before it. `quadratic` tells that it keeps
    tensors of length × length.
    """

    name: str
    group: Group
    bind: Callable[[Problem], Attend]
    layout: Layout = "heads first"
    quadratic: bool = False
    compiles: bool = False
    missing: str = ""
    refusal: Callable[[Problem, Pass], str | None] = accepts_all
    refusals: tuple[type[Exception], ...] = (NotImplementedError,)
    refusal_phrases: tuple[str, ...] = ()
    warns_why: bool = False
    context: Callable[[], AbstractContextManager[object]] = nullcontext
