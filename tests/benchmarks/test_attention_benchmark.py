"""The attention benchmark from its command line to its files: whole, interrupted, resumed, and with trouble in it."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._functorch.config as functorch_config

from benchmarks import attention as benchmark
from benchmarks import attention_report, attention_rows
from benchmarks.attention_presets import Problem
from benchmarks.attention_provider import Provider
from benchmarks.attention_report import Report, draw
from benchmarks.attention_rows import COLUMNS, rows_from_csv
from cs336_systems.profiling.environment import collect_environment
from cs336_systems.profiling.sweep import RowStore, read_configuration

SWEEP = ["--lengths", "32", "64", "--dims", "8", "--batch", "1", "--heads", "2", "--rounds", "2", "--device", "cpu"]
pytestmark = pytest.mark.usefixtures("short_measurements")


def results(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_whole_sweep_of_what_is_really_there(tmp_path, capsys):
    arguments = [*SWEEP, "--impl", "naive", "tiled", "torch", "fa3", "--output", str(tmp_path)]
    assert benchmark.main(arguments) == 0
    rows = results(tmp_path)
    assert list(rows[0]) == list(COLUMNS)
    assert len(rows) == 2 * 3 * 6
    ok = [row for row in rows if row["status"] == "ok"]
    assert {row["implementation"] for row in ok} >= {"naive", "tiled", "torch-math", "torch-flash"}
    for row in ok:
        assert 0 < float(row["min_ms"]) <= float(row["median_ms"]) <= float(row["max_ms"])
        assert float(row["tflops"]) > 0
        assert float(row["speedup_over_naive"]) > 0
        assert row["reference"] == "torch-flash"
        assert float(row["difference"]) < 2e-4
        assert row["difference_from"] == "naive"
        assert row["warning"] == ""
        assert len(row["round_ms"].split(";")) == 2
        assert (row["torch"], row["tf32"], row["seed"]) == (torch.__version__, "False", "0")
        assert (row["held_mib"] == "") == (row["pass"] == "forward")
        assert row["peak_mib"] == ""
    refused = [row for row in rows if row["implementation"] == "torch-cudnn"]
    assert {row["status"] for row in refused} == {"unsupported"}
    assert all(row["reason"] and row["median_ms"] == "" for row in refused)

    printed = capsys.readouterr()
    assert "No GPU is used" in printed.out
    assert "not measured: fa3" in printed.out
    assert "backward, ms: float32, causal, d 8" in printed.out
    assert "[2/2] float32 causal d 8 length 64:" in printed.err

    tables = (tmp_path / "tables.md").read_text()
    for part in (
        "### Forward time, ms",
        "### Memory held before the backward, MiB",
        "- fa3:",
        "- torch-cudnn: unsupported:",
    ):
        assert part in tables
    assert (tmp_path / "rows.md").read_text().count("\n| naive") == 6
    assert json.loads((tmp_path / "environment.json").read_text())["device_type"] == "cpu"
    plots = {path.name for path in tmp_path.glob("*.png")}
    assert {"median-ms-forward-float32-causal.png", "speedup-over-naive-both-float32-causal.png"} <= plots
    assert "held-mib-backward-float32-causal.png" in plots


def test_memory_that_runs_out_is_a_status_and_longer_lengths_are_skipped(tmp_path, calls):
    def run_out(name: str, length: int) -> None:
        if name == "naive":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.")

    calls.trouble = run_out
    assert benchmark.main([*SWEEP, "--no-plots", "--output", str(tmp_path)]) == 0
    rows = results(tmp_path)
    naive = [(row["length"], row["status"]) for row in rows if row["implementation"] == "naive"]
    assert naive == [("32", "oom")] * 3 + [("64", "skipped")] * 3
    other = [row for row in rows if row["implementation"] == "other"]
    assert all(row["status"] == "ok" and row["speedup_over_naive"] == "" for row in other)
    assert ("naive", 64) not in calls.seen
    tables = (tmp_path / "tables.md").read_text()
    assert "- naive: skipped: memory ran out at length 32 of the same series (3 times)" in tables
    assert "| oom |" in re.sub(" +", " ", tables)


def test_peers_may_lie_in_a_folder_of_their_own(tmp_path, calls, monkeypatch, capsys):
    (tmp_path / "peers" / "inner").mkdir(parents=True)
    (tmp_path / "peers" / "inner.pth").write_text("inner\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    peers = ["--peers", str(tmp_path / "peers")]
    assert benchmark.main([*SWEEP, "--no-plots", "--output", str(tmp_path / "results"), *peers]) == 0
    assert sys.path[-2:] == [str(tmp_path / "peers"), str(tmp_path / "peers" / "inner")]
    with pytest.raises(SystemExit):
        benchmark.main([*SWEEP, "--peers", str(tmp_path / "nowhere")])
    assert "--peers must be a folder" in capsys.readouterr().err


def test_a_wrong_result_and_warnings_are_noted(tmp_path, calls, monkeypatch, capsys):
    wrong = Provider(name="wrong", group="peers", bind=lambda problem: lambda q, k, v: v * 2)
    monkeypatch.setattr(benchmark, "all_providers", lambda device: [*calls.providers, wrong])
    assert benchmark.main([*SWEEP, "--passes", "forward", "--no-plots", "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().err.count("note: wrong: the output differs from naive's by") == 1
    assert "the output differs from naive's by" in (tmp_path / "tables.md").read_text()


def test_rounds_that_differ_too_much_are_noted(tmp_path, calls, monkeypatch, capsys):
    monkeypatch.setattr(attention_rows, "_PLAUSIBLE_SPREAD", 0.5)
    assert benchmark.main([*SWEEP, "--no-plots", "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().err.count("note: other: the slowest round took") == 1
    assert all("something else may have run" in row["warning"] for row in results(tmp_path))


def test_plots_are_drawn_again_from_the_table_alone(tmp_path, calls, capsys):
    assert benchmark.main([*SWEEP, "--output", str(tmp_path / "a")]) == 0
    drawn = {path.name: path.read_bytes() for path in (tmp_path / "a").glob("*.png")}
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "results.csv").rename(tmp_path / "b" / "results.csv")
    calls.seen.clear()
    assert benchmark.main(["--redraw", str(tmp_path / "b")]) == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "b").glob("*.png")} == drawn
    assert calls.seen == []
    with pytest.raises(SystemExit):
        benchmark.main(["--redraw", str(tmp_path / "a")])
    assert "--redraw must be a folder with a results.csv" in capsys.readouterr().err


def test_beside_other_libraries_plots_call_the_kernels_ours(tmp_path, calls, monkeypatch):
    assert benchmark.main([*SWEEP, "--no-plots", "--output", str(tmp_path)]) == 0
    drawn = []
    monkeypatch.setattr(attention_report, "save_panels", lambda path, panels, **rest: drawn.append((panels, rest)))
    rows = rows_from_csv(tmp_path / "results.csv")
    named = {"naive": "naive", "other": "flash"}
    for names in (named, named | {"naive": "fa3"}):
        draw(tmp_path, [{**row, "implementation": names[row["implementation"]]} for row in rows])
    labels = [{line.label for panel in panels for line in panel.series if line.x} for panels, _ in drawn]
    assert labels[0] == {"naive", "flash"}
    assert labels[-1] == {"fa3", "ours"}
    # A line keeps its colour, which follows from its place among the labels.
    first, last = (list(rest["labels"]) for _, rest in (drawn[0], drawn[-1]))
    assert first.index("flash") == last.index("ours")


def test_rows_are_read_back_as_they_were_written(tmp_path, calls):
    assert benchmark.main([*SWEEP, "--no-plots", "--output", str(tmp_path)]) == 0
    stored = RowStore.open(tmp_path, read_configuration(tmp_path)).rows
    for read, row in zip(rows_from_csv(tmp_path / "results.csv"), stored, strict=True):
        assert read.keys() == row.keys()
        assert {name: (read[name], row[name]) for name in row if read[name] != row[name]} == {}


def test_a_dry_run_measures_and_writes_nothing(tmp_path, calls, capsys):
    assert benchmark.main([*SWEEP, "--dry-run", "--output", str(tmp_path / "new")]) == 0
    assert not (tmp_path / "new").exists()
    assert calls.seen == []
    assert "float32 causal d 8 length 64, q (1, 2, 64, 8)" in capsys.readouterr().out


def test_nobody_to_measure_is_an_error(calls, capsys):
    assert benchmark.main([*SWEEP, "--impl", "fa9"]) == 2
    assert "got fa9: not installed" in capsys.readouterr().err


def test_the_default_folder_is_named_after_the_device_and_the_time(tmp_path, calls, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert benchmark.main([*SWEEP, "--no-plots"]) == 0
    (folder,) = (tmp_path / "results" / "attention").iterdir()
    assert (folder / "results.csv").exists()
    assert benchmark.default_folder("NVIDIA H100 80GB HBM3").name.startswith("nvidia-h100-80gb-hbm3-20")


@pytest.mark.parametrize("absent", ["matplotlib", "triton"])
def test_what_is_not_installed(tmp_path, calls, monkeypatch, capsys, absent):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == absent else find_spec(name))
    status = benchmark.main([*SWEEP, "--no-plots", "--output", str(tmp_path)])
    printed = capsys.readouterr()
    if absent == "triton":  # the sweep can do without, on a CPU
        assert status == 0
        assert "without its perf_report" in printed.out
        assert len(results(tmp_path)) == 2 * 2 * 3
    else:
        assert status == 2
        assert "needs matplotlib: pip install" in printed.err


def test_settings_of_torch_are_put_back(tmp_path, calls):
    seen: list[tuple[str, bool]] = []
    calls.trouble = lambda name, length: seen.append(
        (torch.get_float32_matmul_precision(), functorch_config.donated_buffer)
    )
    before = torch.get_float32_matmul_precision(), functorch_config.donated_buffer
    assert benchmark.main([*SWEEP, "--tf32", "--no-plots", "--output", str(tmp_path)]) == 0
    assert set(seen) == {("high", False)}
    assert (torch.get_float32_matmul_precision(), functorch_config.donated_buffer) == before


def test_rows_of_several_commits_are_told(tmp_path, calls):
    assert benchmark.main([*SWEEP, "--no-plots", "--commit", "f00", "--output", str(tmp_path)]) == 0
    rows = RowStore.open(tmp_path, read_configuration(tmp_path)).rows
    rows[0]["commit"] = "ba2"
    report = Report(rows, collect_environment("cpu"), {}, [])
    assert "measured at several commits: ba2, f00" in report.tables()


def test_implausible_rates_are_in_the_rows(tmp_path, calls, monkeypatch):
    def on_a_gpu(device, **options):
        return dataclasses.replace(collect_environment(device, **options), device="NVIDIA H200")

    monkeypatch.setattr(benchmark, "collect_environment", on_a_gpu)
    monkeypatch.setattr(Problem, "flops", lambda problem, which: 1e18)
    assert benchmark.main([*SWEEP, "--no-plots", "--max-seconds", "1e9", "--output", str(tmp_path)]) == 0
    assert all("above the 67 TFLOP/s" in row["warning"] for row in results(tmp_path))


def test_it_runs_as_a_script_from_anywhere(tmp_path):
    script = Path(benchmark.__file__)
    finished = subprocess.run(
        [sys.executable, str(script), "--dry-run", "--device", "cpu"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert "float32 causal d 32 length 128" in finished.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_small_sweep_on_a_gpu(tmp_path):
    shapes = ["--lengths", "256", "512", "--dims", "64", "--batch", "2", "--heads", "4", "--dtype", "bf16", "fp32"]
    chosen = ["--impl", "naive", "flash", "torch", "--rounds", "2", "--device", "cuda", "--output", str(tmp_path)]
    assert benchmark.main([*shapes, *chosen]) == 0
    rows = results(tmp_path)
    for row in rows:
        if row["implementation"] in ("naive", "flash"):
            assert row["status"] == "ok", row["reason"]
            assert row["memory_method"] == "cuda allocator"
            assert float(row["peak_mib"]) > 0
            assert row["warning"] == ""
    refused = [row for row in rows if row["implementation"] == "torch-flash" and row["dtype"] == "float32"]
    assert {row["status"] for row in refused} == {"unsupported"}
