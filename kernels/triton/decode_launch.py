"""The plan of decoding: how many splits of the KV cache, and the launches of `decode`'s kernels."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from .. import launching
from ..call import Aux, Call
from ..launching import Launch, Launcher
from ..lib.softmax import LOG2_E
from .decode import decode_kernel, merge_kernel
from .problem import Problem, padded, stride_multiples
from .tiles import Precision, TileConfig, lookup_decode

PRECISIONS: dict[Precision, str] = {"half": "ieee", "tf32": "tf32", "float32": "ieee"}
"""``input_precision`` of products. Splitting a float32 cache into halves would cost more than reading it."""

RESIDENT = 3
"""Programs that run on a multiprocessor at the same time, with the tiles of `tiles.lookup_decode`."""
PROGRAMS_PER_SM = 4
"""Programs to aim at: slower ones then even out."""
TILES_PER_SPLIT = 2
"""At least: starting a program takes longer than reading fewer tiles."""
MAX_SPLITS = 512
TOLERANCE = 1.05
"""Fewer splits are taken if they take at most this much longer by estimate: splits must be merged."""
MERGED_ELEMENTS = 4096
"""Elements of partial outputs that a program of `merge_kernel` adds at a time."""


class DecodePlan:
    """Computes out and lse of q (batch, q_heads, new, d) over a cache k, v (batch, kv_heads, capacity, d or dv)."""

    def __init__(self, call: Call) -> None:
        self.problem = problem = Problem(call)
        self._new, self._rows = call.q_len, problem.group * call.q_len
        self._grouped = call.q.shape[0], problem.kv_heads, self._rows, call.head_dim
        # False where the new queries of all heads come before the next ones.
        self._is_grouped = _is_view(call.q, self._grouped)
        self._out_shape = *call.q.shape[:-1], call.v_head_dim
        self._config = lookup_decode(problem.precision, problem.block, problem.device)
        self._tile_q = min(self._config.tile_q, padded(self._rows))
        before = problem.options.window_left
        seen = call.k_len if before is None else min(call.k_len, before + call.q_len)
        self._sees_nothing = 0 in (*call.q.shape[:-1], call.k_len)
        self._programs = problem.kv_batch_heads * triton.cdiv(self._rows, self._tile_q)
        slices = problem.slices(call.v_head_dim)
        tiles = triton.cdiv(seen, self._config.tile_k)
        self._early = {"LAUNCHES_EARLY": launching.launches_early(problem.device)}
        self.splits = num_splits(max(1, self._programs * slices), tiles, launching.num_sms(problem.device))
        self._launcher, self._merger = Launcher(decode_kernel), Launcher(merge_kernel)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, aux: Aux) -> tuple[Tensor, Tensor]:
        """Launch the kernels. Both outputs are contiguous. Nothing is read from ``aux.cache_lengths`` on the host."""
        out = torch.empty(self._out_shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(self._out_shape[:-1], dtype=torch.float32, device=q.device)
        if self._sees_nothing:
            return out.zero_(), lse.fill_(-math.inf)
        assert aux.cache_lengths is not None
        lengths = aux.cache_lengths.contiguous()
        if not self._is_grouped:
            q = q.reshape(self._grouped)
        split_out, split_lse = out, lse
        if self.splits > 1:
            shape = (*self._grouped[:-1], self.splits)
            split_out = torch.empty((*shape, self._out_shape[-1]), dtype=torch.float32, device=q.device)
            split_lse = torch.empty(shape, dtype=torch.float32, device=q.device)
        tensors = q, k, v, lengths, split_out, split_lse
        self._launcher(tuple([x.data_ptr() for x in tensors]), self.decode_launch, *tensors)
        if self.splits > 1:
            merged = split_out, split_lse, out, lse
            self._merger(tuple([x.data_ptr() for x in merged]), self.merge_launch, *merged)
        return out, lse

    def decode_launch(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, out: Tensor, lse: Tensor) -> Launch:
        """The launch of `decode_kernel`."""
        problem, options, q = self.problem, self.problem.options, q.view(self._grouped)
        strides, multiples = stride_multiples([q, k, v])
        config = TileConfig(self._tile_q, self._config.tile_k, self._config.num_warps, self._config.num_stages)
        softcap, before = options.softcap, options.window_left
        return Launch(
            (self._programs * self.splits, problem.slices(problem.v_head_dim)),
            (q, k, v, lengths, out, lse),
            (
                *(problem.sizes[1], *strides, self._rows, self._new, problem.k_len, before or 0),
                *(problem.kv_heads, self.splits, abs(options.scale) * (LOG2_E.value if softcap is None else 1.0)),
                1.0 if softcap is None else softcap,
            ),
            {"C": problem.constants(config), "WINDOW": before is not None, "SOFTCAP": softcap is not None}
            | {"FLIP": options.scale < 0, "STRIDE_MULTIPLES": multiples, "PRECISION": PRECISIONS[problem.precision]}
            | self._early,
            config.options,
        )

    def merge_launch(self, split_out: Tensor, split_lse: Tensor, out: Tensor, lse: Tensor) -> Launch:
        """The launch of `merge_kernel`."""
        width = split_out.shape[-1]
        block, splits = padded(width), triton.next_power_of_2(self.splits)
        constants = {"WIDTH": width, "BLOCK": block, "SPLITS": splits, "AT_ONCE": min(splits, MERGED_ELEMENTS // block)}
        tensors = split_out, split_lse, out, lse
        options = {"num_warps": 4} | ({"launch_pdl": True} if self._early["LAUNCHES_EARLY"] else {})
        return Launch((lse.numel(), 1), tensors, (self.splits,), constants | self._early, options)


def _is_view(x: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a tensor has this shape without a copy."""
    try:
        x.view(shape)
    except RuntimeError:
        return False
    return True


def num_splits(programs: int, tiles: int, sms: int) -> int:
    """The splits of each sequence, where ``programs`` is the number of programs without splits.

    As many as make `PROGRAMS_PER_SM` programs for each multiprocessor; or more, if the last ones would leave most of
    the memory's bandwidth unused: about one program on each multiprocessor saturates it.

    Args:
        programs: without splits.
        tiles: of a sequence.
        sms: multiprocessors.
    """
    most = max(1, min(MAX_SPLITS, tiles // TILES_PER_SPLIT))
    enough = max(1, PROGRAMS_PER_SM * sms // programs)
    if most <= enough:
        return most

    def time(splits: int) -> float:
        """Of all programs, in units of the memory's time for a whole sequence."""
        together = RESIDENT * sms
        rounds, rest = divmod(splits * programs, together)
        return (rounds * together + (max(rest, sms) if rest else 0)) / splits

    choices = range(enough, min(most, 4 * enough + 4) + 1)
    shortest = min(map(time, choices))
    return next(splits for splits in choices if time(splits) <= TOLERANCE * shortest)
