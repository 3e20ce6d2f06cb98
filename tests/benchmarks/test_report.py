"""The report: parts are run, resumed and stopped."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from benchmarks import report
from benchmarks.report import PRESETS, parse, parts_of, read_outcome, run_part

from .small_models import measure_here

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import argparse, signal, sys, time
from pathlib import Path
parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path)
for name in ("--device", "--commit", "--seconds", "--status", "--seed"):
    parser.add_argument(name)
for name in ("--resume", "--dry-run", "--no-plots"):
    parser.add_argument(name, action="store_true")
options = parser.parse_args()
if options.dry_run:
    sys.exit(print("one case of " + options.device))
with open(options.out / "calls", "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
(options.out / "tables.md").write_text("# Title\\n\\n| a | b |\\n|:--|--:|\\n| x | 1 |\\n")
(options.out / "journal.jsonl").touch()
try:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print("measuring", flush=True)
    time.sleep(float(options.seconds or 0))
except KeyboardInterrupt:
    (options.out / "interrupted").touch()
    sys.exit(130)
if options.status:
    print("the last line", file=sys.stderr)
    sys.exit(int(options.status))
"""
MODELS = ("transformer", "breakdown", "memory")
PARTS = "good\nfailing = good --status 3\nslow = good --seconds 60\nabsent"
SCRIPT = """
import sys
from pathlib import Path
from benchmarks import report
report.PROGRAMS = Path(sys.argv[1])
parts = ("a = good", "b = good --seconds 2", "c = good")
report.PRESETS["quick"] = ("", chr(10).join(parts))
sys.exit(report.main(sys.argv[2:]))
"""


@pytest.fixture
def programs(tmp_path, monkeypatch):
    folder = tmp_path / "programs"
    folder.mkdir()
    (folder / "good.py").write_text(PROGRAM)
    monkeypatch.setattr(report, "PROGRAMS", folder)
    monkeypatch.setitem(PRESETS, "quick", ("", PARTS))
    return folder


@pytest.fixture
def run(programs, tmp_path):
    """Run a report in the same folder each time; the exit status, and the status of each part."""

    def run(*arguments):
        out = tmp_path / "out"
        status = report.main(["--device", "cpu", "--timeout", "2", "--out", str(out), *arguments])
        return status, {name: read_outcome(out / name) for name in ("good", "failing", "slow", "absent")}

    return run


def calls(folder):
    return (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
def test_parts_have_distinct_names_and_known_programs(preset, gpu):
    parts = parts_of(preset, gpu=gpu)
    assert len({part.name for part in parts}) == len(parts)
    programs = "transformer attention breakdown memory precision training_step generation host_overhead leaderboard"
    of_groups = {"all_reduce", "data_parallel"} if preset != "quick" else set()
    assert {part.program for part in parts} == {*programs.split(), *of_groups}


def test_apples_gpus_do_not_run_groups_of_processes(tmp_path):
    options = argparse.Namespace(preset="2025", filter=None, out=tmp_path, resume=False, dry_run=False)
    programs = {}
    for device in ("mps", "cpu"):
        options.device = torch.device(device)
        programs[device] = {part.program for part in report.chosen_parts(options)}
    assert programs["cpu"] - programs["mps"] == {"all_reduce", "data_parallel"}


def test_every_model_of_a_year_is_measured_with_naive_attention_in_all_ways():
    """At every length, cold and warm, compiled, in both dtypes, and kernel by kernel."""
    parts = {part.name: vars(options_of(part)) for part in parts_of("2025", gpu=True) if part.program in MODELS}
    models, lengths = ["small", "medium", "large", "xl", "2.7B"], [128, 256, 512, 1024]
    for name in models:
        passes, kernels = parts[f"transformer-{name}"], parts[f"breakdown-{name}"]
        assert all((part["models"], part["lengths"]) == ([name], lengths) for part in (passes, kernels))
        assert all(part["dtypes"] == ["float32", "bfloat16"] and not part["tf32"] for part in (passes, kernels))
        assert {"forward", "step"} <= {*passes["modes"]}
        assert passes["providers"] == ["naive", "flash"]
        assert (kernels["modes"], kernels["providers"]) == (["forward", "forward+backward", "step"], ["naive"])
    cold, compiled = parts["transformer-warmup"], parts["transformer-compile"]
    assert all((part["models"], part["providers"][0]) == (models, "naive") for part in (cold, compiled))
    assert (cold["lengths"], cold["warmup_steps"], cold["most_steps"]) == (lengths, [0, 1, 2, 5], cold["steps"])
    assert (compiled["compile"], compiled["modes"]) == (["none", "whole"], ["forward", "step"])
    assert parts["memory-2.7B"]["modes"] == ["forward", "forward+backward", "step"]


def options_of(part):
    parser = importlib.import_module(f"benchmarks.{part.program}").make_parser(["--device", "cuda"])
    return parser.parse_args(part.arguments)


@pytest.mark.parametrize("program", sorted({part.program for name in PRESETS for part in parts_of(name, gpu=True)}))
def test_a_program_takes_the_flags_of_its_parts(program, tmp_path, monkeypatch):
    measure_here(monkeypatch)
    module = importlib.import_module(f"benchmarks.{program}")
    options = parse(["--device", "cpu", "--out", str(tmp_path), "--commit", "abc", "--resume", "--no-plots"])
    every = {part for name in PRESETS for gpu in (False, True) for part in parts_of(name, gpu=gpu)}
    for part in every:
        if part.program == program:
            assert module.main([*report.command_of(part, options)[2:], "--dry-run"]) == 0, part


def pages_with_the_table(folder):
    return {path.stem for path in folder.glob("*.md") if "| x | 1 |" in path.read_text()}


def test_each_part_has_its_status_and_the_others_go_on(run, tmp_path):
    status, outcomes = run("--commit", "abc")
    assert status == 1
    assert {name: (outcome.status, outcome.reason) for name, outcome in list(outcomes.items())[:3]} == {
        "good": ("ok", ""),
        "failing": ("failed", "exit status 3: the last line"),
        "slow": ("timed out", "took longer than 2 s"),
    }
    assert "absent.py" in outcomes["absent"].reason
    out = tmp_path / "out"
    assert (out / "slow/interrupted").exists()
    assert calls(out / "good") == [f"--device cpu --seed 0 --out {out / 'good'} --commit abc"]
    line = next(line for line in (out / "report.md").read_text().splitlines() if line.startswith("| slow"))
    assert [cell.strip() for cell in line.split("|")[2:4]] == ["timed out", "took longer than 2 s"]
    assert "**timed out: took longer than 2 s**" in (out / "slow.md").read_text()
    assert pages_with_the_table(out) == {"good", "failing", "slow"}


def test_what_is_complete_is_not_run_again(run, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    chosen = ["--filter", "good|failing"]
    run(*chosen)
    assert run(*chosen)[0] == 2
    assert "add --resume" in capsys.readouterr().err
    assert run(*chosen, "--resume")[0] == 1
    assert [len(calls(out / name)) for name in ("good", "failing")] == [1, 2]
    assert "--resume" in calls(out / "failing")[1]
    monkeypatch.setitem(PRESETS, "quick", ("", "good --seconds 0"))
    assert run("--resume")[0] == 0
    assert [("--seconds" in call, "--resume" in call) for call in calls(out / "good")] == [(False, False), (True, True)]


def test_no_part_starts_after_the_limit(run, tmp_path):
    status, outcomes = run("--stop-after", "1e-9")
    assert status == 0
    assert {outcome.status for outcome in outcomes.values()} == {"not started"}
    assert "| good " in (tmp_path / "out/report.md").read_text()


def test_an_interruption_keeps_what_there_is(run, tmp_path, capsys):
    begun = tmp_path / "out/slow/calls"

    def interrupt():
        deadline = time.monotonic() + 60
        while not begun.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    status, outcomes = run("--timeout", "60", "--filter", "good|slow")
    thread.join()
    assert status == 130
    assert [outcomes[name].status for name in ("good", "slow")] == ["ok", "interrupted"]
    assert (tmp_path / "out/slow/interrupted").exists()
    assert "--resume continues" in capsys.readouterr().err
    assert pages_with_the_table(tmp_path / "out") == {"good", "slow"}


@pytest.mark.slow
def test_reports_share_a_folder(programs, tmp_path):
    out, environment = tmp_path / "out", os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, str(programs), "--device", "cpu", "--out", str(out)]
    each = [subprocess.Popen([*command, "--filter", f"^({names})$"], env=environment) for names in ("a|b", "c")]
    try:
        assert [process.wait(100) for process in each] == [0, 0]
    finally:
        for process in each:
            process.kill()
            process.wait()
    assert {name: read_outcome(out / name).status for name in "abc"} == dict.fromkeys("abc", "ok")
    assert [len(calls(out / name)) for name in "abc"] == [1, 1, 1]
    assert pages_with_the_table(out) == {"a", "b", "c"}


def test_a_program_that_does_not_stop_is_killed(tmp_path):
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    outcome = run_part([sys.executable, "-c", deaf], tmp_path, 2, grace=0.5)
    assert outcome.status == "timed out"
    assert outcome.seconds < 30


def test_a_dry_run_lists_commands_and_cases(run, tmp_path, capfd):
    assert run("--dry-run", "--filter", "good")[0] == 0
    command, cases = capfd.readouterr().out.splitlines()
    assert command.startswith("good: ")
    assert command.endswith(f"good.py --device cpu --seed 0 --out {tmp_path / 'out/good'}")
    assert cases == "one case of cpu"
    assert not (tmp_path / "out").exists()
    assert run("--filter", "none")[0] == 2
    with pytest.raises(SystemExit):
        parse(["--preset", "2024"])
