"""The portable kernels, compiled for GPUs that need not be there: what they spill, warn of, need and compute."""

from __future__ import annotations

import json
import math
import re
from dataclasses import astuple
from typing import Any

import pytest

from cs336_systems.kernels.triton.tiles import SMALL_GRIDS, TABLES

from .limits import FEATURE_SPILLS, HARMLESS, MORE_SPILLS, SERIALISED, SHARED_KIB, SMALL_GRID_SPILLS, SPILLS

PASSES = ("forward", "dq", "dkdv")
PLAIN = ("none", "causal")
MORE_PASSES = {"lines": ("row_sums", "column_sums")} | dict.fromkeys(
    ("bias", "relative_bias", "everything", "mods"), ("pairs",)
)
"""Other kernels of features with a gradient per pair, distance, row or column."""

ROW_DIMS = (16, 32, 64, 128, 256)
"""Head dimensions that have rows, and limits."""
RESIDENT = 3
"""Programs per multiprocessor on which `num_splits` relies, for half at 64 and 128 columns on sm_90."""


def rows(architecture, precision, *, passes=PASSES, feature="causal", dims=ROW_DIMS, unlike=None, **more):
    """Cases of the rows of the tile tables, without those between two head dimensions of one configuration."""
    cases = []
    for table in (TABLES[architecture], SMALL_GRIDS.get(architecture, {})):
        alike = {}
        for (name, kept, d), config in table.items():
            is_other = unlike is None or TABLES[unlike].get((name, kept, d)) != config
            if is_other and kept == ("half" if precision == "tf32" else precision) and name in passes and d in dims:
                alike.setdefault((name, config), []).append(d)
        cases += [
            {"kernel": name, "precision": precision, "d": d, "feature": feature, "config": astuple(config)} | more
            for (name, config), same in alike.items()
            for d in sorted({min(same), max(same)})
        ]
    return cases


def features(precision, *names, d=64):
    return [
        {"kernel": kernel, "precision": precision, "d": d, "feature": name}
        for name in names
        for kernel in PASSES + MORE_PASSES.get(name, ())
    ]


def statistics(precision, *dims, feature="causal"):
    return [{"kernel": "statistics", "precision": precision, "d": d, "feature": feature} for d in dims]


def decoding(precision, *dims, rows=4):
    kernels = ("decode", "decode_window", "merge")
    return [{"kernel": kernel, "precision": precision, "d": d, "rows": rows} for d in dims for kernel in kernels]


SLICE = [
    *({"kernel": name, "precision": "half", "d": 64 if name == "forward" else 32} for name in PASSES),
    *decoding("half", 64)[1:2],
    *statistics("float32", 32),
    {"kernel": "forward", "precision": "float32", "d": 32, "feature": "packed"},
]
"""What every run compiles."""

USUAL_DIMS = 64, 128
"""Head dimensions whose rows every Triton compiles."""


def split(cases):
    """Those of the usual head dimensions, and the others."""
    return [case for case in cases if case["d"] in USUAL_DIMS], [case for case in cases if case["d"] not in USUAL_DIMS]


HALF_ROWS, FLOAT32_ROWS = (split(rows("sm_90", precision)) for precision in ("half", "float32"))

SLOW: dict[str, tuple[Any, ...]] = {
    "rows_of_half": ("sm_90", HALF_ROWS[0], True),
    "more_rows_of_half": ("sm_90", HALF_ROWS[1]),
    "rows_of_float32": ("sm_90", FLOAT32_ROWS[0], True),
    "more_rows_of_float32": ("sm_90", FLOAT32_ROWS[1]),
    "ampere_half": ("sm_80", rows("sm_80", "half")),
    # Half's rows have the narrowest heads; these have the tiles, and fewer of the registers, of 64 columns.
    "ampere_float32": ("sm_80", rows("sm_80", "float32", dims=(64, 128, 256))),
    "blackwell_half": ("sm_100", rows("sm_100", "half")),
    "blackwell_float32": ("sm_100", rows("sm_100", "float32", dims=(64, 128, 256))),
    # The few rows that are not sm_80's, where the others must fit too.
    "graphics_chips": ("sm_86", rows("sm_86", "half", unlike="sm_80") + rows("sm_86", "float32", unlike="sm_80")),
    # Without a mask the loops over keys are another program: the compiler may serialise its matrix instructions.
    "no_mask": (
        "sm_90",
        rows("sm_90", "half", passes=("forward", "dq"), feature="none", dims=(64, 128))
        + rows("sm_90", "float32", passes=("forward", "dq"), feature="none", dims=(32, 128)),
    ),
    # TF32 runs the rows of half on float16 halves, with scales in more registers.
    "tf32": ("sm_90", rows("sm_90", "tf32", passes=("dq", "dkdv"), dims=(64, 128, 256))),
    # Where k and v alternate in one buffer, ptxas 12.8 loses a tile's address.
    "other_v": (
        "sm_90",
        [
            {"kernel": "forward", "precision": precision, "d": d, "dv": dv, "feature": feature}
            for d, dv, feature in ((19, 9, "causal"), (1, 27, "none"), (22, 6, "none"), (40, 24, "causal"))
            for precision in ("half", "float32")
        ],
    ),
    # Their rows begin at multiples of 16, 8 or 4 bytes, which Triton must be told.
    "even_widths": (
        "sm_90",
        [
            {"kernel": kernel, "precision": "half", "d": d}
            for kernel, d in (("forward", 40), ("forward", 34), ("dq", 36), ("dq", 34), ("dkdv", 40), ("dkdv", 34))
        ],
    ),
    "window_blocks": ("sm_90", features("half", "window", "document_blocks") + features("float32", "window")),
    "packed": ("sm_90", features("half", "packed_causal", "packed_window_slopes", "packed_document_blocks")),
    "biases": ("sm_90", features("half", "bias", "relative_bias") + features("float32", "relative_bias")),
    "lines": ("sm_90", [case for d in (64, 128, 256) for case in features("half", "lines", d=d)]),
    # These take seconds each: half and float32, whose products alone differ, take turns, and float32 has no pass twice.
    "mods": ("sm_90", features("half", "mods")[::2] + features("float32", "mods")[1::2]),
    "everything": ("sm_90", features("half", "everything") + features("float32", "everything")[::2]),
    "graphics_features": ("sm_86", features("float32", "relative_bias", "everything")),
    "wide": ("sm_90", features("half", "window", d=576) + features("float32", "bias", d=576)),
    "graphics_wide": ("sm_86", features("half", "bias", d=576) + features("float32", "window", d=576)),
    "statistics": ("sm_90", statistics("half", *USUAL_DIMS) + statistics("float32", *USUAL_DIMS), True),
    # 19: where the forward needs fewer rows; here only k is loaded, and nothing shares its buffer.
    "more_statistics": (
        "sm_90",
        statistics("half", 19, 34, 16, 32, 256, 576)
        + statistics("float32", 19, 16, 32, 256, 576)
        + statistics("tf32", 128)
        + [
            row
            for name, d in (("none", 64), ("packed_causal", 128), ("mods", 64))
            for row in statistics("half", d, feature=name)
        ]
        + [
            row
            for name in ("window", "document_blocks", "everything")
            for row in statistics("float32", 64, feature=name)
        ],
    ),
    # The forward's tiles are the same at 16 to 64 columns.
    "ampere_statistics": ("sm_80", statistics("half", 16, 64, 128, 256) + statistics("float32", 64, 128, 256)),
    "blackwell_statistics": ("sm_100", statistics("half", 16, 64, 128, 256) + statistics("float32", 64, 128, 256)),
    "graphics_statistics": ("sm_86", statistics("half", 256) + statistics("float32", 64, 256, feature="everything")),
    "gradients_of_statistics": (
        "sm_90",
        [
            {"kernel": kernel, "precision": "half", "d": d, "dv": 0, "feature": feature}
            for d, feature in ((64, "causal"), (128, "packed_causal"), (256, "none"), (64, "bias"))
            for kernel in ("dq", "dkdv", *["pairs"] * (feature == "bias"))
        ],
        True,
    ),
    "decode": ("sm_90", decoding("half", 64, 128), True),
    "decode_more": ("sm_90", decoding("half", 16, 256, rows=32) + decoding("float32", 128, 256)),
    "graphics_decode": ("sm_86", decoding("half", 128, 256) + decoding("float32", 64, 128)),
}


def allowed_spills(architecture, case):
    key = case["kernel"], case["precision"], case["d"]
    if "decode" in case["kernel"] or case["kernel"] == "merge":
        return 0
    if case.get("feature", "causal") not in PLAIN:
        # A mod may compute as much as it likes; here many functions of a score are in registers at once.
        return math.inf if case["feature"] == "mods" else FEATURE_SPILLS * (6 if case["feature"] == "everything" else 1)
    if case["d"] not in ROW_DIMS:
        return math.inf
    small = SMALL_GRIDS.get(architecture, {}).get(key)
    if small is not None and [*astuple(small)] == [*case.get("config", ())]:
        return SMALL_GRID_SPILLS.get(key, SPILLS)
    return MORE_SPILLS[architecture].get(key, SPILLS)


def problems(architecture, case, row):
    """What is wrong with a compiled kernel, in words."""
    kernel, precision, d = case["kernel"], case["precision"], case["d"]
    is_decoding = "rows" in case
    if row["spilled"] > allowed_spills(architecture, case):
        yield f"spills {row['spilled']} bytes; {allowed_spills(architecture, case)} are allowed"
    table = TABLES["sm_86"].get((kernel, precision, d))
    runs_on_sm_86 = architecture == "sm_80" and table and [*astuple(table)] == [*case.get("config", ())]
    together = RESIDENT if is_decoding and architecture == "sm_90" and precision == "half" and d in (64, 128) else 1
    if together * row["shared"] > SHARED_KIB["sm_86" if runs_on_sm_86 else architecture] * 1024:
        yield f"needs {row['shared']} bytes of shared memory"
    for warning in row["warnings"]:
        is_known = "(C7515)" in warning and (case.get("feature"), kernel, precision) in SERIALISED
        if not re.search(HARMLESS, warning) and not is_known:
            yield warning
    if not row["multiplies"] and (not is_decoding or (precision == "half" and kernel != "merge")):
        yield "has no matrix instruction"
    if row["starts_early"] != (kernel == "merge" and architecture not in ("sm_80", "sm_86")):
        yield "waits for the kernel before it" if row["starts_early"] else "does not wait for the kernel before it"
    if not row["stores"]:
        yield "stores nothing"
    if row["reads_single_elements"] and (is_decoding or d in (34, 36, 40)) and "dv" not in case:
        yield "reads single elements"
    yield from (f"reads what nothing has written: {instruction}" for instruction in row["unset_reads"])


def check(compiled_by, architecture, cases):
    assert cases
    found = compiled_by("compile_triton", architecture, json.dumps(cases))
    assert len(found) == len(cases)
    wrong = [
        f"{case}: {text}" for case, row in zip(cases, found, strict=True) for text in problems(architecture, case, row)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.every_triton
def test_a_few_kernels_compile(compiled_by):
    check(compiled_by, "sm_90", SLICE)


compiled_above = [("sm_90", case) for case in SLICE]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "cases"),
    [
        pytest.param(*entry[:2], id=name, marks=[pytest.mark.every_triton] * (len(entry) == 3))
        for name, entry in SLOW.items()
    ],
)
def test_kernels_compile(compiled_by, architecture, cases):
    check(compiled_by, architecture, [case for case in cases if (architecture, case) not in compiled_above])


GOOD = {"registers": 128, "spilled": 8, "shared": 1024, "warnings": ["(C7519)"], "multiplies": True, "stores": True}
GOOD |= {"reads_single_elements": False, "starts_early": False, "unset_reads": []}


@pytest.mark.parametrize(
    ("change", "case"),
    [
        ({"spilled": 10**4}, {}),
        ({"shared": 10**6}, {}),
        ({"shared": 100 * 1024}, {"config": astuple(TABLES["sm_86"]["dq", "half", 64])}),
        ({"warnings": ["(C7510)"]}, {}),
        ({"multiplies": False}, {}),
        ({"stores": False}, {}),
        ({"starts_early": True}, {}),
        ({"reads_single_elements": True}, {"d": 40}),
        ({"unset_reads": ["10: UIADD3 UR18, UR18, 0x20"]}, {}),
        ({"spilled": 8}, {"kernel": "decode", "rows": 4}),
        ({"spilled": 300}, {"feature": "window"}),
    ],
)
def test_problems_are_found(change, case):
    case = {"kernel": "dq", "precision": "half", "d": 64} | case
    expected = GOOD | {"spilled": 0 if case["kernel"] == "decode" else 8}
    assert [*problems("sm_80", case, expected)] == []
    assert len([*problems("sm_80", case, expected | change)]) == 1


def test_rows_of_small_grids_have_their_own_limits_and_all_rows_are_compiled():
    usual, small = (astuple(tables["sm_90"]["forward", "float32", 128]) for tables in (TABLES, SMALL_GRIDS))
    case, row = {"kernel": "forward", "precision": "float32", "d": 128}, GOOD | {"spilled": 200}
    assert [*problems("sm_90", case | {"config": small}, row)] == []
    assert len([*problems("sm_90", case | {"config": usual}, row)]) == 1
    for name in ("rows_of_half", "rows_of_float32", "ampere_half", "ampere_float32", "blackwell_half"):
        for kernel in PASSES:
            cases = SLOW[name][1] + SLOW.get(f"more_{name}", ("", []))[1]
            narrowest = set() if name == "ampere_float32" else {16}
            assert {case["d"] for case in cases if case["kernel"] == kernel} >= {64, 128, 256} | narrowest


@pytest.mark.parametrize("architecture", ["sm_80", pytest.param("sm_90", marks=pytest.mark.every_triton)])
def test_kernels_of_swiglu_read_and_write_16_bytes_at_a_time(compiled_by, architecture):
    """They are bound by memory."""
    cases = [
        {"kernel": f"swiglu_{way}", "precision": precision, "d": d_ff}
        for d_ff in (3072, 25600)
        for precision in ("half", "float16", "float32")
        for way in ("forward", "backward")
    ]
    for row in compiled_by("compile_triton", architecture, json.dumps(cases)):
        assert not row["reads_single_elements"], row
        assert row["stores"], row
        assert row["spilled"] == 0, row
        assert row["registers"] <= 64, row
        assert row["warnings"] == [], row
