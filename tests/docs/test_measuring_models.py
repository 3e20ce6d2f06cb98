"""The pages of the benchmarks of models: flags, columns and names in them exist, and none is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import all_reduce, breakdown, data_parallel, memory, precision, scaling, training_step, transformer
from benchmarks.lib.models import COMPILE, MODES, PROVIDERS
from benchmarks.parts.data_parallel_modes import MODES as PARALLEL_MODES
from benchmarks.parts.data_parallel_modes import STAGES
from cs336_systems.profiling import ACCUMULATIONS, regions
from cs336_systems.profiling.kernel_classes import CLASSES

from ..benchmarks import test_all_reduce, test_data_parallel
from ..benchmarks.small_models import changed, measured
from ..benchmarks.test_memory_benchmark import case_of
from ..course.conftest import group_of_one
from .pages import flags

__all__ = ["group_of_one"]

DOCS = Path(__file__).parents[2] / "docs"
OF_NSYS = {"--sample", "--cpuctxsw", "--capture-range", "--capture-range-end", "--output", "--type"}
OF_NSYS |= {"--cuda-graph-trace"}
PROGRAMS = {
    "steps": (transformer, training_step),
    "breakdown": (breakdown,),
    "memory": (memory,),
    "precision": (precision,),
    "scaling": (scaling,),
    "data_parallel": (all_reduce, data_parallel),
}


def page(name):
    return (DOCS / f"measuring/{name}.md").read_text()


def named(text, header):
    """What is code in the first column of the table with this header."""
    table = text[text.index(f"| {header} |") :]
    cells = re.findall(r"^\| (`.*?) \|", table[: table.index("\n\n")], re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_flags_exist_and_are_described(name):
    parsers = [program.make_parser(["--device", "cpu"]) for program in PROGRAMS[name]]
    there = {flag for parser in parsers for action in parser._actions for flag in action.option_strings}
    assert flags(page(name)) - {"--compile", "--no-snapshots"} - OF_NSYS <= there
    described = flags(page(name)) | flags(page("steps")) | flags((DOCS / "benchmarking.md").read_text())
    assert {flag for flag in there if flag.startswith("--") and not flag.startswith("--no-")} - described <= {
        "--help",
        "--snapshots",
    }


def test_columns_exist_and_are_described(tmp_path):
    case, options = changed(), {"profiled_steps": 1, "trace": False, "nsys_ranges": False, "snapshots": False}
    for name, measure, fields in (
        ("steps", transformer.measure, case),
        ("breakdown", breakdown.measure, case),
        ("memory", memory.measure, case_of()),
    ):
        row = measured(measure, fields, tmp_path, **options)
        assert row["status"] == "ok", row
        columns = {*row, *fields.columns}
        text = named(page(name), "column")
        described = {
            *text,
            *(prefix + column for prefix in ("forward_", "backward_", "optimizer_", "both_") for column in text),
        }
        described |= {f"share_{kind.replace(' ', '_')}" for kind in CLASSES}
        described |= {f"{top}_{suffix}" for top in text for suffix in ("share", "ms", "instances")}
        found = {re.sub(r"^(peak|largest): .*", r"\1: CATEGORY", column) for column in columns} - {"status", "reason"}
        assert found - described - set(named(page("steps"), "column")) == set(), name
        assert {*text} <= {*found, "share_matrix_products"}, name


def test_columns_of_groups_are_described(group_of_one):
    text = page("data_parallel")
    for name, row in (
        ("All-reduces", test_all_reduce.CASE.columns | test_all_reduce.taken(group_of_one)),
        ("Training", test_data_parallel.CASE.columns | test_data_parallel.taken("flat", group_of_one)),
    ):
        section = text[text.index(f"\n## {name}\n") :]
        described = {*re.findall(r"`([^`]+)`", section[section.index("| column |") :].partition("\n\n")[0])}
        prefixes = {prefix for prefix in described if prefix.endswith("_")}
        every = described | {prefix + column for prefix in prefixes for column in described}
        assert {*row} - every == set(), name
    assert {f"{stage}_{size}_mib" for stage in STAGES for size in ("peak", "held", "predicted")} <= described
    assert named(text, "mode") == [*PARALLEL_MODES]


def test_names_are_described():
    steps = page("steps")
    assert set(named(steps, "provider")) == set(PROVIDERS)
    assert all(f"`{name}`" in steps for name in (*COMPILE, *MODES))
    assert named(page("breakdown"), "mode") == [*MODES]
    assert set(named(page("breakdown"), "class")) == set(CLASSES)
    every = {region for _, region in regions.REGION_RULES} | {*regions.ATTENTION_STEPS, regions.OPTIMIZER, "elsewhere"}
    assert set(named(page("breakdown"), "region")) == every - {"model"}
    sums = page("precision")
    sums = sums[sums.index("\n## Sums\n") :]
    assert re.findall(r"^\| `(.*?)` \|", sums[: sums.index("\n## Dtypes")], re.MULTILINE) == [
        x.name for x in ACCUMULATIONS
    ]
