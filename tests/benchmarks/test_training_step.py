"""Training steps of several models: ratios, losses, plots and a run."""

from __future__ import annotations

import pandas as pd
import pytest

from benchmarks import training_step
from benchmarks.training_step import plots, tables, with_speedups, wrong_losses

from .small_models import FLAGS, changed, run_here


def row(provider="torch", median_ms=10.0, first_loss=4.0, status="ok", **changes):
    case = changed(provider=provider, **changes)
    figures = {
        "median_ms": median_ms,
        "low_ms": median_ms,
        "high_ms": median_ms,
        "first_loss": first_loss,
        "tokens_per_second": 1.0,
    }
    missing = dict.fromkeys(figures) if status != "ok" else {}
    return {"case": case.name, **case.columns, **figures, **missing, "status": status}


def test_speedups_are_those_of_the_same_work():
    rows = [
        *(row("flash"), row("torch", 15.0), row("llama", 20.0)),
        *(row("flash", context_length=64), row("llama", context_length=64, status="oom")),
        *(row("flash", 5.0, compile="whole"), row("llama", 12.0, compile="whole")),
    ]
    frame = with_speedups(pd.DataFrame(rows)).astype(object)
    found = frame.where(frame.notna(), None)
    assert [*found["over_llama"]] == [2.0, pytest.approx(4 / 3), None, None, None, pytest.approx(2.4), None]
    # Compiled differently if there is no other row of torch.
    assert [*found["over_torch"]] == [1.5, None, 0.75, None, None, 3.0, pytest.approx(1.25)]


def test_another_first_loss_is_a_warning():
    rows = [row("flash"), row("torch", first_loss=4.01), row("llama", first_loss=9.0), row("sdpa", status="oom")]
    assert wrong_losses(pd.DataFrame(rows)) == []
    rows.append(row("torch-cudnn", first_loss=5.0))
    (text,) = wrong_losses(pd.DataFrame(rows))
    assert "the first loss is 4.0000 with flash and 5.0000 with torch-cudnn" in text
    assert text in tables(pd.DataFrame(rows))


def test_lines_of_the_plot(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(training_step, "plot_lines", lambda path, frame, **how: drawn.append(set(frame["line"])))
    plots(pd.DataFrame([row("flash"), row("naive", status="oom")]), tmp_path)
    plots(pd.DataFrame([row("flash"), row("llama"), row("llama", compile="whole")]), tmp_path)
    assert drawn == [{"flash"}, {"ours, compile none", "llama, compile none", "llama, compile whole"}]


def test_a_run(monkeypatch, tmp_path):
    arguments = [*FLAGS, "--tokens", "32", "--steps", "2", "--warmup-steps", "1", "--compile", "none"]
    rows = run_here(monkeypatch, training_step.main, tmp_path, *arguments, "--providers", "flash", "torch", "naive")
    assert [(each["provider"], each["status"], each["mode"]) for each in rows] == [
        ("flash", "unsupported", "step"),
        ("torch", "ok", "step"),
        ("naive", "ok", "step"),
    ]
    assert float(rows[1]["host_ms"]) <= float(rows[1]["median_ms"])
    text = (tmp_path / "tables.md").read_text()
    assert "- `torch`: the same with torch's scaled_dot_product_attention" in text
    assert "impl='flash' cannot" in text
    assert (tmp_path / "tokens-per-second.png").exists()
