"""Numbers and tables as Markdown, progress lines, and plots."""

from __future__ import annotations

import dataclasses
import io

import pytest

from cs336_systems.profiling import plots
from cs336_systems.profiling.environment import collect_environment
from cs336_systems.profiling.plots import Axes, Panel, Roof, Series, save_panels, short_count
from cs336_systems.profiling.progress import Progress, readable_seconds
from cs336_systems.profiling.report import collected, environment_lines, format_number, markdown_table, report_page


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (float("nan"), "–"),
        (float("inf"), "–"),
        (0, "0"),
        (0.0123456, "0.0123"),
        (1.5, "1.50"),
        (33.158, "33.2"),
        (785.4, "785"),
        (12345.6, "12346"),
        (-2.5, "-2.50"),
    ],
)
def test_numbers(value, text):
    assert format_number(value) == text


def test_a_table_lines_up_as_text_too():
    assert markdown_table(["name", "ms"], [["naive", "1.50"], ["a|b", "12"]]).splitlines() == [
        "| name  |   ms |",
        "|:------|-----:|",
        "| naive | 1.50 |",
        "| a\\|b  |   12 |",
    ]


def test_a_table_without_lines_has_its_headers():
    assert markdown_table(["a", "b"], []).splitlines() == ["| a   |   b |", "|:----|----:|"]


def test_a_line_must_have_the_headers_cells():
    with pytest.raises(ValueError, match="must have 2 cells like the headers; got 1"):
        markdown_table(["a", "b"], [["1"]])


def test_the_environment_as_a_list():
    environment = dataclasses.replace(collect_environment("cpu", commit="f00"), dirty=True, packages={"peer": "1.2"})
    lines = environment_lines(environment)
    assert f"- torch: {environment.torch}" in lines
    assert "- commit: f00 with uncommitted changes" in lines
    assert "- peer: 1.2" in lines
    assert not any(line.startswith("- CUDA") for line in lines)
    unknown = environment_lines(dataclasses.replace(environment, commit=None))
    assert "- commit: unknown" in unknown


def test_a_page_leaves_out_what_is_empty():
    environment = collect_environment("cpu", commit="abc")
    page = report_page("Steps", environment, ["ten steps"], ["| a |"], reasons=["large: oom: no room"])
    heading, what, how, table, closing, reasons = page.rstrip().split("\n\n")
    assert (heading, how, table) == ("# Steps", "- ten steps", "| a |")
    assert what.splitlines() == environment_lines(environment)
    assert (closing, reasons) == ("## Without a figure", "- large: oom: no room")
    assert "## Warnings\n\n- slow\n" in report_page("Steps", environment, [], [], warned=["slow"])


def test_texts_that_differ_in_numbers_are_collected():
    texts = ["takes 1.5 s", "no kernel", "takes 12 s", "takes 3e-05 s"]
    assert collected(texts) == ["takes 1.5 s (3 times)", "no kernel"]


def test_durations():
    told = [readable_seconds(seconds) for seconds in (0.4, 59.4, 60, 200, 7500)]
    assert told == ["0 s", "59 s", "1 min 00 s", "3 min 20 s", "2 h 05 min"]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_without_a_terminal_each_finished_cell_is_a_line():
    stream = io.StringIO()
    progress = Progress(3, stream)
    progress.keep_cell()
    progress.start_cell("first")
    progress.step("round 1")
    progress.finish_cell("2 ok")
    progress.note("done")
    assert stream.getvalue() == "[2/3] first: 2 ok  (0 s)\ndone\n"


def test_on_a_terminal_one_line_is_rewritten():
    stream = Terminal()
    progress = Progress(2, stream)
    progress.start_cell("first")
    progress.step("naive: forward, round 1/5")
    progress.finish_cell("2 ok")
    written = stream.getvalue()
    assert "\r[1/2] first  naive: forward, round 1/5" in written
    assert written.count("\n") == 1
    assert written.endswith("[1/2] first: 2 ok  (0 s)\n")


def test_plots_are_written(tmp_path):
    panels = [
        Panel("d 64", (Series("naive", (256, 512), (1.0, 4.0)), Series("flash", (), ()))),
        Panel("nothing here", (Series("flash", (), ()),)),
        Panel("d 128", (Series("flash", (512.0,), (0.5,)),)),
    ]
    labels = {"naive": 0, "flash": 2}
    for logarithmic in (True, False):
        axes = Axes("length", "ms", logarithmic=logarithmic, level=1.0)
        assert save_panels(tmp_path / "plot.png", panels, title="Time", axes=axes, labels=labels)
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


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


def test_many_panels_and_labels_are_drawn(tmp_path):
    labels = {f"provider {index}": index % 3 for index in range(14)}
    lengths = tuple(float(2**power) for power in range(7, 17))
    panels = [
        Panel(f"d {dim}", tuple(Series(label, lengths, tuple(x * dim for x in lengths)) for label in labels))
        for dim in range(1, 6)
    ]
    assert save_panels(tmp_path / "plot.png", panels, title="Time", axes=Axes("length", "ms"), labels=labels)


@pytest.mark.parametrize("logarithmic", [True, False])
def test_a_shared_axis_shows_the_tallest_panel(tmp_path, monkeypatch, logarithmic):
    drawn = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: drawn.append(figure.axes[0].get_ylim()))
    panels = [Panel(str(top), (Series("a", (1.0, 2.0), (1.0, top)),)) for top in (10.0, 700.0)]
    save_panels(tmp_path / "plot.png", panels, title="", axes=Axes("x", "y", logarithmic), labels={"a": 0})
    assert drawn[0][1] >= 700.0


def test_a_roof_rises_with_the_operations_a_byte_up_to_each_peak(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(
        plots, "save_figure", lambda figure, path: lines.extend(line.get_xydata() for line in figure.axes[0].lines)
    )
    panel = Panel("d 64", (Series("a", (8.0, 512.0), (1.0, 60.0)),))
    axes = Axes("x", "y", roof=Roof({"low": 10.0, "high": 100.0, "far": 1e6}, bandwidth=1000.0))
    assert save_panels(tmp_path / "plot.png", [panel], title="", axes=axes, labels={"a": 0})
    low, high, far = lines[1:]
    first, last = low[0, 0], low[-1, 0]
    assert first < 8
    assert last > 512
    assert low[:, 1].tolist() == [first, 10.0, 10.0]
    assert high.tolist() == [[first, first], [100.0, 100.0], [last, 100.0]]
    assert far[:, 1].tolist() == far[:, 0].tolist()


def test_a_legend_of_long_labels_lies_within_the_figure(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    legends = []
    legend = Figure.legend

    def noted(self, *arguments, **options):
        legends.append((self, legend(self, *arguments, **options)))
        return legends[-1][1]

    def check(figure, path):
        drawn_on, drawn = legends[-1]
        assert drawn_on is figure
        figure.draw_without_rendering()
        extent = drawn.get_window_extent()
        assert 0 <= extent.x0 < extent.x1 <= figure.bbox.width

    monkeypatch.setattr(Figure, "legend", noted)
    monkeypatch.setattr(plots, "save_figure", check)
    labels = {f"compile model, forward+backward, warm-up {number}": 0 for number in range(7)}
    panel = Panel("long", tuple(Series(label, (1.0, 2.0), (1.0, 2.0)) for label in labels))
    assert save_panels(tmp_path / "long.png", [panel], title="", axes=Axes("x", "y"), labels=labels)
    assert len(legends) == 1


def test_a_plot_of_nothing_is_not_written(tmp_path):
    panels = [Panel("d 64", (Series("a", (), ()),))]
    assert not save_panels(tmp_path / "plot.png", panels, title="", axes=Axes("x", "y"), labels={"a": 0})
    assert not (tmp_path / "plot.png").exists()


def test_lines_of_points():
    points = [("b", 2.0, 5.0), ("a", 4.0, 1.0), ("a", 1.0, 3.0)]
    expected = (Series("c", (), ()), Series("a", (1.0, 4.0), (3.0, 1.0)), Series("b", (2.0,), (5.0,)))
    assert plots.series_of(points, ["c", "a", "b"]) == expected


def test_a_series_has_as_many_values_of_y_as_of_x():
    with pytest.raises(ValueError, match="the 2 values of x; got 1"):
        Series("a", (1.0, 2.0), (1.0,))


def test_ticks():
    told = [short_count(value) for value in (128, 512, 1024, 65536, 1000, 2**20)]
    assert told == ["128", "512", "1k", "64k", "1000", "1M"]
