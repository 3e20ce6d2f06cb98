"""Numbers and tables as Markdown."""

from __future__ import annotations

import pytest

from cs336_systems.profiling import format_number, markdown_table


def test_numbers():
    values = (None, float("nan"), float("inf"), 0, 0.0123456, 1.5, 33.158, 785.4, 12345.6, -2.5)
    texts = ["–", "–", "–", "0", "0.0123", "1.50", "33.2", "785", "12346", "-2.50"]
    assert [format_number(value) for value in values] == texts


def test_a_table_lines_up_as_text_too():
    assert markdown_table(["a", "b"], []).splitlines() == ["| a   |   b |", "|:----|----:|"]
    with pytest.raises(ValueError, match="must have 2 cells like the headers; got 1"):
        markdown_table(["a", "b"], [["1"]])
    assert markdown_table(["name", "ms"], [["naive", "1.50"], ["a|b", "12"]]).splitlines() == [
        "| name  |   ms |",
        "|:------|-----:|",
        "| naive | 1.50 |",
        "| a\\|b  |   12 |",
    ]
