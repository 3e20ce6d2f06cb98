"""Stacked bars."""

from __future__ import annotations

import pytest

from cs336_systems.profiling.bars import Bar, save_bars


def test_bars_are_drawn_one_part_after_another(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    drawn = []
    barh = Axes.barh

    def noted(self, places, lengths, **style):
        drawn.append((lengths, style["left"], style["label"]))
        return barh(self, places, lengths, **style)

    monkeypatch.setattr(Axes, "barh", noted)
    bars = [Bar("first", (1.0, 2.0, 0.0)), Bar("second", (3.0, 0.5, 4.0))]
    path = tmp_path / "bars.png"
    assert save_bars(path, bars, title="Bars", x_label="ms", parts=("a", "b", "c"))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert drawn == [
        ([1.0, 3.0], [0.0, 0.0], "a"),
        ([2.0, 0.5], [1.0, 3.0], "b"),
        ([0.0, 4.0], [3.0, 3.5], "c"),
    ]


def test_nothing_is_drawn_of_nothing(tmp_path):
    assert not save_bars(tmp_path / "bars.png", [], title="", x_label="", parts=("a",))
    assert list(tmp_path.iterdir()) == []


def test_a_bar_has_a_length_for_each_part(tmp_path):
    with pytest.raises(ValueError, match="lengths must have one for each of 2 parts; got 1"):
        save_bars(tmp_path / "bars.png", [Bar("first", (1.0,))], title="", x_label="", parts=("a", "b"))
