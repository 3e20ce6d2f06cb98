"""Tables and plots from rows."""

from __future__ import annotations

import dataclasses

import pandas as pd
import pytest

from benchmarks.lib import tables
from benchmarks.lib.tables import (
    collected,
    environment_lines,
    markdown,
    matrix,
    number,
    page,
    plot_lines,
    short_count,
    summary,
)
from cs336_systems.profiling import collect_environment

FRAME = pd.DataFrame(
    [
        {"case": "a", "model": "small", "length": 128, "ms": 1.23456, "status": "ok", "reason": "", "commit": "f00"},
        {"case": "b", "model": "small", "length": 256, "ms": None, "status": "oom", "reason": "full", "commit": "f00"},
        {"case": "c", "model": "large", "length": 128, "ms": None, "status": "ok", "reason": "", "commit": "ba2"},
    ]
).assign(warning=[None, None, "odd"])


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]


def test_cells_are_readable():
    assert [number(value) for value in (None, float("nan"), 12.3456, 7, "x")] == ["–", "–", "12.3", "7", "x"]
    assert cells(markdown(FRAME[["case", "ms"]]))[2:] == [["a", "1.23"], ["b", "–"], ["c", "–"]]


def test_a_matrix_shows_a_status_where_there_is_no_figure():
    lines = cells(matrix(FRAME, ["model"], "length", "ms"))
    assert lines[0] == ["model", "length 128", "length 256"]
    assert lines[2:] == [["small", "1.23", "oom"], ["large", "–", "–"]]
    assert cells(matrix(FRAME, ["length"], "model", "ms"))[0] == ["length", "small", "large"]


def test_a_page_says_what_was_measured_and_what_was_not():
    text = page("Title", collect_environment("cpu"), ["a note"], "THE TABLES", FRAME)
    parts = ["# Title", "- device: ", "- a note", "several commits: f00, ba2.", "THE TABLES"]
    parts += ["## Warnings\n\n- c: odd", "## Without a figure\n\n- b: oom: full"]
    positions = [text.index(part) for part in parts]
    assert positions == sorted(positions)
    assert "commits" not in page("Title", collect_environment("cpu"), [], "", FRAME[:2])


def test_summaries():
    row = {"status": "ok", "reason": "", "median_ms": 2.0}
    assert summary([row]) == "2.00 ms"
    assert summary([{"status": "oom", "reason": "full"}]) == "oom: full"
    assert summary([row, row, {"status": "error"}]) == "2 ok, 1 error"


def test_lines_are_plotted_where_there_are_figures(tmp_path):
    pytest.importorskip("matplotlib")
    columns = {"x": "length", "y": "ms", "line": "model", "panel": "length"}
    plot_lines(tmp_path / "a.png", FRAME, **columns, log_y=False)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    plot_lines(tmp_path / "b.png", FRAME.assign(ms=float("nan")), **columns)
    assert not (tmp_path / "b.png").exists()


def test_ticks_are_short():
    assert [short_count(value) for value in (128, 1024, 65536, 1000, 2**20)] == ["128", "1k", "64k", "1000", "1M"]


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
    for index, colour in enumerate(tables.COLOURS):
        places.plot([0, 1], [index, index + 3], color=colour, linewidth=2)
    tables.save_figure(figure, tmp_path / "few.png")
    figure.savefig(tmp_path / "all.png", dpi=160)
    few, all_ = (Image.open(tmp_path / f"{name}.png") for name in ("few", "all"))
    assert few.mode == "P"
    assert few.size == all_.size
    assert 2 * (tmp_path / "few.png").stat().st_size < (tmp_path / "all.png").stat().st_size
    apart = np.abs(np.asarray(few.convert("RGB"), int) - np.asarray(all_.convert("RGB"), int)).max(-1)
    assert (apart > 8).mean() < 0.01
