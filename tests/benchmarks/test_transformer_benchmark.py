"""The time of a model's phases: what is measured, tables, plots, and runs."""

from __future__ import annotations

import re

import pandas as pd
import pytest
import torch

from benchmarks import transformer
from benchmarks.lib import steps
from benchmarks.lib.models import PHASES, step_flops
from benchmarks.transformer import measure, plots, rates_of, step_lines, tables
from cs336_systems.profiling import RoundTimes
from cs336_systems.profiling.steps import AllocatorStats, StepTimes
from cs336_systems.transformer import preset

from .small_models import CASE, CONFIG, FLAGS, changed, measured, run_here


def row_of(case, *phases: float, first=50.0, peak=None, host_ms=0.1, warning=""):
    """A row as if measured: milliseconds of the phases."""
    times = {name: RoundTimes((ms - 0.5, ms + 0.5)) for name, ms in zip(PHASES, phases, strict=False)}
    step = RoundTimes((sum(phases) - 0.5, sum(phases) + 0.5))
    memory = AllocatorStats(peak, None, peak)
    found = StepTimes(times, step, (first,) if case.warmup_steps else (), memory, (host_ms,) * 2, 1.0)
    row = transformer.time_columns(found) | transformer.compilation_columns(case, found)
    row |= {"status": "ok", "reason": "", "case": case.name, "first_loss": 4.0, "last_loss": 3.0}
    return {**case.columns, **row, **rates_of(case, row, "NVIDIA H200")} | ({"warning": warning} if warning else {})


@pytest.mark.parametrize(("mode", "count"), [("forward", 1), ("forward+backward", 2), ("step", 3)])
def test_each_mode_has_its_phases(monkeypatch, mode, count):
    enabled, cleared = [], []
    loss = steps.Transformer.forward

    def forward(model, *tokens, **options):
        enabled.append(torch.is_grad_enabled())
        cleared.append(all(parameter.grad is None for parameter in model.parameters()))
        return loss(model, *tokens, **options)

    monkeypatch.setattr(steps.Transformer, "forward", forward)
    row = measured(measure, changed(mode=mode))
    assert row["status"] == "ok", row
    assert [name for name in PHASES if f"{name}_median_ms" in row] == [*PHASES[:count]]
    for whole, *phases in zip(row["steps_ms"], *(row[f"{name}_steps_ms"] for name in PHASES[:count]), strict=True):
        assert whole == pytest.approx(sum(phases))
    assert enabled == [mode != "forward"] * 3  # without a graph, the forward needs the memory of inference
    assert all(cleared)  # gradients do not add up
    assert len(row["warmup_ms"]) == 1
    assert (row["last_loss"] < row["first_loss"]) == (mode == "step")
    assert row["compile_s"] >= 0


@pytest.mark.parametrize(
    ("dtype", "tf32"), [("float32", False), ("float32", True), ("bfloat16", False), ("float16", False)]
)
def test_products_have_the_dtype_of_the_row(monkeypatch, dtype, tf32):
    seen, linear = set(), torch.nn.functional.linear

    def noting(x, weight, bias=None):
        result = linear(x, weight)
        seen.add((weight.dtype, str(result.dtype), torch.get_float32_matmul_precision()))
        return result

    monkeypatch.setattr(torch.nn.functional, "linear", noting)
    assert measured(measure, changed(dtype=dtype, tf32=tf32), tf32=tf32)["status"] == "ok"
    assert seen == {(torch.float32, f"torch.{dtype}", "high" if tf32 else "highest")}


def test_without_warm_up_the_first_step_is_timed():
    row = measured(measure, changed(warmup_steps=0))
    assert (row["first_step"], row["warmup_ms"], row["compile_s"]) == ("timed", [], None)
    assert row["first_step_ms"] == row["steps_ms"][0]


def test_a_loss_that_is_not_finite(monkeypatch):
    monkeypatch.setattr(steps, "LEARNING_RATE", float("inf"))
    assert "loss of every step must be finite" in measured(measure, CASE)["reason"]
    row = measured(measure, changed(dtype="float16"))
    assert (row["status"], row["last_loss"]) == ("ok", None)
    assert "gradients are not scaled" in row["warning"]


def test_rates_and_warnings():
    row = row_of(CASE, 2.0, 5.0, 3.0)
    flops = 32 * CONFIG.forward_flops_per_token(every_pair=True)
    assert row["forward_tflops"] == pytest.approx(flops / 2e-3 * 1e-12)
    assert row["backward_tflops"] == pytest.approx(2 * flops / 5e-3 * 1e-12)
    assert row["step_tflops"] == pytest.approx(3 * flops / 10e-3 * 1e-12) == pytest.approx(67.0 * row["mfu"])
    assert row["warning"] == ""
    for dtype, tf32, peak in (("float32", True, 494.5), ("bfloat16", False, 989.5), ("float16", False, 989.5)):
        row = row_of(changed(dtype=dtype, tf32=tf32, mode="forward"), 2.0)
        assert row["mfu"] * peak == pytest.approx(row["step_tflops"])
    large = changed(mode="forward", config=preset("small", context_length=512))
    assert re.match(r"forward: \d+ TFLOP/s is above the 67 TFLOP/s peak", row_of(large, 2.0)["warning"])
    every, causal = (step_flops(large.config, large.tokens, "forward", every_pair=pairs) for pairs in (True, False))
    assert causal < 0.99 * every  # kernels may skip the masked pairs, so their count alone proves nothing
    assert row_of(large, 0.995e3 * every / 67e12)["warning"] == ""
    found = [row_of(changed(mode="forward"), 1.0, peak=2**20, host_ms=host_ms)["host_bound"] for host_ms in (0.4, 0.49)]
    assert found == [False, True]
    assert not row_of(changed(mode="forward"), 1.0, host_ms=1.0)["host_bound"]  # a CPU has no host that it waits for


def test_tables_and_plots(tmp_path):
    rows = [
        row_of(changed(mode="forward"), 2.0),
        row_of(CASE, 2.5, 5.0, 1.0, peak=100 * 2**20),
        row_of(changed(dtype="bfloat16"), 1.0, 2.0, 1.0, peak=80 * 2**20),
        row_of(changed(tf32=True), 2.0, 2.0, 1.0),
        row_of(changed(compile="whole"), 2.0, 2.5, 1.0),
        row_of(changed(provider="sdpa"), 2.0, 4.0, 1.0),
        row_of(changed(warmup_steps=0), 16.0, 16.0, 2.0),
        {**changed(batch=8).columns, "case": "large", "status": "oom", "reason": "CUDA out of memory"},
    ]
    text = tables(pd.DataFrame(rows))
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    parts = {title: body for title, _, body in (part.partition("\n") for part in text.split("## "))}
    over = ["2.00", "2.50", "7.50", "3.75 (2.60 to 5.67)", "3.00 (2.17 to 4.25)"]  # (forward + backward) / forward
    assert over in [line[-5:] for line in lines]
    assert "7.50 → 3.00 (2.50 (1.62 to 4.25)×)" in parts["float32 and other dtypes"]
    assert "100 → 80.0 (1.25×)" in parts["float32 and other dtypes"]
    assert "float32 (TF32)" in parts["float32 and other dtypes"]
    assert "8.50 → 5.50 (1.55 (1.33 to 1.80)×)" in parts["Eager and compiled"]
    assert "5.00 → 4.00 (1.25" in parts["Naive attention and other implementations"]
    warm = [line for line in lines if line[-1] == "4.00"]
    assert [line[:-1].count("34.0") for line in warm] == [2]  # mean and median over those of the warmest row, 8.5
    every = next(part for title, part in parts.items() if title.startswith("All rows"))
    assert re.search(r"\| +8 \|.*\| +oom \|", every)
    assert "8.50 (8.00 to 9.00)‡" in every
    assert re.search(r"\| +step \|.*\| +17\.0 \| +1\.00 \|", parts["Statistics of every phase"])  # two of 8.5 ms
    assert re.search(r"\| +both \|.*\| +15\.0 \| +0\.882 \|", parts["Statistics of every phase"])
    plots(pd.DataFrame(rows), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"step-over-length.png", "phases.png"}


def test_a_run_is_resumed_and_logs_steps(monkeypatch, tmp_path, capsys):
    short = [*FLAGS, "--dtypes", "fp32", "--modes", "step", "--batches", "2", "--steps", "2", "--providers", "naive"]
    (row,) = run_here(monkeypatch, transformer.main, tmp_path, *short, "--log-steps")
    printed = capsys.readouterr().out
    assert re.search(
        r"  warm-up step 1: .* ms\n  step 1: forward .* ms, backward .* ms, optimizer .* ms, step", printed
    )
    assert float(row["tokens_per_second"]) == pytest.approx(32e3 / float(row["median_ms"]))
    rows = run_here(monkeypatch, transformer.main, tmp_path, *short, "--resume", "--tf32")
    assert [(each["tf32"], each["median_ms"] == row["median_ms"]) for each in rows] == [
        ("False", True),
        ("True", False),
    ]
    assert "float32 (TF32)" in (tmp_path / "tables.md").read_text()
    assert step_lines({"status": "oom"}) == []
