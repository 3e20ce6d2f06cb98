"""Numbers and tables as Markdown, and plots."""

from __future__ import annotations

import dataclasses

import pytest

from cs336_systems.profiling import plots
from cs336_systems.profiling.environment import collect_environment
from cs336_systems.profiling.plots import short_count
from cs336_systems.profiling.report import collected, environment_lines, format_number, markdown_table


def test_numbers():
    values = (None, float("nan"), float("inf"), 0, 0.0123456, 1.5, 33.158, 785.4, 12345.6, -2.5)
    texts = ["–", "–", "–", "0", "0.0123", "1.50", "33.2", "785", "12346", "-2.50"]
    assert [format_number(value) for value in values] == texts
    assert [short_count(value) for value in (128, 1024, 65536, 1000, 2**20)] == ["128", "1k", "64k", "1000", "1M"]


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


def test_the_environment_as_a_list():
    environment = dataclasses.replace(collect_environment("cpu", commit="f00"), dirty=True, packages={"peer": "1.2"})
    lines = environment_lines(environment)
    assert f"- torch: {environment.torch}" in lines
    assert "- commit: f00 with uncommitted changes" in lines
    assert "- peer: 1.2" in lines
    assert not any(line.startswith("- CUDA") for line in lines)
    unknown = environment_lines(dataclasses.replace(environment, commit=None))
    assert "- commit: unknown" in unknown


def test_texts_that_differ_in_numbers_are_collected():
    texts = ["takes 1.5 s", "no kernel", "takes 12 s", "takes 3e-05 s"]
    assert collected(texts) == ["takes 1.5 s (3 times)", "no kernel"]


def test_a_picture_keeps_its_colours_in_fewer_bytes(tmp_path):
    pytest.importorskip("matplotlib")
    import numpy as np
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(4, 3), facecolor="white")
    places = figure.subplots()
    for index, colour in enumerate(plots.COLOURS):
        places.plot([0, 1], [index, index + 3], color=colour, linewidth=2)
    plots.save_figure(figure, tmp_path / "few.png")
    figure.savefig(tmp_path / "all.png", dpi=160)
    few, all_ = (Image.open(tmp_path / f"{name}.png") for name in ("few", "all"))
    assert few.mode == "P"
    assert few.size == all_.size
    assert 2 * (tmp_path / "few.png").stat().st_size < (tmp_path / "all.png").stat().st_size
    apart = np.abs(np.asarray(few.convert("RGB"), int) - np.asarray(all_.convert("RGB"), int)).max(-1)
    assert (apart > 8).mean() < 0.01
