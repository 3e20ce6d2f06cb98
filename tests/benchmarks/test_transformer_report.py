"""The benchmark of a model's passes: the figures that follow from times, tables and plots."""

from __future__ import annotations

import dataclasses
import re

import pytest

from benchmarks import transformer_report
from benchmarks.transformer_cell import log_lines, rates_of
from benchmarks.transformer_report import COLUMNS, comparison, forward_backward_ms, ratios, report, warming
from cs336_systems.transformer import preset

from .transformer_rows import CELL, CONFIG, ENVIRONMENT, found, row_with


def lines_of(table):
    """The cells of a Markdown table, without its headers."""
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


class TestFigures:
    def test_rates_follow_from_the_operations_of_each_phase(self):
        rates = rates_of(CELL, found(2.0, 5.0, 3.0), "NVIDIA H200")
        flops = 32 * CONFIG.forward_flops_per_token(every_pair=True)
        assert rates["forward_tflops"] == pytest.approx(flops / 2e-3 * 1e-12)
        assert rates["backward_tflops"] == pytest.approx(2 * flops / 5e-3 * 1e-12)
        assert rates["step_tflops"] == pytest.approx(3 * flops / 10e-3 * 1e-12)
        assert rates["tokens_per_second"] == pytest.approx(3200)
        assert rates["mfu"] == pytest.approx(rates["step_tflops"] / 67.0)
        assert rates["mfu_causal"] == pytest.approx(rates["mfu"] * CONFIG.forward_flops_per_token() * 32 / flops)
        assert rates["warning"] == ""

    @pytest.mark.parametrize(
        ("arithmetic", "peak"), [("float32", 67.0), ("tf32", 494.5), ("bfloat16", 989.5), ("float16", 989.5)]
    )
    def test_utilisation_is_of_the_peak_of_what_was_computed_in(self, arithmetic, peak):
        rates = rates_of(dataclasses.replace(CELL, arithmetic=arithmetic, mode="forward"), found(), "NVIDIA H200")
        assert rates["mfu"] * peak == pytest.approx(rates["step_tflops"])

    def test_a_rate_that_cannot_be_is_told(self):
        cell = dataclasses.replace(CELL, config=preset("small", context_length=512), mode="forward")
        told = rates_of(cell, found(2.0), "NVIDIA H200")["warning"]
        assert re.search(r"^forward: \d+ TFLOP/s is above the 67 TFLOP/s that NVIDIA H200 can reach in float32", told)
        assert rates_of(dataclasses.replace(cell, arithmetic="tf32"), found(2.0), "NVIDIA H200")["warning"] == ""

    def test_without_a_time_or_a_known_peak_there_is_no_rate(self):
        empty = rates_of(CELL, {"status": "oom"}, "NVIDIA H200")
        assert empty.pop("warning") == ""
        assert set(empty.values()) == {None}
        assert rates_of(CELL, found(), "a toaster")["mfu"] is None

    def test_lines_of_every_step(self):
        lines = log_lines(CELL, found(2.0, 5.0, spread=0.5))
        assert lines[0] == CELL.key
        assert lines[1:] == [
            "  warm-up step 1: 50.000 ms",
            "  step 1: forward 1.500 ms, backward 4.500 ms, step 6.500 ms",
            "  step 2: forward 2.500 ms, backward 5.500 ms, step 7.500 ms",
        ]
        assert log_lines(CELL, {"status": "oom", "reason": ""}) == []


class TestTables:
    def test_forward_and_backward_over_forward(self):
        rows = [row_with(found(2.0), mode="forward"), row_with(found(2.5, 5.0, 1.0)), row_with(context=32)]
        assert forward_backward_ms(rows[1]) == 7.5
        assert forward_backward_ms(rows[0]) is None
        (line,) = lines_of(ratios(rows[:2]))
        assert line == ["tiny, 2 × 16", "2.000", "2.500", "5.000", "7.500", "3.75", "3.00"]
        assert lines_of(ratios(rows[1:2]))[0][1] == "–"

    def test_float32_against_other_arithmetic(self):
        rows = [
            row_with(found(4.0, 8.0, 2.0, peak=100.0)),
            row_with(found(2.0, 2.0, 2.0, peak=80.0), arithmetic="bfloat16"),
            row_with(found(1.0), arithmetic="bfloat16", context=32),
        ]
        (line,) = lines_of(comparison(rows, "arithmetic", "float32"))
        assert line[:3] == ["tiny, 2 × 16", "bfloat16", "4.000 → 2.000 (2.00 ×)"]
        assert line[3:6] == ["8.000 → 2.000 (4.00 ×)", "12.00 → 4.000 (3.00 ×)", "14.00 → 6.000 (2.33 ×)"]
        assert line[6] == "100.0 → 80.00 (1.25 ×)"

    def test_eager_against_compiled(self):
        rows = [row_with(found(4.0, 8.0)), row_with(found(2.0, 2.0), compile="model")]
        (line,) = lines_of(comparison(rows, "compile", "none"))
        assert (line[1], line[4], line[6]) == ("model", "12.00 → 4.000 (3.00 ×)", "–")

    def test_the_effect_of_warm_up(self):
        rows = [row_with(found(2.0, spread=0.2), warmup=5), row_with(found(12.0, spread=6.0), warmup=0)]
        cold, warm = lines_of(warming(rows))
        assert cold == ["tiny, 2 × 16", "0", "50.00", "12.00", "6.000", "12.00", "18.00", "50.0 %", "6.00"]
        assert (warm[1], warm[-2], warm[-1]) == ("5", "10.0 %", "1.00")
        assert warming(rows[:1]) == ""

    def test_the_report_names_what_differs_and_why_there_is_no_figure(self):
        warned = row_with(found(2.0, 5.0), arithmetic="bfloat16") | {"warning": "forward: impossible"}
        rows = [warned, row_with({"status": "oom", "reason": "memory ran out"}, context=32)]
        text = report(rows, ENVIRONMENT)
        assert "- all rows: attn naive, compile none, step, warm-up 1" in text
        assert "| tiny, 2 × 32, float32 " in text
        assert re.search(r"\| +oom \|", text)
        assert "- tiny, 2 × 32, float32: oom: memory ran out" in text
        assert "- tiny, 2 × 16, bfloat16: forward: impossible" in text
        assert "Eager against compiled" not in text

    def test_every_column_is_in_a_row(self):
        row = row_with(found(2.0, 5.0, 1.0)) | {"graphs_from_cache": 0, "graphs_compiled": 0}
        assert set(row) == set(COLUMNS)

    def test_plots(self, tmp_path, monkeypatch):
        pytest.importorskip("matplotlib")
        drawn = []
        monkeypatch.setattr(transformer_report, "save_panels", lambda path, panels, **rest: drawn.append(panels))
        rows = [row_with(found(3.0), context=32), row_with(found(2.0, 5.0)), row_with({"status": "oom", "reason": ""})]
        assert transformer_report.draw(tmp_path, rows)
        (((panel),),) = drawn
        (line,) = panel.series
        assert (panel.title, line.x, line.y) == ("tiny", (16, 32), (7.0, 3.0))
        assert (tmp_path / transformer_report.BARS_PLOT).stat().st_size > 0
        assert not transformer_report.draw(tmp_path, rows[2:])
