"""Attention over a cache on tensors: into how many parts sequences are divided, and the launches."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .. import tuning
from ..launching import Launch, Launcher, Plans, is_elsewhere
from .cached import cached_kernel, merge_kernel
from .geometry import Geometry, arithmetic_of, in_units, padded
from .softmax import LOG2_E

PRECISIONS: dict[tuning.Arithmetic, str] = {"half": "ieee", "tf32": "tf32", "float32": "ieee"}
"""What Triton computes products in. Rewriting float32 inputs as float16 parts would cost more than reading them."""

AT_A_TIME = 3
"""How many programs run on a processor at the same time, with the tiles of `tuning.lookup_cached`."""

WANTED = 4
"""How many programs there should be for each processor: what takes some of them longer then evens out."""

TILES_A_PART = 2
"""At least: fewer, and starting a program takes longer than what it does."""

MOST_PARTS = 512

NEARLY = 1.05
"""Fewer parts are taken if that costs no more than this factor by estimate: they have to be merged."""

ELEMENTS_AT_ONCE = 4096
"""Of partial results that a program which merges them adds up at a time."""


class Call(NamedTuple):
    """What a call computes apart from its tensors: slots before its own that a query sees, None for all; a cap."""

    scale: float
    before: int | None
    softcap: float | None


class Plan(NamedTuple):
    """What follows from the metadata of a call. rows: of all new queries of a group; parts: of each sequence."""

    rows: int
    parts: int
    nothing_seen: bool
    launcher: Launcher
    merger: Launcher


_plans: Plans[Plan] = Plans()


def forward(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Attention of q (batch, q_heads, new, d) over k and v (batch, kv_heads, capacity, d or dv): out, and its lse.

    Sequence i has lengths[i] slots, the last of which are those of its new queries. Nothing is read of ``lengths``
    here. out (batch, q_heads, new, dv) in q's dtype and lse (batch, q_heads, new) in float32 are contiguous.
    """
    if is_elsewhere(q.device):
        with torch.cuda.device(q.device):
            return forward(q, k, v, lengths, call)
    batch, q_heads, new, d = q.shape
    kv_heads, width = k.shape[1], v.shape[-1]
    # The heads of a group after one another: a view but where the new queries of all heads come before the next ones.
    grouped = q.reshape(batch, kv_heads, q_heads // max(1, kv_heads) * new, d)
    arithmetic = arithmetic_of(q)
    tensors = (grouped, k, v)
    shapes = tuple([(x.shape, x.stride()) for x in tensors])
    key = (shapes, new, lengths.dtype, q.dtype, q.device, arithmetic, call)
    plan = _plans.get(key, lambda: _plan(grouped, k, v, new, arithmetic, call))
    out = torch.empty((batch, q_heads, new, width), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, q_heads, new), dtype=torch.float32, device=q.device)
    if plan.nothing_seen:
        return out.zero_(), lse.fill_(-math.inf)
    lengths = lengths.contiguous()
    partial_out, partial_lse = out, lse
    if plan.parts > 1:
        found = (batch, kv_heads, plan.rows, plan.parts)
        partial_out = torch.empty((*found, width), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(found, dtype=torch.float32, device=q.device)
    plan.launcher(
        tuple([x.data_ptr() for x in (*tensors, lengths, partial_out, partial_lse)]),
        lambda: describe_cached(grouped, k, v, lengths, partial_out, partial_lse, new, plan.parts, arithmetic, call),
    )
    if plan.parts > 1:
        plan.merger(
            tuple([x.data_ptr() for x in (partial_out, partial_lse, out, lse)]),
            lambda: describe_merge(partial_out, partial_lse, out, lse),
        )
    return out, lse


def _plan(q: Tensor, k: Tensor, v: Tensor, new: int, arithmetic: tuning.Arithmetic, call: Call) -> Plan:
    geometry = Geometry.of(q, k, v)
    config = tuning.lookup_cached(arithmetic, geometry.block, q.device)
    seen = geometry.k_len if call.before is None else min(geometry.k_len, call.before + new)
    nothing_seen = 0 in (*q.shape[:-1], geometry.k_len)
    programs = 1 if nothing_seen else _programs(geometry, config, arithmetic)
    parts = parts_of(programs, triton.cdiv(seen, config.tile_k), tuning.processors_of(q.device))
    return Plan(geometry.q_len, parts, nothing_seen, Launcher(cached_kernel), Launcher(merge_kernel))


def parts_of(programs: int, tiles: int, processors: int) -> int:
    """Into how many parts sequences of so many tiles are divided, where whole ones would make so many programs.

    As many as make `WANTED` programs for each processor, or more if the last ones would then leave most of the memory's
    rate unused: it takes about one program on each processor to keep the memory busy.
    """
    most = max(1, min(MOST_PARTS, tiles // TILES_A_PART))
    enough = max(1, WANTED * processors // programs)
    if most <= enough:
        return most

    def time(parts: int) -> float:
        """Of all programs, in units of what a whole sequence takes from the memory."""
        together = AT_A_TIME * processors
        rounds, rest = divmod(parts * programs, together)
        return (rounds * together + (max(rest, processors) if rest else 0)) / parts

    choices = range(enough, min(most, 4 * enough + 4) + 1)
    shortest = min(map(time, choices))
    return next(parts for parts in choices if time(parts) <= NEARLY * shortest)


def _programs(geometry: Geometry, config: tuning.TileConfig, arithmetic: tuning.Arithmetic) -> int:
    """How many there are for each part."""
    tiles = triton.cdiv(geometry.q_len, _rows_of_a_tile(geometry, config))
    return geometry.kv_matrices * tiles * geometry.slices(arithmetic, geometry.v_head_dim)


def _rows_of_a_tile(geometry: Geometry, config: tuning.TileConfig) -> int:
    return min(config.tile_q, padded(geometry.q_len))


def describe_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    out: Tensor,
    lse: Tensor,
    new: int,
    parts: int,
    arithmetic: tuning.Arithmetic,
    call: Call,
) -> Launch:
    """The launch of `cached_kernel`; q has all queries of a group after one another."""
    geometry = Geometry.of(q, k, v)
    config = tuning.lookup_cached(arithmetic, geometry.block, q.device)
    strides, units = in_units([q, k, v])
    tile_q = _rows_of_a_tile(geometry, config)
    tiles = triton.cdiv(geometry.q_len, tile_q)
    constants: dict[str, Any] = geometry.constants(config, arithmetic) | {
        "TILE_Q": tile_q,
        "WINDOW": call.before is not None,
        "SOFTCAP": call.softcap is not None,
        "FLIP": call.scale < 0,
        "UNITS": units,
        "PRECISION": PRECISIONS[arithmetic],
    }
    return Launch(
        (geometry.kv_matrices * parts * tiles, geometry.slices(arithmetic, geometry.v_head_dim)),
        (q, k, v, lengths, out, lse),
        (
            *(geometry.sizes[1], *strides),
            *(geometry.q_len, new, geometry.k_len, call.before or 0, geometry.kv_leading[-1], parts),
            abs(call.scale) * (LOG2_E.value if call.softcap is None else 1.0),
            1.0 if call.softcap is None else call.softcap,
        ),
        constants,
        config.options,
    )


def describe_merge(partial_out: Tensor, partial_lse: Tensor, out: Tensor, lse: Tensor) -> Launch:
    """The launch of `merge_kernel`."""
    parts, width = partial_out.shape[-2:]
    block = padded(width)
    return Launch(
        (lse.numel(), 1),
        (partial_out, partial_lse, out, lse),
        (parts,),
        {
            "WIDTH": width,
            "BLOCK": block,
            "PARTS": triton.next_power_of_2(parts),
            "AT_ONCE": min(triton.next_power_of_2(parts), ELEMENTS_AT_ONCE // block),
        },
        {"num_warps": 4},
    )
