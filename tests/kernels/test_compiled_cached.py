"""Attention over a cache fits on GPUs that need not be there, three programs on a processor, and reads in vectors."""

from __future__ import annotations

import pytest

SHARED_MEMORY = {"sm_86": 99, "sm_90": 227}
"""What the programs on one processor may allocate together, in KiB."""

REGISTERS = 64 * 1024
"""Of one processor."""

THREADS = {"half": 64, "float32": 256}


def problems(row, architecture, together):
    if row["spilled"]:
        yield f"spills {row['spilled']} bytes"
    if together * row["shared"] > SHARED_MEMORY[architecture] * 1024:
        yield f"needs {row['shared']} bytes of shared memory"
    if together * row["registers"] * THREADS[row["arithmetic"]] > REGISTERS:
        yield f"takes {row['registers']} registers a thread"
    if row["arithmetic"] == "half" and row["kernel"] == "cached" and not row["multiplies"]:
        yield "has no matrix instructions"
    if not row["stores"] or row["reads_single_elements"] or row["unset_reads"] or row["warnings"]:
        yield f"is compiled badly: {row}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "arithmetic", "widths", "rows", "together"),
    [
        # What `parts_of` relies on: three programs at a time.
        pytest.param("sm_90", "half", ("64", "128"), "4", 3, marks=pytest.mark.every_triton),
        ("sm_90", "half", ("16", "256"), "32", 1),
        ("sm_90", "float32", ("64", "128", "256"), "4", 1),
        ("sm_86", "half", ("64", "128", "256"), "4", 1),
        ("sm_86", "float32", ("64", "128"), "4", 1),
    ],
)
def test_both_kernels_compile(compiled_by, architecture, arithmetic, widths, rows, together):
    compiled = compiled_by(
        "compile_cached.py", architecture, "--arithmetics", arithmetic, "--widths", *widths, "--rows", rows
    )
    assert len(compiled) == 4 * len(widths)
    for row in compiled:
        found = [*problems(row, architecture, together)]
        assert not found, (row["kernel"], row["width"], found)
