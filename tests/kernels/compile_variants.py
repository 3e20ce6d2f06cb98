"""Compile the kernels with features for a GPU that need not be there, and print what became of them as JSON.

Run as a program of its own, because kernels defined under TRITON_INTERPRET cannot be compiled:

    python tests/kernels/compile_variants.py sm_90 --arithmetics half float32 --features window bias
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from torch import Tensor

from cs336_systems.attention import variants
from cs336_systems.kernels import tuning
from cs336_systems.kernels.inspection import compile_for, rows_of
from cs336_systems.kernels.launching import Launch
from cs336_systems.kernels.triton import describe as portable
from cs336_systems.kernels.triton.inputs import Input, row_of_parts
from cs336_systems.kernels.triton.sums import Sums
from cs336_systems.kernels.triton.variation import Variation, fixed_extras
from cs336_systems.kernels.settings import Settings

HEADS, LENGTH = 4, 512


def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of metadata alone."""
    return torch.empty(shape, dtype=dtype, device="meta")


def rules(mask: Any = None, scores: Any = None) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """Settings and extras of a mask and score rules."""
    fields: dict[str, Any] = {}
    extras: tuple[Tensor, ...] = ()
    if mask is not None:
        fields["mask"], extras = mask.expression, mask.tensors
    if scores is not None:
        fields["scores"], extras = scores.expression, extras + scores.tensors
    return fields, extras


def features(dtype: torch.dtype) -> dict[str, tuple[dict[str, Any], tuple[Tensor, ...]]]:
    """Settings and extras of each feature, for inputs of a dtype."""
    ids = made(2, LENGTH, dtype=torch.int32)
    bias = made(1, HEADS, LENGTH, LENGTH, dtype=dtype)
    slopes, table = made(1, HEADS), made(1, HEADS, 2 * LENGTH - 1)
    seed = made(1, dtype=torch.int64)
    documents, _ = rules(variants.document(ids))
    starts = (made(6, dtype=torch.int32), made(6, dtype=torch.int32))
    lists = (made(1, 1, 4, 6, dtype=torch.int32), made(1, 1, 4, 6, dtype=torch.int32))
    everything, captured = rules(
        variants.document(ids) & ~variants.dilated(3),
        variants.softcap(30.0) + variants.alibi(slopes) + variants.bias(bias),
    )
    return {
        "window": ({"causal": "bottom_right", "window": (100, None)}, ()),
        "window_both_ways": ({"window": (100, 30)}, ()),
        "softcap": rules(scores=variants.softcap(30.0)),
        "alibi": rules(scores=variants.alibi(slopes)),
        "bias": rules(scores=variants.bias(bias)),
        "relative_bias": rules(scores=variants.softcap(30.0) + variants.relative_bias(table)),
        "row_of_bias": rules(scores=variants.bias(made(2, 1, 1, LENGTH, dtype=dtype))),
        "document": rules(variants.document(ids)),
        "document_blocks": ({**documents, "blocks": True, "causal": "bottom_right"}, (*lists, ids, ids)),
        "mask": rules(variants.visible_where(made(2, 1, LENGTH, LENGTH, dtype=torch.bool))),
        "packed": ({"packed": (None, None)}, starts),
        "packed_causal": ({"packed": (None, None), "causal": "bottom_right"}, starts),
        "packed_window_slopes": (
            {**rules(scores=variants.alibi(slopes))[0], "packed": (None, None), "causal": "top_left", "window": (9, 0)},
            (*starts, slopes),
        ),
        "sinks": ({"sinks": True, "causal": "bottom_right"}, (made(HEADS),)),
        "dropout": ({"dropout": 0.1}, (seed,)),
        "everything": (
            {**everything, "sinks": True, "dropout": 0.1, "causal": "top_left", "window": (64, None)},
            (made(HEADS), seed, *captured),
        ),
    }


def launches(arithmetic: tuning.Arithmetic, width: int, name: str) -> dict[str, Launch]:
    """The launches of every pass of a call with one feature."""
    dtype = torch.bfloat16 if arithmetic == "half" else torch.float32
    fields, extras = features(dtype)[name]
    settings = Settings(**fields)
    captured = range(fixed_extras(settings), len(extras))
    wanted = [position for position in captured if extras[position].is_floating_point()]
    variation = Variation.of(settings, extras, wanted)

    def read() -> Input:
        if arithmetic == "half":
            return Input(made(2, HEADS, LENGTH, width, dtype=dtype), None, ())
        parts = made(2, 2, HEADS, LENGTH, row_of_parts(width), dtype=torch.float16)
        return Input(parts[0, ..., :width], made(8, 2), (parts.stride(0),) if arithmetic == "float32" else ())

    written, row = made(2, HEADS, LENGTH, width, dtype=dtype), made(2, HEADS, LENGTH)
    bound = None if arithmetic == "half" else made(8)
    sums = Sums.of(variation, written, written, extras)
    tensors = portable.BackwardTensors(written, row, row, row, row, bound, written, written, written, sums)
    call = (variation, extras, width**-0.5, arithmetic)
    inputs = [read() for _ in range(4)]
    found = {
        "forward": portable.describe_forward(inputs[:3], written, row, *call),
        "dq": portable.describe_dq(inputs, tensors, *call),
        "dkdv": portable.describe_dkdv(inputs, tensors, *call),
    }
    size = portable.band_size(*(x.tensor for x in inputs[:3]), arithmetic)
    for term in variation.gathered:
        one = variation.differentiated[term]
        target = sums.target(term, extras[one.position], size)
        found[f"{one.kind}s"] = portable.describe_pairs(inputs, tensors, term, target, *call)
    return found


def main(arguments: Iterable[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architecture", choices=tuning.TABLES)
    parser.add_argument("--features", nargs="+", choices=[*features(torch.float32)], default=[*features(torch.float32)])
    parser.add_argument("--arithmetics", nargs="+", choices=("half", "tf32", "float32"), default=["half", "float32"])
    parser.add_argument("--width", type=int, default=64, help="of the heads")
    options = parser.parse_args([*arguments])
    tuning.architecture_of = lambda device: options.architecture  # type: ignore[assignment]
    tuning.processors_of = lambda device: 1  # type: ignore[assignment]
    capability = int(options.architecture.removeprefix("sm_"))
    compiled = [
        (
            {"feature": name, "pass": which, "arithmetic": arithmetic},
            compile_for(capability, portable.KERNELS["pairs" if which == "distances" else which], launch),
        )
        for name in options.features
        for arithmetic in options.arithmetics
        for which, launch in launches(arithmetic, options.width, name).items()
    ]
    print(json.dumps(rows_of(compiled)))


if __name__ == "__main__":
    main(sys.argv[1:])
