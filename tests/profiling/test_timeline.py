"""Memory over time: the figures, the picture, and the page, which needs nothing but itself."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from cs336_systems.profiling import categories as names
from cs336_systems.profiling.allocations import read_history
from cs336_systems.profiling.categories import CATEGORIES, kinds, largest_first
from cs336_systems.profiling.recording import GRADIENT
from cs336_systems.profiling.timeline import COLOURS, Timeline, draw_timeline, timeline_of
from cs336_systems.profiling.timeline_html import timeline_page

from .snapshots import alloc, free, mark, origin, recording

VOID = {"meta", "br"}


def example(count=20):
    """A forward that allocates norms of 1 to ``count`` MiB, and a backward that frees them for gradients of 1 MiB."""
    forward = [alloc(16 * n, n * 2**20, origin(f"layers.{n}.ln1", "aten.<mul>")) for n in range(1, count + 1)]
    backward = [[*free(16 * n), alloc(8 + 16 * n, 2**20)] for n in range(count, 0, -1)]
    owners = [{}, {}, {8 + 16 * n: GRADIENT for n in range(1, count + 1)}]
    return read_history(
        recording(mark("forward"), forward, mark("backward"), *backward, mark("end"), before=2**20, owners=owners)
    )


def test_layers_add_up_to_the_curve():
    history = example()
    timeline = timeline_of(history)
    assert list(timeline.layers) == [names.STANDING, names.GRADIENT, names.NORM]
    assert timeline.events == tuple(range(60))
    assert [sum(levels) for levels in zip(*timeline.layers.values(), strict=True)] == history.curve()
    assert timeline.peak == history.peak() == (19, 211 * 2**20)
    assert [(phase.name, phase.begin, phase.end) for phase in timeline.phases] == [
        ("forward", 0, 20),
        ("backward", 20, 60),
    ]


def test_of_many_events_the_peak_stays():
    history = example(500)
    timeline = timeline_of(history, points=20)
    assert len(timeline.events) <= 22
    assert max(sum(levels) for levels in zip(*timeline.layers.values(), strict=True)) == history.peak()[1]
    assert timeline.length == history.events


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="points must be at least 2; got 1"):
        timeline_of(example(), points=1)
    with pytest.raises(ValueError, match="history must have events; got none"):
        timeline_of(read_history(recording()))


def test_every_category_has_a_colour_of_its_own():
    assert set(COLOURS) == set(CATEGORIES)
    assert len(set(COLOURS.values())) == len(CATEGORIES)


def test_the_picture_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    draw_timeline(tmp_path / "timeline.png", timeline_of(example()), title="a step")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


class Outline(HTMLParser):
    """The elements of a page, and whether each is closed."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.attributes = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def page():
    history = example()
    largest = kinds(largest_first(history.allocations))[:3]
    return timeline_page(timeline_of(history), largest, title="a <step>", notes=["Recorded & kept."])


def test_the_page_parses_and_has_all_of_it():
    outline = Outline()
    outline.feed(page())
    assert outline.open == []
    assert outline.seen.count("path") == 3
    assert outline.seen.count("line") == 1
    assert outline.seen.count("tr") == 4
    assert {"svg", "table", "ul"} <= set(outline.seen)
    text = page()
    assert "a &lt;step&gt;" in text
    assert "Recorded &amp; kept." in text
    assert "Peak 211 MiB at event 19 of 60, in the forward phase." in text
    assert "aten.&lt;mul&gt;" in text


def test_the_page_needs_nothing_from_elsewhere():
    text = page()
    assert not re.search(r"https?:|//|\burl\(|@import|<script|<link|<img|\bsrc=", text)
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text
    assert len(text) < 20_000


def test_layers_are_drawn_upon_one_another():
    paths = re.findall(r'<path d="([^"]*)"', page())
    lowest, highest = (float(path.removeprefix("M0 ").split("H")[0]) for path in (paths[0], paths[-1]))
    assert lowest == pytest.approx(400 * (1 - 1 / (1.05 * 211)), abs=0.1)
    assert highest == pytest.approx(400 * (1 - 2 / (1.05 * 211)), abs=0.1)
    assert all(path.endswith("Z") for path in paths)


def test_a_category_of_ones_own_is_drawn():
    timeline = Timeline((0, 1), {"routing": (5, 6)}, (), 2, (1, 6))
    assert "routing" in timeline_page(timeline, [], title="mine")
