"""SwiGLU's kernels, compiled without a GPU: they are bound by memory, so what counts is how they read and write it."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("architecture", ["sm_80", pytest.param("sm_90", marks=pytest.mark.every_triton)])
def test_kernels_read_and_write_16_bytes_at_a_time(compiled_by, architecture):
    rows = compiled_by("compile_swiglu.py", architecture, "--d-ff", "3072", "25600")
    assert len(rows) == 2 * 3 * 2
    for row in rows:
        assert not row["reads_single_elements"], row
        assert row["stores"], row
        assert row["spilled"] == 0, row
        assert row["registers"] <= 64, row
        assert row["warnings"] == [], row
