"""The report's suites, and how their parts are run: those that are missing, fail, or take too long, and --resume."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks import report, report_parts, suite, transformer
from benchmarks.report import dry_run, opened, parse, run_all
from benchmarks.report_parts import FOLDER, OK, Outcome, State, arguments_of
from benchmarks.report_suites import PROGRAMS, SUITES, Part, Suite

PROGRAM = """
import argparse, signal, sys, time
from pathlib import Path
parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path)
for name in ("--device", "--commit", "--seconds", "--status"):
    parser.add_argument(name)
for name in ("--resume", "--dry-run"):
    parser.add_argument(name, action="store_true")
options = parser.parse_args()
if options.dry_run:
    sys.exit(print("one row of " + options.device))
options.output.mkdir(parents=True, exist_ok=True)
with open(options.output / "calls", "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
def write():
    (options.output / "tables.md").write_text("# Title\\n\\n| a | b |\\n|:--|--:|\\n| x | 1 |\\n")
    (options.output / "results.csv").write_text("status,kind\\nok,x\\n")
write()
try:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print("measuring")
    time.sleep(float(options.seconds or 0))
except KeyboardInterrupt:
    (options.output / "told").touch()
    sys.exit(130)
if options.status:
    print("the last words", file=sys.stderr)
    sys.exit(int(options.status))
"""
PRINTS = """
print("What a call takes")
print("| who | ms |")
print("|:----|---:|")
print("| me  | 12 |")
"""
FINE = Part("fine", "precision")
PARTS = (
    FINE,
    Part("absent", "breakdown"),
    Part("failing", "memory", ("--status", "3")),
    Part("slow", "transformer", ("--seconds", "60"), minutes=2 / 60),
    Part("printing", "host_overhead"),
)


@pytest.fixture
def programs(tmp_path, monkeypatch) -> Path:
    """A folder of programs that do as they are told, and the quick suite made of them."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("precision", "memory", "transformer"):
        (folder / f"{name}.py").write_text(PROGRAM)
    (folder / "host_overhead.py").write_text(PRINTS)
    monkeypatch.setitem(PROGRAMS, "host_overhead", PROGRAMS["host_overhead"])
    monkeypatch.setitem(SUITES, "quick", Suite("a trial", (), PARTS))
    return folder


def go(programs, output, *arguments):
    options = parse(["--device", "cpu", "--output", str(output), *arguments])
    state = opened(options)
    run_all(state, options, programs)
    return state


def calls(output, name):
    return (output / name / "calls").read_text().splitlines()


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("name", SUITES)
def test_parts_have_names_of_their_own_and_programs_that_are_known(name, on_gpu):
    parts = SUITES[name].parts(on_gpu)
    assert len({part.name for part in parts}) == len(parts)
    assert {part.program for part in parts} == {*PROGRAMS}
    assert all(part.minutes > 0 for part in parts)


def test_every_pass_of_a_years_presets_is_measured_eager_and_compiled(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(suite, "choose_device", torch.device)
    found = [
        (cell.name, cell.config.context_length, cell.arithmetic, cell.compile, cell.mode)
        for part in SUITES["2025"].gpu
        if part.program == "transformer" and part.name != "transformer-warmup"
        for cell in transformer.parse([*part.arguments, "--device", "cuda"]).cells
    ]
    names = [f"{name} (2025)" for name in ("small", "medium", "large", "xl", "2.7B")]
    dtypes, ways, modes = ("float32", "bfloat16"), ("none", "blocks"), ("forward", "step")
    assert {*itertools.product(names, (128, 256, 512, 1024), dtypes, ways, modes)} <= {*found}
    assert {*itertools.product(names, (512,), dtypes, ("none",), ("forward+backward",))} <= {*found}
    assert len({*found}) == len(found)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_takes_the_arguments_that_suites_give_it(program):
    if not (FOLDER / PROGRAMS[program].file).exists():
        pytest.skip("the program is not there")
    module = importlib.import_module(f"benchmarks.{program}")
    for known in SUITES.values():
        for part in (*known.gpu, *known.cpu):
            if part.program == program:
                module.parse(arguments_of(part, Path("out"), "cpu", commit="abc"))
    assert PROGRAMS[program].resumes == _takes(module, "--resume")
    assert PROGRAMS[program].lists == _takes(module, "--dry-run")


def _takes(module: ModuleType, *flag: str) -> bool:
    try:
        module.parse(["--device", "cpu", *flag])
    except SystemExit:
        return False
    return True


def test_each_part_has_its_status_and_the_others_go_on(programs, tmp_path):
    output = tmp_path / "out"
    state = go(programs, output, "--commit", "abc")
    assert {name: outcome.status for name, outcome in state.outcomes.items()} == {
        "fine": "ok",
        "absent": "not there",
        "failing": "failed",
        "slow": "ran out of time",
        "printing": "ok",
    }
    assert state.outcomes["absent"].reason == "there is no benchmarks/breakdown.py"
    assert state.outcomes["failing"].reason == "exit status 3: the last words"
    assert (output / "slow/told").exists()
    assert 2 <= state.outcomes["slow"].seconds < 30
    assert calls(output, "fine") == [f"--device cpu --output {output / 'fine'} --commit abc"]
    page = (output / "report.md").read_text()
    assert "**Ran out of time: its 0.0333 minutes were over.**" in page
    assert "| me  | 12 |" in page
    assert page.count("| x | 1 |") == 3


def test_what_is_complete_is_kept_and_the_rest_gone_on_with(programs, tmp_path, capsys):
    output = tmp_path / "out"
    go(programs, output, "--filter", "fine|failing")
    state = go(programs, output, "--filter", "fine|failing", "--resume")
    assert len(calls(output, "fine")) == 1
    assert [call.endswith("--resume") for call in calls(output, "failing")] == [False, True]
    assert state.outcomes["slow"].status == "not started"
    assert "[1/2] fine: kept" in capsys.readouterr().err


def test_without_resume_everything_is_measured_anew(programs, tmp_path):
    output = tmp_path / "out"
    go(programs, output, "--filter", "fine")
    (output / "fine/journal.jsonl").touch()
    go(programs, output, "--filter", "fine")
    assert len(calls(output, "fine")) == 2
    assert not any("--resume" in call for call in calls(output, "fine"))
    assert not (output / "fine/journal.jsonl").exists()


def test_other_arguments_are_another_measurement(programs, tmp_path, monkeypatch):
    output = tmp_path / "out"
    go(programs, output, "--filter", "fine")
    monkeypatch.setitem(SUITES, "quick", Suite("a trial", (), (Part("fine", "precision", ("--seconds", "0")),)))
    go(programs, output, "--resume")
    assert [("--seconds" in call, "--resume" in call) for call in calls(output, "fine")] == [
        (False, False),
        (True, False),
    ]


def test_after_its_minutes_no_part_is_begun(programs, tmp_path):
    output = tmp_path / "out"
    go(programs, output, "--filter", "fine|failing")
    state = go(programs, output, "--resume", "--minutes", "0")
    assert {name: outcome.status for name, outcome in state.outcomes.items()} == {
        "fine": "ok",
        "absent": "not there",
        "failing": "failed",
        "slow": "not started",
        "printing": "not started",
    }
    assert state.outcomes["slow"].reason == "the 0 minutes were over"
    assert len(calls(output, "failing")) == 1


def test_the_record_of_another_suite_is_not_gone_on_with(programs, tmp_path, capsys):
    output = tmp_path / "out"
    go(programs, output, "--filter", "fine")
    arguments = ["--device", "cpu", "--output", str(output), "--suite", "2025"]
    assert report.main([*arguments, "--resume"]) == 2
    assert "suite was quick and is now 2025" in capsys.readouterr().err
    stored = State.read(output)
    assert stored is not None
    assert stored.outcomes["fine"].status == OK


def test_an_interruption_stops_the_part_and_keeps_what_there_is(programs, tmp_path):
    output = tmp_path / "out"
    script = (
        "import sys; from pathlib import Path; from benchmarks import report; "
        "from benchmarks.report_suites import SUITES, Part, Suite; "
        "parts = (Part('fine', 'precision'), Part('slow', 'transformer', ('--seconds', '60'))); "
        "SUITES['quick'] = Suite('a trial', (), parts); "
        f"report.run_all.__defaults__ = (Path({str(programs)!r}),); sys.exit(report.main(sys.argv[1:]))"
    )
    arguments = [sys.executable, "-c", script, "--device", "cpu", "--output", str(output)]
    process = subprocess.Popen(arguments, cwd=FOLDER.parent, env=os.environ | {"PYTHONPATH": str(FOLDER.parent)})
    try:
        deadline = time.monotonic() + 100
        while "measuring" not in _printed(output / "slow") and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
    assert (output / "slow/told").exists()
    stored = [json.loads((output / name / "outcome.json").read_text())["status"] for name in ("fine", "slow")]
    assert stored == ["ok", "interrupted"]
    assert "| x | 1 |" in (output / "report.md").read_text()


SCRIPT = """
import sys
from pathlib import Path
from benchmarks import report
from benchmarks.report_suites import SUITES, Part, Suite
parts = [Part(name, "transformer", ("--seconds", seconds)) for name, seconds in zip("abcd", ("2", "0.1", "0.1", "2"))]
SUITES["quick"] = Suite("a trial", (), (*parts, Part("failing", "memory", ("--status", "3"))))
report.run_all.__defaults__ = (Path(sys.argv[1]),)
sys.exit(report.main(sys.argv[2:]))
"""


def test_two_reports_share_the_parts_of_a_folder(programs, tmp_path):
    output = tmp_path / "out"
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parent)}
    shared = [sys.executable, "-c", SCRIPT, str(programs), "--device", "cpu", "--output", str(output)]
    both = [
        subprocess.Popen([*shared, "--filter", which], env=environment | {"CUDA_VISIBLE_DEVICES": gpu})
        for which, gpu in (("^[ab]$", "0"), ("^[cd]$", "1"))
    ]
    assert [process.wait(100) for process in both] == [0, 0]
    stored = State.read(output)
    assert stored is not None
    assert {name: outcome.status for name, outcome in stored.outcomes.items()} == {
        **dict.fromkeys("abcd", "ok"),
        "failing": "not started",
    }
    assert [len(calls(output, name)) for name in "abcd"] == [1] * 4
    assert report.main(["--device", "cpu", "--only-assemble", str(output)]) == 0
    page = (output / "report.md").read_text()
    assert "4 of 5 parts are complete" in page
    assert page.count("| x | 1 |") == 4
    # What one of them finds wrong is its own affair; a third goes on with what both left.
    assert subprocess.run([*shared, "--filter", "failing"], env=environment, check=False).returncode == 1
    assert subprocess.run([*shared, "--filter", "^[ad]$", "--resume"], env=environment, check=False).returncode == 0
    assert [len(calls(output, name)) for name in "abcd"] == [1] * 4


def test_the_record_of_another_suite_is_forgotten_without_resume(programs, tmp_path):
    output = tmp_path / "out"
    go(programs, output, "--filter", "fine")
    state = opened(parse(["--device", "cpu", "--output", str(output), "--suite", "2025"]))
    assert {outcome.status for outcome in state.outcomes.values()} == {"not started"}
    assert {outcome.status for outcome in go(programs, output, "--filter", "none").outcomes.values()} == {"not started"}


def _printed(folder: Path) -> str:
    path = folder / report_parts.PRINTED
    return path.read_text() if path.exists() else ""


def test_a_program_that_does_not_stop_is_ended(tmp_path):
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    outcome = report_parts.run([sys.executable, "-c", deaf], tmp_path, 2, grace=0.5)
    assert outcome.status == "ran out of time"
    assert outcome.seconds < 30


def test_a_dry_run_lists_commands_and_what_each_would_measure(programs, tmp_path, capfd):
    options = parse(
        ["--device", "cpu", "--output", str(tmp_path / "out"), "--dry-run", "--filter", "fine|absent|print"]
    )
    dry_run(options, programs)
    lines = capfd.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["fine", "  one row of cpu", "absent", "  not there", "printing"]
    assert shlex.split(lines[0].removeprefix("fine: "))[1:] == [
        str(programs / "precision.py"),
        *("--device", "cpu", "--output", str(tmp_path / "out/fine")),
    ]
    assert not (tmp_path / "out").exists()


def test_attention_goes_on_by_its_folder_alone():
    part = next(part for part in SUITES["quick"].cpu if part.program == "attention")
    assert "--resume" not in arguments_of(part, Path("out"), "cpu", resume=True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--filter", "("], "--filter must be a regular expression"),
        (["--minutes", "-1"], "--minutes must be at least 0; got -1"),
        (["--device", "toaster"], "toaster"),
    ],
)
def test_options_that_mean_nothing_end_the_program(arguments, said, capsys):
    with pytest.raises(SystemExit):
        parse(arguments)
    assert said in capsys.readouterr().err


def test_the_exit_status_tells_of_a_part_that_failed(programs, tmp_path, monkeypatch):
    def run_none(state, options):
        state.set("fine", outcomes.pop(0))

    monkeypatch.setattr(report, "run_all", run_none)
    outcomes = [Outcome(OK), Outcome("not there"), Outcome("failed"), Outcome("ran out of time")]
    arguments = ["--device", "cpu", "--output", str(tmp_path / "out")]
    assert [report.main(arguments) for _ in range(4)] == [0, 0, 1, 1]
