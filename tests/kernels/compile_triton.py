"""Compile portable kernels for a GPU that need not be there, and print what the compiler made of them as JSON.

A program of its own, because kernels defined under TRITON_INTERPRET cannot be compiled. Its cases are a list of objects
whose fields are the arguments of `launch_of`; of ``config`` it takes a list of the fields of a `TileConfig`:

    python tests/kernels/compile_triton.py sm_90 '[{"kernel": "forward", "precision": "half", "d": 64}]'
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from torch import Tensor

from cs336_systems.attention import variants
from cs336_systems.attention.mods import mask_mod, score_mod
from cs336_systems.kernels import launching, swiglu
from cs336_systems.kernels.call import Aux, Call, Options, Wanted
from cs336_systems.kernels.inspection import compile_for, rows_of
from cs336_systems.kernels.launching import Launch
from cs336_systems.kernels.triton import backward, decode, forward, launch, statistics, statistics_launch, tiles
from cs336_systems.kernels.triton.decode_launch import DecodePlan
from cs336_systems.kernels.triton.halves import Input, half_row
from cs336_systems.kernels.triton.mod_gradients import empty_buffer
from cs336_systems.kernels.triton.pair_gradients import pair_gradient_kernel
from cs336_systems.kernels.triton.problem import Problem

HEADS, LENGTH, SPLITS = 4, 512, 5
CAUSAL = {"window_right": 0}


def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of metadata alone."""
    return torch.empty(shape, dtype=dtype, device="meta")


def rules(mask: Any = None, scores: Any = None, options: Any = (), **aux: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options and aux tensors of a mask and score rules, and more of both."""
    options = dict(options)
    if mask is not None:
        options["mask"], aux["mask_aux"] = mask.expression, tuple(mask.tensors)
    if scores is not None:
        options["scores"], aux["score_aux"] = scores.expression, tuple(scores.tensors)
    return options, aux


def mods(ids: Tensor, slopes: Tensor, table: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    """A mask and a score change with operators of every kind."""

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q // 16 == k // 16) | (((q - k) % 7 == 0) & (ids[b, q] == ids[b, k]) & ~(h == 3))

    def changed(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        capped = torch.where(q > k, 30 * torch.tanh(score / 30), score.clamp(-4, 4.5) * torch.sigmoid(score))
        decay = torch.exp(-(q - k).abs() / 64) ** 2 + torch.sin(score) * torch.rsqrt(k + 1.0)
        return torch.maximum(capped, decay) - slopes[h] * (q - k).abs() + table[h, k - q + LENGTH - 1]

    return rules(mask_mod(seen), score_mod(changed))


def features(dtype: torch.dtype) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Options and aux tensors of each feature, for inputs of a dtype."""
    ids = made(2, LENGTH, dtype=torch.int32)
    bias, slopes, table = made(1, HEADS, LENGTH, LENGTH, dtype=dtype), made(1, HEADS), made(1, HEADS, 2 * LENGTH - 1)
    of_keys = made(2, 1, 1, LENGTH)
    starts = {name: made(6, dtype=torch.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    lists = {name: made(1, 1, 4, 7, dtype=torch.int32) for name in ("block_rows", "block_columns")}
    sinks, seed, dropout = made(HEADS), made(1, dtype=torch.int64), {"dropout_p": 0.1}
    top_left = {"window_right": 0, "bottom_right": False}
    return {
        "none": ({}, {}),
        "causal": (CAUSAL, {}),
        "window": (CAUSAL | {"window_left": 100}, {}),
        "bias": rules(scores=variants.bias(bias)),
        "relative_bias": rules(scores=variants.softcap(30.0) + variants.relative_bias(table)),
        "lines": rules(scores=variants.alibi(slopes) + variants.bias(of_keys), options=CAUSAL),
        "mods": mods(ids, slopes[0], table[0]),
        "document_blocks": rules(variants.document(ids), None, CAUSAL, **lists),
        "packed_document_blocks": rules(
            variants.document(made(5, LENGTH, dtype=torch.int32)),
            None,
            CAUSAL | {"max_seqlen_q": LENGTH, "max_seqlen_k": LENGTH},
            **starts,
            **{name: made(5, 1, 4, 6, dtype=torch.int32) for name in lists},
        ),
        "packed": ({}, starts),
        "packed_causal": (CAUSAL, starts),
        "packed_window_slopes": rules(None, variants.alibi(slopes), top_left | {"window_left": 9}, **starts),
        "everything": rules(
            variants.document(ids) & ~variants.dilated(3),
            variants.softcap(30.0) + variants.alibi(slopes) + variants.bias(bias),
            top_left | dropout | {"window_left": 64},
            sinks=sinks,
            seed=seed,
        ),
    }


def launch_of(
    kernel: str, precision: str, d: int, dv: int | None = None, feature: str = "causal", rows: int = 4
) -> tuple[Any, Launch]:
    """A kernel and its launch on (2, 4, 512, d) tensors; ``rows``: new queries of a group, for decoding.

    SwiGLU's have d for their hidden width. "row_sums" and "column_sums" are dq's and dkdv's without these gradients.
    With a ``dv`` of 0 the backward is that of statistics.
    """
    dtype = {"half": torch.bfloat16, "float16": torch.float16}.get(precision, torch.float32)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    dv = d if dv is None else dv
    if kernel in ("decode", "decode_window", "merge"):
        return _decode(kernel, dtype, d, rows)
    if kernel.startswith("swiglu"):
        gu, h = (made(16384, width, dtype=dtype) for width in (2 * d, d))
        if kernel == "swiglu_forward":
            return swiglu.swiglu_forward_kernel, swiglu.launch_arguments(gu, h)
        return swiglu.swiglu_backward_kernel, swiglu.launch_arguments(h, gu, gu, h)
    fields, named = features(dtype)[feature]
    options, aux = Options(scale=d**-0.5, **fields), Aux(**named)
    q, v = (made(2, HEADS, LENGTH, width, dtype=dtype) for width in (d, dv))
    wanted = Wanted(score_aux=tuple(x.is_floating_point() for x in aux.score_aux))
    problem = Problem(Call(q, q, v, options, aux), wanted)

    def read(x: Tensor) -> Input:
        if precision == "half":
            return Input(x, None, ())
        halves = made(2, *x.shape[:-1], half_row(x.shape[-1]), dtype=torch.float16)
        lo_offset = (halves.stride(0),) if precision == "float32" else ()
        return Input(halves[0, ..., : x.shape[-1]], made(2 * HEADS, 2), lo_offset)

    dout = v if dv else made(2, HEADS, LENGTH, 1)
    inputs, row = [read(x) for x in (q, q, v, dout)], made(2, HEADS, LENGTH)
    if kernel == "forward":
        return forward.forward_kernel, launch.forward_launch(problem, inputs[:3], v, row, aux)
    if kernel == "statistics":
        return statistics.statistics_kernel, statistics_launch.statistics_launch(problem, inputs[:2], (row,) * 3, aux)
    bound = None if precision == "half" else made(2 * HEADS)
    tensors = launch.RowTensors(row, bound, row, row, row)
    size, mods = launch.band_size(problem), problem.mods
    buffers = [empty_buffer(term, problem.shape, (LENGTH, LENGTH), size, aux) for term in mods.terms]
    if kernel == "pairs":
        [term] = mods.computed_by("pair", "distance")
        return pair_gradient_kernel, launch.pair_launch(problem, inputs, tensors, term, buffers[term], aux)
    of_q, of_k, of_v = (None if kernel.endswith("_sums") else x for x in (q, q, v))
    by_rows = kernel in ("dq", "row_sums")
    sums = [buffers[term] for term in mods.computed_by("row" if by_rows else "column")]
    if by_rows:
        return backward.dq_kernel, launch.dq_launch(problem, inputs, tensors, v, of_q, sums, aux)
    return backward.dkdv_kernel, launch.dkdv_launch(problem, inputs, tensors, of_k, of_v, sums, aux)


def _decode(kernel: str, dtype: torch.dtype, d: int, rows: int) -> tuple[Any, Launch]:
    q, kv, grouped = (made(2, *size, d, dtype=dtype) for size in ((rows * HEADS, 1), (HEADS, LENGTH), (HEADS, rows)))
    window = {"scale": -0.1, "window_left": 100, "softcap": 30.0} if kernel == "decode_window" else {"scale": 0.1}
    lengths = made(2, dtype=torch.int64)
    plan = DecodePlan(Call(q, kv, kv, Options(**window, **CAUSAL), Aux(cache_lengths=lengths)))
    plan.splits = SPLITS
    parts = made(2, HEADS, rows, SPLITS, d), made(2, HEADS, rows, SPLITS)
    if kernel == "merge":
        return decode.merge_kernel, plan.merge_launch(*parts, grouped, made(2, HEADS, rows))
    return decode.decode_kernel, plan.decode_launch(grouped, kv, kv, lengths, *parts)


def main(arguments: Iterable[str]) -> None:
    architecture, cases = arguments
    tiles.architecture_of = lambda device: architecture  # type: ignore[assignment]
    launching.num_sms = lambda device: 1  # type: ignore[assignment]
    capability = int(architecture.removeprefix("sm_"))
    launching.launches_early = lambda device: capability >= 90  # type: ignore[assignment]
    compiled = []
    for case in json.loads(cases):
        config: Sequence[Any] | None = case.pop("config", None)
        with nullcontext() if config is None else tiles.pin(**{case["kernel"]: tiles.TileConfig(*config)}):
            compiled.append((case, compile_for(capability, *launch_of(**case))))
    print(json.dumps(rows_of(compiled)))


if __name__ == "__main__":
    main(sys.argv[1:])
