"""The kernels with features fit on GPUs that need not be there, and use their matrix instructions as they should."""

from __future__ import annotations

import re

import pytest

SHARED_MEMORY = {"sm_86": 99, "sm_90": 227}
"""What one program may allocate, in KiB."""

MOST_SPILLED = 256
"""Bytes a thread, stores and loads together; all features at once may take thrice as much (664 with Triton 3.6)."""

HARMLESS = r"\(C7519\)"

# A tile of the bias is read across where the scores are transposed; it is waited for between matrix instructions. So is
# what dropout keeps, which threads exchange, where rules come between too.
SERIALISED = {("bias", "dkdv", "half"), ("everything", "dkdv", "half"), ("everything", "dq", "half")}


def problems(architecture, rows):
    for row in rows:
        name = row["feature"], row["pass"], row["arithmetic"]
        if row["spilled"] > MOST_SPILLED * (3 if row["feature"] == "everything" else 1):
            yield f"{name} spills {row['spilled']} bytes"
        if row["shared"] > SHARED_MEMORY[architecture] * 1024:
            yield f"{name} needs {row['shared']} bytes of shared memory"
        if not row["multiplies"] or not row["stores"]:
            yield f"{name} computes nothing"
        if row["unset_reads"]:
            yield f"{name} reads registers that nothing has written: {row['unset_reads']}"
        for warning in row["warnings"]:
            if not re.search(HARMLESS, warning) and not ("(C7515)" in warning and name in SERIALISED):
                yield f"{name}: {warning}"


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_90", "sm_86"])
def test_heads_wider_than_a_tile_compile(compiled_by, architecture):
    rows = compiled_by("compile_variants.py", architecture, "--features", "window", "bias", "--width", "576")
    found = [*problems(architecture, rows)]
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "arithmetic", "features"),
    [
        ("sm_90", "half", ["window", "document_blocks"]),
        ("sm_90", "half", ["packed", "packed_causal", "packed_window_slopes"]),
        ("sm_90", "half", ["bias", "relative_bias", "everything"]),
        ("sm_90", "float32", ["window", "relative_bias", "everything"]),
        ("sm_86", "half", ["relative_bias"]),
        ("sm_86", "float32", ["relative_bias", "everything"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "_".join(value),
)
def test_kernels_with_features_compile(compiled_by, architecture, arithmetic, features):
    rows = compiled_by("compile_variants.py", architecture, "--arithmetics", arithmetic, "--features", *features)
    passes = {"forward", "dq", "dkdv"}
    # A tensor with an element for each pair, or for each distance, has a pass of its own.
    own = {"bias": "pairs", "relative_bias": "distances", "everything": "pairs"}
    expected = {(name, which) for name in features for which in passes | {own.get(name, "dq")}}
    assert {(row["feature"], row["pass"]) for row in rows} == expected
    found = [*problems(architecture, rows)]
    assert not found, "\n".join(found)
