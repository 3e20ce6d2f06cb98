"""Compile rows of the tile table for a GPU that need not be there, and print what became of them as JSON.

Run as a program of its own, because kernels defined under TRITON_INTERPRET cannot be compiled:

    python tests/kernels/compile_rows.py sm_90 --passes dq dkdv --arithmetics half tf32 --masks bottom_right none

Head dimensions that share a configuration are compiled at the two ends alone, unless --all-rows is given: what is
between them needs less than the widest.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterable
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch

from cs336_systems.kernels import tuning
from cs336_systems.kernels.inspection import Report, compile_for, rows_of
from cs336_systems.kernels.launching import Launch
from cs336_systems.kernels.triton import describe as portable
from cs336_systems.kernels.triton.inputs import Input, row_of_parts
from cs336_systems.kernels.triton.sums import Sums
from cs336_systems.kernels.triton.variation import Variation
from cs336_systems.kernels.settings import Settings

KERNELS = {name: portable.KERNELS[name] for name in ("forward", "dq", "dkdv")}


def launch_of(name: str, arithmetic: tuning.Arithmetic, head_dim: int, v_head_dim: int, mask: str) -> Launch:
    """A pass on (2, 4, 512, head_dim or v_head_dim) tensors, with a gradient of the log-sum-exp."""

    def made(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def read(width: int) -> Input:
        if arithmetic == "half":
            return Input(made(2, 4, 512, width, dtype=torch.bfloat16), None, ())
        parts = made(2, 2, 4, 512, row_of_parts(width), dtype=torch.float16)
        return Input(parts[0, ..., :width], made(8, 2), (parts.stride(0),) if arithmetic == "float32" else ())

    written, v_written = (
        made(2, 4, 512, width, dtype=torch.bfloat16 if arithmetic == "half" else torch.float32)
        for width in (head_dim, v_head_dim)
    )
    row = made(2, 4, 512)
    variation = Variation.of(Settings(mask), ())
    scale = head_dim**-0.5
    inputs = [read(head_dim), read(head_dim), read(v_head_dim)]
    if name == "forward":
        return portable.describe_forward(inputs, v_written, row, variation, (), scale, arithmetic)
    bound = None if arithmetic == "half" else made(8)
    sums = Sums.of(variation, written, written, ())
    tensors = portable.BackwardTensors(v_written, row, row, row, row, bound, written, written, v_written, sums)
    describe = portable.describe_dq if name == "dq" else portable.describe_dkdv
    return describe([*inputs, read(v_head_dim)], tensors, variation, (), scale, arithmetic)


def compile_row(
    capability: int,
    row: tuning.Row,
    config: tuning.TileConfig,
    arithmetic: tuning.Arithmetic,
    mask: str,
    width: int | None = None,
    v_width: int | None = None,
) -> tuple[dict[str, Any], Report]:
    """A row in words, and what the compiler made of it, for the arithmetic that uses it.

    Heads are as wide as the row says, or ``width``; those of v are ``v_width`` wide, or as the others.
    """
    name, _, head_dim = row
    width = width or head_dim
    with tuning.pin(**{name: config}):
        report = compile_for(capability, KERNELS[name], launch_of(name, arithmetic, width, v_width or width, mask))
    about = {
        "pass": name,
        "arithmetic": arithmetic,
        "head_dim": head_dim,
        "mask": mask,
        "config": [*dataclasses.astuple(config)],
        "on_small_chips": tuning.TABLES["sm_86"][row] == config,
    }
    return about, report


def rows_of_table(architecture: str, unlike: str | None, every: bool) -> list[tuple[tuning.Row, tuning.TileConfig]]:
    """An architecture's rows, and those for small grids, less those that another architecture has too."""
    others = tuning.TABLES[unlike] if unlike else {}
    own = {row: config for row, config in tuning.TABLES[architecture].items() if others.get(row) != config}
    tables = own, tuning.SMALL_GRIDS.get(architecture, {})
    return [pair for table in tables for pair in (table if every else ends_of(table)).items()]


def ends_of(table: dict[tuning.Row, tuning.TileConfig]) -> dict[tuning.Row, tuning.TileConfig]:
    """A table without the rows between two of their like."""
    alike: dict[tuple[object, ...], list[tuning.Row]] = {}
    for row, config in table.items():
        alike.setdefault((*row[:2], config), []).append(row)
    ends = {row for rows in alike.values() for row in (min(rows), max(rows))}
    return {row: config for row, config in table.items() if row in ends}


def main(arguments: Iterable[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architecture", choices=tuning.TABLES)
    parser.add_argument("--unlike", choices=tuning.TABLES, help="leave out rows that this table has too")
    parser.add_argument("--passes", nargs="+", choices=KERNELS, default=[*KERNELS])
    parser.add_argument("--arithmetics", nargs="+", choices=("half", "tf32", "float32"), default=["half", "float32"])
    parser.add_argument("--masks", nargs="+", choices=("none", "bottom_right"), default=["bottom_right"])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[16, 32, 64, 128, 256])
    parser.add_argument("--width", type=int, help="of the heads, in place of the row's")
    parser.add_argument("--v-width", type=int, help="of v's heads, in place of the others'")
    parser.add_argument("--all-rows", action="store_true", help="also head dimensions between two of one configuration")
    options = parser.parse_args([*arguments])
    tuning.architecture_of = lambda device: options.architecture  # type: ignore[assignment]
    compiled = [
        compile_row(
            int(options.architecture.removeprefix("sm_")), row, config, arithmetic, mask, options.width, options.v_width
        )
        for row, config in rows_of_table(options.architecture, options.unlike, options.all_rows)
        if row[0] in options.passes and row[2] in options.head_dims
        for arithmetic in options.arithmetics
        if row[1] == ("half" if arithmetic == "tf32" else arithmetic)
        for mask in options.masks
    ]
    print(json.dumps(rows_of(compiled)))


if __name__ == "__main__":
    main(sys.argv[1:])
