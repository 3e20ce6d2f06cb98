"""What the tests change in Triton's interpreter changes nothing of what it computes."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")


@pytest.mark.every_triton
def test_the_faster_interpreter_computes_the_same(printed_by):
    as_it_is, faster = printed_by("interpreted.py")
    assert as_it_is == faster
