"""The report: parts are run, resumed and stopped, and their tables and plots are on one page."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pandas as pd
import pytest
import torch

from benchmarks import report
from benchmarks.page import write_pages
from benchmarks.report import PRESETS, parse, parts_of, read_outcome, run_part
from benchmarks.tables import environment_lines
from cs336_systems.profiling.environment import collect_environment

from .small_models import measure_here

ROOT = Path(__file__).resolve().parents[2]
PIXEL = bytes.fromhex("89504e470d0a1a0a0000000d49484452")
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


@pytest.fixture
def folder(tmp_path):
    """A part with rows that answer a question, and a part that failed and answers none."""
    environment = collect_environment("cpu", commit="abc")
    columns = (
        "case,dtype,mask,length,head_dim,status,reason,provider,pass,median_ms,held_mib,round_ms,speedup_over_naive\n"
    )
    figures = (
        "ok,,flash,forward,2.5,,2.5;2.5,2",
        "ok,,naive,forward,5.0,,5.0;5.0,1",
        "ok,,flash,backward,3.5,7.0,3.5;3.5,8",
        "oom,full,naive,backward,,,,",
    )
    rows = "".join(f"a,float32,full,256,16,{each}\n" for each in figures)
    for name in ("attention", "host"):
        (tmp_path / name / "plots").mkdir(parents=True)
        environment.write(tmp_path / name / "environment.json")
        lines = "\n".join(environment_lines(environment))
        table = "## float32 <b>\n\n| a | ms |\n|:--|--:|\n| x\\|y | 2.5 |\n"
        (tmp_path / name / "tables.md").write_text(f"# Attention\n\n{lines}\n\n- by hand & <by> heart\n\n{table}")
        (tmp_path / name / "plots/median-ms-forward-float32-full-d64.png").write_bytes(PIXEL)
    (tmp_path / "attention/results.csv").write_text(columns + rows)
    report.write_outcome(tmp_path / "host", report.Outcome("failed", "exit status 1: <no> memory", 3.0))
    return tmp_path


def test_a_question_has_a_page_with_the_answer_the_table_and_the_rows(folder):
    (folder / "answers").mkdir()
    (folder / "answers/attention.md").write_text("It costs *much*.\n")
    write_pages(folder)
    text = (folder / "attention.md").read_text()
    title, answer, *_ = text.split("\n\n")
    assert (title, answer) == ("# What does attention cost, and where does memory end?", "It costs *much*.")
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| 256")
    ]
    assert lines[:2] == [["256", "16", "5.00", "2.50", "oom", "3.50"], ["256", "16", "oom", "7.00", "oom"]]
    assert ["256", "16", "float32", "naive", "backward", "oom"] in [line[:6] for line in lines]
    assert "![attention backward ms](attention-backward-ms.png)" in text
    assert "by hand" not in text
    assert "Rows: [attention.csv](attention.csv), [attention.json](attention.json)" in text
    rows = pd.read_csv(folder / "attention.csv")
    assert [*rows["median_ms"]][:3] == [2.5, 5.0, 3.5]
    assert set(rows["part"]) == {"attention"}
    assert "round_ms" not in rows
    assert "recompute_every" not in rows
    again = json.loads((folder / "attention.json").read_text())
    assert [row[again["columns"].index("held_mib")] for row in again["data"]] == [None, None, 7.0, None]
    assert again["columns"] == [*rows]


@pytest.mark.parametrize("missing", [False, True])
def test_rows_of_two_devices_are_never_in_one_table_or_plot(folder, missing):
    rows = pd.read_csv(folder / "attention/results.csv")
    (folder / "attention-backward-ms.png").touch()  # of the one device that there was
    (folder / "attention-limit").mkdir()
    others = rows.assign(device="NVIDIA B", median_ms=rows["median_ms"] * 100)
    others.to_csv(folder / "attention-limit/results.csv", index=False)
    rows.assign(**{} if missing else {"device": "NVIDIA A"}).to_csv(folder / "attention/results.csv", index=False)
    write_pages(folder)
    one, plot = ("unknown device", "unknown-device") if missing else ("NVIDIA A", "nvidia-a")
    page = (folder / "attention.md").read_text()
    tables = [each.partition("\n") for each in page.split("\n## ")[1:] if not each.startswith("Measured")]
    times = {title: text for title, _, text in tables if title.endswith("float32, without a mask, ms")}
    title = "Attention alone, float32, without a mask, ms"
    assert {name: " 350 " in text for name, text in times.items()} == {
        f"{one}: {title}": False,
        f"NVIDIA B: {title}": True,
    }
    assert all(name.startswith((f"{one}: ", "NVIDIA B: ")) for name, *_ in tables)
    drawn = {path.name for path in folder.glob("attention-*-ms.png")}
    assert drawn == {
        f"attention-{each}-{which}-ms.png" for each in (plot, "nvidia-b") for which in ("forward", "backward")
    }
    assert len(pd.read_csv(folder / "attention.csv")) == 2 * len(rows)


def test_other_parts_have_pages_of_their_own_and_the_first_page_leads_to_all(folder):
    paths = write_pages(folder)
    assert [path.name for path in paths] == [
        *("report.md", "report.html", "attention.md", "attention.html", "host.md", "host.html"),
    ]
    index, host = paths[0].read_text(), (folder / "host.md").read_text()
    assert "- [What does attention cost, and where does memory end?](attention.md)\n" in index
    assert "- [host](host.md)\n" in index
    parts = [[cell.strip() for cell in line.split("|")[1:-1]] for line in index.splitlines() if line.startswith("| ")]
    assert ["attention", "–", "–", "–", "3 of 4"] in parts
    assert ["host", "failed", "exit status 1: <no> memory", "3.00", "–"] in parts
    assert ["attention", "flash forward", "speedup over naive", "2.00", "1"] in parts
    assert "naive forward" not in index  # what the others are compared with
    assert host.startswith("# host\n\n**failed: exit status 1: <no> memory**")
    assert "# Attention" not in host
    assert "- device: " not in host
    assert "## float32 <b>" in host
    assert host.count("- by hand & <by> heart") == 1


def test_a_page_as_one_file_of_html(folder):
    write_pages(folder)
    html = (folder / "host.html").read_text()
    assert "<b>" not in html
    assert "&lt;no&gt; memory" in html
    assert '<td style="text-align:right">2.5</td>' in html
    assert '<td style="text-align:left">x|y</td>' in html
    assert html.count('<div class="scroll"') == html.count("</table></div>") == 2
    assert "<figcaption>median ms forward float32 full d64, of host</figcaption></figure>" in html
    assert 'src="data:image/png;base64,' in html
    assert '<a href="report.html">All pages</a>' in html
    assert '<a href="host.html">host</a>' in (folder / "report.html").read_text()
    for anchor in (part.split('"')[0] for part in html.split('href="#')[1:]):
        assert f'id="{anchor}"' in html
    (folder / "host/tables.md").write_text("![gone](gone.png)\n")
    write_pages(folder)
    assert "gone: there is no such file." in (folder / "host.html").read_text()


def test_a_part_whose_rows_came_later_has_no_page_of_its_own(folder):
    (folder / "transformer-warmup").mkdir()
    report.write_outcome(folder / "transformer-warmup", report.Outcome("not started"))
    write_pages(folder)
    assert (folder / "transformer-warmup.md").exists()
    rows = "case,model,batch,length,parameters,mode,warmup_steps,status,median_ms\na,small,4,128,9,step,1,ok,2.5\n"
    (folder / "transformer-warmup/results.csv").write_text(rows)
    write_pages(folder, plots=False)
    assert (folder / "warm-up.md").exists()
    assert not (folder / "transformer-warmup.md").exists()
    assert not (folder / "transformer-warmup.html").exists()


def test_the_pages_are_made_again_of_any_folders(folder, capsys):
    (folder / "host/tables.md").write_text("# A\n\nchanged\n")
    assert report.main(["--redraw", str(folder)]) == 0
    assert capsys.readouterr().out == f"wrote {folder / 'report.md'}\nwrote {folder / 'report.html'}\n"
    assert "<p>changed</p>" in (folder / "host.html").read_text()
    assert report.main(["--redraw", str(folder / "attention")]) == 2
    assert "must have folders with one of outcome.json" in capsys.readouterr().err
