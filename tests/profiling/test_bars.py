"""Stacked bars."""

from __future__ import annotations

import pytest

from cs336_systems.profiling.bars import save_stacked_bars

BARS = {"first": {"a": 0.25, "b": 0.75}, "second": {"a": 0.5, "c": 0.03}}


@pytest.mark.parametrize("shares", [True, False])
def test_bars_are_drawn_one_part_after_another(tmp_path, monkeypatch, shares):
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    drawn, written = [], []
    barh = Axes.barh

    def noted(self, names, widths, **style):
        drawn.append((names, widths, style["left"], style["label"]))
        return barh(self, names, widths, **style)

    monkeypatch.setattr(Axes, "barh", noted)
    monkeypatch.setattr(Axes, "bar_label", lambda self, bars, labels, **style: written.append(labels) or [])
    path = tmp_path / "bars.png"
    assert save_stacked_bars(path, BARS, title="Bars", parts=("a", "none", "b", "c"), label="part", shares=shares)
    assert path.read_bytes().startswith(b"\x89PNG")
    names = ["first", "second"]
    assert drawn == [
        (names, [0.25, 0.5], [0.0, 0.0], "a"),
        (names, [0.75, 0.0], [0.25, 0.5], "b"),
        (names, [0.0, 0.03], [1.0, 0.5], "c"),
    ]
    assert written == ([["25 %", "50 %"], ["75 %", ""], ["", ""]] if shares else [])


def test_nothing_is_drawn_of_nothing(tmp_path):
    assert not save_stacked_bars(tmp_path / "bars.png", {}, title="", parts=("a",), label="")
    assert list(tmp_path.iterdir()) == []


def test_parts_are_known(tmp_path):
    with pytest.raises(ValueError, match="bars must have parts of a, b; got c in second"):
        save_stacked_bars(tmp_path / "bars.png", BARS, title="", parts=("a", "b"), label="")
