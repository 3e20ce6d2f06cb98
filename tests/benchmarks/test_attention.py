"""The attention benchmark, from its command line to its files."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from benchmarks import attention, attention_measure
from benchmarks.attention import parse, problems
from benchmarks.attention_measure import Bound, CaseRun, random_tensors, series_outcome
from benchmarks.attention_providers import Problem, Provider, all_providers
from benchmarks.attention_report import benchmark, draw_rooflines, intensity, plots, tables
from benchmarks.comparison import Context, doubts, plausible_difference, relative_difference
from benchmarks.flags import PASSES
from benchmarks.results import Row, Status

CPU = torch.device("cpu")
SMALL = ["--device", "cpu", "--lengths", "32", "64", "--head-dims", "8", "--batch", "1", "--heads", "2"]
FAST = ["--rounds", "2", "--warmup", "0", "--rep", "0"]
PROBLEM = Problem("float32", "causal", batch=2, heads=4, kv_heads=4, head_dim=8, length=32)


def right(problem: Problem):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=problem.causal)


def failing(error: Callable[[], BaseException], when: Callable[[], bool] = lambda: True):
    def bind(problem: Problem):
        def attend(q, k, v):
            if when():
                raise error()
            return right(problem)(q, k, v)

        return attend

    return bind


def provider(name: str, bind=right, **fields: object) -> Provider:
    return Provider(name=name, group="peers", bind=bind, **fields)


def measured(
    *providers: Provider, problem: Problem = PROBLEM, rows=(), **changes: object
) -> dict[tuple[str, str], Row]:
    options = parse([*SMALL, *FAST, "--max-seconds", "5"])
    vars(options).update(changes)
    found = CaseRun(problem, Context(options, list(rows))).measure(providers)
    assert [(row["provider"], row["pass"]) for row in found] == [(p.name, w) for p in providers for w in PASSES]
    return {(row["provider"], row["pass"]): row for row in found}


def statuses(rows: dict[tuple[str, str], Row], name: str) -> list[str]:
    return [rows[name, which]["status"] for which in PASSES]


def test_every_pass_of_every_provider_is_measured():
    rows = measured(provider("naive"), provider("other"), provider("torch-flash"))
    for (name, which), row in rows.items():
        assert row["status"] == "ok"
        assert 0 < row["min_ms"] <= row["median_ms"] <= row["max_ms"]
        assert len(row["round_ms"]) == row["rounds"] == 2
        assert row["tflops"] == pytest.approx(PROBLEM.flops(which) / row["median_ms"] * 1e-9)
        assert (row["difference"], row["difference_from"]) == (0, "naive")
        assert (row["reference"], row["host_ms"], row["peak_mib"]) == ("torch-flash", None, None)
        assert row["speedup_over_naive"] == (1.0 if name == "naive" else pytest.approx(row["speedup_over_naive"]))
        held = 2 * 4 * 32 * 8 * 4 / 2**20  # the output at least
        assert row["held_mib"] is None if which == "forward" else row["held_mib"] >= held


@pytest.mark.parametrize("layout", ["as given", "heads first", "length first"])
@pytest.mark.parametrize("heads", [0, 1, 4])
def test_layouts_hold_the_same_values(layout, heads):
    problem, shapes = dataclasses.replace(PROBLEM, heads=heads, kv_heads=heads), set()

    def bind(problem: Problem):
        def attend(q, k, v):
            shapes.add(tuple(q.shape))
            assert q.is_contiguous()
            if layout != "length first":
                return right(problem)(q, k, v)
            return right(problem)(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

        return attend

    rows = measured(provider("naive"), provider("other", bind, layout=layout), problem=problem)
    assert statuses(rows, "other") == ["ok"] * 3
    assert rows["other", "forward"]["difference"] == pytest.approx(0, abs=1e-6)
    assert rows["other", "backward"]["difference"] == pytest.approx(0, abs=1e-6)
    axis = (2, 32, 8) if layout == "as given" and not heads else (2, max(1, heads), 32, 8)
    assert shapes == {(2, 32, max(1, heads), 8) if layout == "length first" else axis}


def test_wrong_results_are_refused():
    def unmasked(problem: Problem):
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v)

    def forgetful(problem: Problem):
        return lambda q, k, v: right(problem)(q, k.detach() + 0 * k, v)

    rows = measured(provider("naive"), provider("unmasked", unmasked), provider("forgetful", forgetful))
    assert statuses(rows, "unmasked") == ["error"] * 3
    assert statuses(rows, "forgetful") == ["ok", "error", "error"]
    assert rows["unmasked", "forward"]["reason"].startswith("the output differs from naive's by ")
    assert rows["forgetful", "both"]["reason"] == "the gradients differ from naive's by 1 of the norm"
    assert rows["unmasked", "forward"]["median_ms"] is None
    assert relative_difference([torch.tensor([float("nan")])], [torch.ones(1)]) == float("inf")
    assert plausible_difference("float32", gradients=True, tf32=True) == 1e-2


def test_memory_that_runs_out_is_a_status_and_the_others_go_on():
    def no_memory() -> Exception:
        return torch.OutOfMemoryError("CUDA out of memory")

    rows = measured(
        provider("naive", failing(no_memory)), provider("b"), provider("c", failing(no_memory, torch.is_grad_enabled))
    )
    assert statuses(rows, "naive") == ["oom"] * 3
    assert statuses(rows, "b") == ["ok"] * 3
    assert statuses(rows, "c") == ["ok", "oom", "oom"]
    assert rows["b", "forward"]["difference_from"] == "b"
    assert rows["b", "forward"]["speedup_over_naive"] is None
    assert rows["naive", "both"]["reason"] == "CUDA out of memory"


def test_inputs_that_do_not_fit_are_a_status_of_all(monkeypatch):
    def fail(*arguments: object, **options: object):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "randn", fail)
    rows = measured(provider("naive"), provider("tiled"))
    assert statuses(rows, "naive") == statuses(rows, "tiled") == ["oom"] * 3


def test_refusals():
    def warned(problem: Problem):
        def attend(q, k, v):
            for text in ("Flash kernel not used because:", "Expected dtype half.", "cuDNN has been runtime disabled."):
                warnings.warn(f"{text} (Triggered internally at a.cpp:1.)", stacklevel=1)
            raise RuntimeError("No available kernel. Aborting.\nmore")

        return attend

    refuses, phrases = failing(lambda: ValueError("it must have CUDA tensors")), ("No available kernel",)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = measured(
            provider("by type", refuses, refusals=(ValueError,)),
            provider("not said", refuses),
            provider("by phrase", warned, refusal_phrases=phrases),
            provider("with reasons", warned, refusal_phrases=phrases, warns_why=True),
            provider("before", refusal=lambda problem, which: None if which == "forward" else "no backward"),
        )
    assert statuses(rows, "by type") == ["unsupported"] * 3
    assert statuses(rows, "not said") == ["error"] * 3
    assert rows["by phrase", "both"]["reason"] == "No available kernel. Aborting."
    assert rows["with reasons", "both"]["reason"] == "Expected dtype half."
    assert statuses(rows, "before") == ["ok", "unsupported", "unsupported"]


def test_slow_calls_are_not_repeated():
    row = measured(provider("slow"), max_seconds=1e-9)["slow", "forward"]
    assert row["status"] == "skipped"
    assert "more than the 1e-09 s allowed" in row["reason"]
    assert row["median_ms"] is None
    assert row["probe_ms"] > 0


def earlier(length: int, **fields: object) -> Row:
    series = {"provider": "tiled", "pass": "forward", "dtype": "float32", "mask": "causal", "head_dim": 8}
    sizes = {"batch": 2, "heads": 4, "kv_heads": 4, "length": length}
    return {**series, **sizes, "status": "ok", "median_ms": None, "probe_ms": None, **fields}


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], None),
        ([earlier(16, status="unsupported")], None),
        ([earlier(8, status="oom"), earlier(16, status="oom")], "memory ran out at length 8 of the same series"),
        ([earlier(64, status="oom")], None),
        ([earlier(16, status="oom", mask="full")], None),
        ([earlier(16, status="oom", provider="naive")], None),
        ([earlier(8, median_ms=1), earlier(16, median_ms=300.0)], "about 1.2 s, estimated from length 16: more than"),
        ([earlier(16, batch=4, median_ms=300.0)], None),  # with so many tokens, time grows with the length alone
        ([earlier(16, status="skipped", probe_ms=1500.0)], "about 6.0 s"),
    ],
)
def test_shorter_lengths_decide_what_is_skipped(rows, reason):
    outcome = series_outcome(PROBLEM, "tiled", "forward", rows, 1.0)
    assert (outcome is None) == (reason is None)
    if outcome is not None:
        assert outcome.status is Status.SKIPPED
        assert reason in outcome.reason
        assert statuses(measured(provider("tiled"), rows=rows, max_seconds=1.0), "tiled")[0] == "skipped"


@pytest.mark.parametrize(("mebibytes", "fits"), [(None, True), (1000, True), (0.05, False)])
def test_score_matrices_that_would_not_fit_are_not_tried(monkeypatch, mebibytes, fits):
    assert PROBLEM.quadratic_bytes("forward") == 3 * 2 * 4 * 32**2 * 4
    monkeypatch.setattr(attention_measure, "available_bytes", lambda device: mebibytes and mebibytes * 2**20)
    rows = measured(provider("naive", quadratic=True), provider("tiled"))
    assert statuses(rows, "naive") == (["ok"] if fits else ["skipped"]) * 3
    assert statuses(rows, "tiled") == ["ok"] * 3
    assert attention_measure.would_not_fit(PROBLEM, "both", torch.device("cuda")) is None


def test_passes_are_what_they_say():
    modes: list[bool] = []

    def bind(problem: Problem):
        def attend(q, k, v):
            modes.append(torch.is_grad_enabled())
            return right(problem)(q, k, v)

        return attend

    tensors = random_tensors(dataclasses.replace(PROBLEM, kv_heads=2), CPU, 0)
    assert [x.shape[1] for x in tensors] == [4, 2, 2, 4]
    assert torch.equal(tensors[0], random_tensors(PROBLEM, CPU, 0)[0])
    assert not torch.equal(tensors[0], random_tensors(PROBLEM, CPU, 1)[0])
    bound = Bound(provider("p", bind), PROBLEM, random_tensors(PROBLEM, CPU, 0), CPU)
    for which, expected in (("forward", [False] * 2), ("backward", [True]), ("both", [True] * 2)):
        modes.clear()
        with bound.ready(which) as call:
            call()
            call()
        assert modes == expected
    assert all(x.grad is None for x in bound._inputs)


def test_doubts():
    row = {"median_ms": 1.0, "min_ms": 0.9, "max_ms": 1.1, "tflops": 1.0, "dtype": "float32", "tf32": False}
    assert doubts(row, "NVIDIA H200") == []
    assert "above the 67 TFLOP/s" in doubts(row | {"tflops": 100.0}, "NVIDIA H200")[0]
    assert "3.0 times the fastest" in doubts(row | {"max_ms": 2.7}, "CPU")[0]
    assert doubts(row | {"host_ms": 1.5}, "CPU") == ["host-bound: the call takes the host longer than the device"]
    assert doubts(row | {"median_ms": None}, "CPU") == []


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
    assert (options.passes, options.rep) == (["forward"], 30.0)
    tokens = parse(["--preset", "course", "--device", "cpu", "--tokens", "16384", "--head-dims", "16"])
    assert {(p.batch * p.length, p.heads) for p in problems(tokens)} == {(16384, 0)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "none"], "--preset must be one of cpu, quick"),
        (["--batch", "1", "--tokens", "64"], "--batch and --tokens exclude each other"),
        (["--heads", "6", "--kv-heads", "4"], "--kv-heads must divide the 6 heads; got 4"),
        (["--preset", "paper", "--lengths", "1000"], "--tokens (16384) must be a multiple of every length; got 1000"),
        (["--providers", "fast"], "--providers must be taken from naive, compiled, "),
        (["--providers", "fa3"], "--providers must name one that can be measured here; got fa3: measured on a CUDA"),
    ],
)
def test_invalid_arguments(capsys, arguments, message):
    assert exit_status(["--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


def exit_status(arguments: list[str]) -> object:
    try:
        return attention.main(arguments)
    except SystemExit as ended:
        return ended.code


def test_a_sweep_from_the_command_line_to_its_files(tmp_path, capsys):
    arguments = [*SMALL, *FAST, "--providers", "naive", "tiled", "torch", "fa3", "--out", str(tmp_path)]
    assert attention.main(arguments) == 0
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
    for part in (
        "## float32, causal",
        "### Forward time, ms",
        "### Memory account, MiB",
        "- torch-cudnn: unsupported:",
    ):
        assert part in text
    drawn = {path.name for path in (tmp_path / "plots").glob("*.png")}
    assert {"median-ms-forward-float32-causal-d8.png", "held-mib-backward-float32-causal-d8.png"} <= drawn
    assert "median-ms-both-float32-causal-d8.png" in (tmp_path / "plots" / "results.html").read_text()
    before = (tmp_path / "journal.jsonl").read_bytes()
    assert attention.main([*arguments, "--resume", "--no-plots"]) == 0
    assert (tmp_path / "journal.jsonl").read_bytes() == before
    assert attention.main([*arguments, "--resume", "--passes", "forward"]) == 2
    assert "passes was ['forward', 'backward', 'both'] and is now ['forward']" in capsys.readouterr().err


def test_it_runs_as_a_script_from_anywhere(tmp_path):
    command = [sys.executable, str(Path(attention.__file__)), "--dry-run", "--device", "cpu"]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "mask=causal batch=1 heads=4 kv_heads=4 head_dim=32 length=128: 0.00 GiB\n" in finished.stdout


ROW = earlier(1024, provider="naive", head_dim=64, batch=8, heads=0, kv_heads=0, mask="full", device="NVIDIA H200") | {
    **dict.fromkeys(("min_ms", "max_ms", "speedup_over_naive", "speedup_over_reference", "peak_mib", "held_mib")),
    "pass": "backward",
    "median_ms": 2.0,
    "tflops": 3.0,
}


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
