"""The attention benchmark, from its command line to its files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from benchmarks import attention
from benchmarks.attention import parse, problems
from benchmarks.lib.attention_providers import Problem, all_providers
from benchmarks.parts.attention_report import benchmark, draw_rooflines, intensity, plots, tables

from .small_models import CPU, measure_here, run_here
from .test_attention_measure import FAST, PROBLEM, SMALL, earlier

ROW = earlier(1024, provider="naive", head_dim=64, batch=8, heads=0, kv_heads=0, mask="full", device="NVIDIA H200") | {
    **dict.fromkeys(("min_ms", "max_ms", "speedup_over_naive", "speedup_over_reference", "peak_mib", "held_mib")),
    "pass": "backward",
    "median_ms": 2.0,
    "tflops": 3.0,
}


def test_presets():
    paper = problems(parse(["--preset", "paper", "--device", "cpu"]))
    assert len(paper) == 6 * 3 * 2
    assert all(p.batch * p.length == 16384 and p.heads * p.head_dim == 2048 for p in paper)
    assert paper[0] == Problem("bfloat16", "causal", 32, 32, 32, 64, 512)
    course, causal = (problems(parse(["--preset", name, "--device", "cpu"])) for name in ("course", "course-causal"))
    assert (len(course), {(p.batch, p.heads, p.mask) for p in course}) == (2 * 4 * 5, {(8, 0, "full")})
    assert sorted({p.length for p in causal}) == [2**power for power in range(7, 17)]
    assert {(p.batch, p.heads, p.mask, p.head_dim) for p in causal} == {(1, 0, "causal", d) for d in (16, 32, 64, 128)}
    assert parse(["--device", "cpu"]).preset == "cpu"
    assert all(f"{name}: {text}" in attention.make_parser().format_help() for name, text in attention.PRESETS.items())


def test_flags_replace_what_the_preset_says():
    text = "--preset paper --lengths 1024 256 --head-dims 64 --dtypes fp16 --masks full --passes forward --batch 2"
    options = parse([*text.split(), "--heads", "8", "--kv-heads", "2", "--device", "cpu"])
    assert problems(options) == [Problem("float16", "full", 2, 8, 2, 64, length) for length in (256, 1024)]
    options = parse([*text.split(), "--heads", "8", "--v-head-dim", "32", "--device", "cpu"])
    assert problems(options)[0] == Problem("float16", "full", 2, 8, 8, 64, 256, v_head_dim=32)
    assert (options.passes, options.rep) == (["forward"], 30.0)
    tokens = parse(["--preset", "course", "--device", "cpu", "--tokens", "16384", "--head-dims", "16"])
    assert {(p.batch * p.length, p.heads) for p in problems(tokens)} == {(16384, 0)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "none"], "--preset must be of cpu, quick"),
        (["--batch", "1", "--tokens", "64"], "--batch and --tokens exclude each other"),
        (["--heads", "6", "--kv-heads", "4"], "--kv-heads must divide the 6 heads; got 4"),
        (["--preset", "paper", "--lengths", "1000"], "--tokens (16384) must be a multiple of every length; got 1000"),
        (["--providers", "fast"], "--providers must be taken from naive, compiled, "),
        (["--providers", "fa3"], "--providers must name one that can be measured here; got fa3: measured on a CUDA"),
    ],
)
def test_invalid_arguments(monkeypatch, capsys, arguments, message):
    measure_here(monkeypatch)
    with pytest.raises(SystemExit, match="2"):
        sys.exit(attention.main(["--device", "cpu", *arguments]))
    assert message in capsys.readouterr().err


def test_a_sweep_from_the_command_line_to_its_files(monkeypatch, tmp_path, capsys):
    arguments = [*SMALL, *FAST, "--max-seconds", "99", "--providers", "naive", "tiled", "torch", "fa3"]
    run_here(monkeypatch, attention.main, tmp_path, *arguments)
    frame = pd.read_csv(tmp_path / "results.csv")
    assert len(frame) == 2 * 3 * 6
    status = frame.groupby("provider")["status"].unique().map(list).to_dict()
    assert status["naive"] == status["tiled"] == status["torch-math"] == ["ok"]
    assert status["torch-cudnn"] == ["unsupported"]
    printed = capsys.readouterr()
    assert "No GPU is used" in printed.out
    assert "not measured: fa3 (measured on a CUDA device only)" in printed.out
    assert "backward, ms: float32, causal, d 8" in printed.out
    text = (tmp_path / "tables.md").read_text()
    titles = ("## float32, causal", "### Forward time, ms", "### Memory account, MiB", "- torch-cudnn: unsupported:")
    assert all(title in text for title in titles)
    drawn = {path.name for path in (tmp_path / "plots").glob("*.png")}
    assert {"median-ms-forward-float32-causal-d8.png", "held-mib-backward-float32-causal-d8.png"} <= drawn
    assert "median-ms-both-float32-causal-d8.png" in (tmp_path / "plots" / "results.html").read_text()
    before = (tmp_path / "journal.jsonl").read_bytes()
    run_here(monkeypatch, attention.main, tmp_path, *arguments, "--resume", "--no-plots")
    assert (tmp_path / "journal.jsonl").read_bytes() == before
    arguments += ["--out", str(tmp_path), "--resume", "--passes", "forward"]
    assert attention.main(arguments) == 2
    assert "passes was ['forward', 'backward', 'both'] and is now ['forward']" in capsys.readouterr().err


@pytest.mark.slow
def test_it_runs_as_a_script_from_anywhere(tmp_path):
    command = [sys.executable, str(Path(attention.__file__)), "--dry-run", "--device", "cpu"]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    case = "mask=causal batch=1 heads=4 kv_heads=4 head_dim=32 length=128 v_head_dim=None"
    assert f"{case}: 0.00 GiB\n" in finished.stdout


def test_tables_have_the_memory_account_beside_what_was_measured():
    rows = [
        ROW | {"held_mib": 66.0},
        ROW | {"provider": "flash", "held_mib": 2.03125},
        ROW | {"length": 2048, "held_mib": None, "median_ms": None, "tflops": None, "status": "oom"},
        ROW | {"provider": "gone", "held_mib": None, "median_ms": None, "tflops": None, "status": "unsupported"},
    ]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in tables(pd.DataFrame(rows)).splitlines()]
    # 8 × 1024 × 64 × 4 bytes are 2 MiB, 8 × 1024² × 4 bytes are 32 MiB.
    assert ["1024", "64", "6.00", "32.0", "32.0", "2.00", "98.0", "66.0", "34.0", "2.03"] in lines
    assert ["1024", "64", "66.0 (2.0)", "2.03 (0.0)", "unsupported"] in lines
    assert ["naive", "2048", "oom"] in lines
    assert ["gone", "1024", "unsupported"] not in lines
    assert "Memory account" not in tables(pd.DataFrame([ROW | {"held_mib": 1.0, "heads": 8, "kv_heads": 2}]))


def test_tables_have_the_geometric_mean_of_speed_ups():
    fast = ROW | {"provider": "flash", "speedup_over_naive": 2.0}
    longer = {"length": 2048, "speedup_over_naive": 8.0}
    text = tables(pd.DataFrame([ROW | {"speedup_over_naive": 1.0}, fast, fast | longer]))
    assert "The geometric mean, × (of how many): naive 1.00 (1), flash 4.00 (2)." in text


def test_there_are_no_tables_and_plots_of_cases_that_could_not_be_measured(tmp_path):
    frame = pd.DataFrame([{"case": "a", "status": "error", "reason": "crashed"}])
    assert tables(frame) == ""
    plots(frame, tmp_path)
    assert not list(tmp_path.iterdir())


def test_rooflines_are_drawn_where_the_peak_is_known(tmp_path):
    pytest.importorskip("matplotlib")
    moved = 8 * 64 * 4 * (4 * 1024 + 4 * 1024)
    assert intensity(ROW) == pytest.approx(3.0 * 2.0 * 1e9 / moved)
    draw_rooflines(pd.DataFrame([ROW | {"device": "CPU"}]), tmp_path)
    assert list(tmp_path.iterdir()) == []
    draw_rooflines(pd.DataFrame([ROW]), tmp_path)
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["roofline-backward-float32-full.png"]


def test_beside_other_libraries_plots_call_the_kernels_ours():
    metric = attention.METRICS[0]
    ours = benchmark([1], ["naive", "flash"], metric)
    others = benchmark([1], ["flash", "fa3"], metric)
    assert (ours["line_names"], others["line_names"]) == (["naive", "flash"], ["ours", "fa3"])
    assert ours["styles"][1] == others["styles"][0]


def test_without_triton_the_sweep_runs_without_perf_report(monkeypatch, tmp_path, capsys):
    asked, options = [], parse(SMALL)
    options.providers = ["naive"]
    sweep = SimpleNamespace(rows=asked.append, options=options)
    monkeypatch.setitem(sys.modules, "triton.testing", None)
    attention.drive(sweep, [PROBLEM])
    plots(pd.DataFrame([ROW | {"device": "CPU"}]), tmp_path)
    assert asked == [PROBLEM]
    assert capsys.readouterr().out.count("Triton is not installed") == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_sweep_on_a_gpu(tmp_path):
    sizes = ["--lengths", "256", "512", "--head-dims", "64", "--batch", "2", "--heads", "4", "--dtypes", "bf16", "fp32"]
    chosen = ["--providers", "naive", "flash", "torch", "--rounds", "2", "--device", "cuda", "--out", str(tmp_path)]
    assert attention.main([*sizes, *chosen]) == 0
    frame = pd.read_csv(tmp_path / "results.csv")
    ours = frame[frame["provider"].isin(["naive", "flash"])]
    assert set(ours["status"]) == {"ok"}
    assert set(ours["memory_method"]) == {"cuda allocator"}
    assert (ours["peak_mib"] > 0).all()
    flash = ours[(ours["provider"] == "flash") & (ours["pass"] == "backward") & (ours["dtype"] == "bfloat16")]
    for row in flash.to_dict("records"):
        output = 2 * 4 * row["length"] * 64 * 2
        # The output, the log-sum-exp, and the allocator's rounding.
        assert output <= row["held_mib"] * 2**20 <= output + 2 * 4 * row["length"] * 4 + 4096
    refused = frame[(frame["provider"] == "torch-flash") & (frame["dtype"] == "float32")]
    assert set(refused["status"]) == {"unsupported"}


def test_the_baseline_comes_first_and_names_are_unique():
    names = [provider.name for provider in all_providers(CPU)]
    assert names[0] == "naive"
    assert len(set(names)) == len(names)
