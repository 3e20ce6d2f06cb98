"""Reports of Nsight Systems: the commands, what a report adds to a row of its run, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import shlex
import stat
from contextlib import nullcontext

import pandas as pd
import pytest
import torch

from benchmarks import breakdown
from benchmarks.lib import models
from benchmarks.lib.flags import parse
from benchmarks.parts.breakdown_nsys import case_of, commands
from benchmarks.parts.page import write_pages

from ..profiling.nsys_exports import Export
from .small_models import CASE, FLAGS, changed, run_here

ARGUMENTS = [*FLAGS, "--batch", "2", "--steps", "2", "--warmup-steps", "1", "--profiled-steps", "2"]
ARGUMENTS += ["--modes", "forward", "step"]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """The folder of a run of --nsys-ranges, on a CPU, and its rows."""

    def main(arguments):
        parser = breakdown.make_parser(arguments)
        return models.run_models(dataclasses.replace(breakdown.PROGRAM, isolated=False), parser, arguments)

    monkeypatch.setattr(torch.cuda.profiler, "profile", nullcontext)
    monkeypatch.setattr(torch.cuda.nvtx, "range", nullcontext)
    folder = tmp_path / "breakdown-nsys"
    return folder, run_here(monkeypatch, main, folder, *ARGUMENTS, "--nsys-ranges")


def report_of(case, steps=2):
    """A report of a case, of which a step takes 100 us and has a kernel in each phase, and a softmax."""
    export = Export()
    export.range(case, 0, 100 * steps)
    for start in range(0, 100 * steps, 100):
        phases = models.PHASES_OF["step" if " step " in case else "forward"]
        for phase, begin in zip(phases, range(start, start + 90, 30), strict=False):
            export.range(f"[phase] {phase}", begin, begin + 20)
            export.kernel(f"{phase}_gemm", begin + 1, 8)
        export.range("[attention: softmax] layers.0.attn.attend", start + 5, start + 9)
        export.kernel("softmax_warp_forward", start + 6, 4)
    return export


def read(folder, *reports):
    return breakdown.main(["--device", "cpu", "--nsys-reports", *map(str, reports), "--out", str(folder)])


def test_reports_add_what_a_profiled_run_has(run, tmp_path, capsys):
    folder, rows = run
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert "work_ms" not in rows[0]
    # In any order: a report has the name of its case.
    reports = [report_of(row["case"]).write(tmp_path / f"{row['mode']}.sqlite") for row in rows[::-1]]
    assert read(folder, reports[0]) == 0
    assert f"no report: {rows[0]['case']}\n" in capsys.readouterr().err
    assert read(folder, *reports) == 0
    frame = pd.read_csv(folder / "results.csv")
    assert [str(time) for time in frame["median_ms"]] == [row["median_ms"] for row in rows]
    forward, step = frame.to_dict("records")
    assert step["profiled_ms"] == pytest.approx(0.1)
    assert step["profiler_cost"] == pytest.approx(0.1 / step["median_ms"])
    assert (forward["work_ms"], step["work_ms"]) == pytest.approx((0.012, 0.028))
    assert (step["instances"], step["softmax_ms"]) == pytest.approx((4, 0.004))
    assert (step["measured"], step["top_backward"]) == ("kernels on the device", "backward_gemm")
    assert step["share_matrix_products_forward"] == pytest.approx(8 / 12)
    for name in ("details", "kernels", "regions"):
        assert len([*(folder / name).iterdir()]) == 2
    assert "## Top kernel of each phase" in (folder / "tables.md").read_text()
    assert json.loads((folder / "results.json").read_text())[1]["top"] == step["top"]
    write_pages(tmp_path, plots=False)
    assert "softmax_warp_forward" in (tmp_path / "kernels.md").read_text()


def test_reports_that_do_not_fit_are_refused(run, tmp_path, capsys):
    folder, rows = run
    path = tmp_path / "report.sqlite"

    def refused(*reports, out=folder):
        assert read(out, *reports) == 2
        return capsys.readouterr().err

    text = refused(report_of("another case").write(path))
    assert f"{path} must have the range of one case of {folder}; it has none" in text
    text = refused(report_of(rows[0]["case"], steps=3).write(path))
    assert f"{path} must have 2 ranges '[phase] forward', one for each step; it has 3" in text
    export = Export()
    export.range(rows[0]["case"], 0, 9)
    export.range("[phase] forward", 0, 1)
    export.range("[phase] forward", 2, 3)
    assert f"{path} must have CUDA kernels; Nsight Systems recorded none" in refused(export.write(path))
    assert "--out FOLDER; got " in refused(path, out=tmp_path / "nowhere")
    assert "must be .nsys-rep or .sqlite files that exist; got a.txt" in refused("a.txt")
    assert "work_ms" not in pd.read_csv(folder / "results.csv")


def test_the_report_of_a_case_that_failed_is_passed_over(run, tmp_path):
    folder, rows = run
    journal = folder / "journal.jsonl"
    journal.write_text(journal.read_text().replace('"status": "ok"', '"status": "oom"'))
    export = Export()
    export.range(rows[0]["case"], 0, 9)
    assert read(folder, export.write(tmp_path / "part.sqlite")) == 0
    assert "work_ms" not in pd.read_csv(folder / "results.csv")


def test_reports_are_exported_by_nsys(run, tmp_path, monkeypatch, capsys):
    folder, rows = run
    report = tmp_path / "report.1.nsys-rep"
    report.touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read(folder, report) == 2
    assert f"{report} must be exported by nsys, which is not on PATH" in capsys.readouterr().err
    made = report_of(rows[0]["case"]).write(tmp_path / "made.sqlite")
    nsys = tmp_path / "nsys"
    nsys.write_text(f'#!/bin/sh\n[ "$1 $2 $3" = "export --type sqlite" ] && /bin/cp {shlex.quote(str(made))} "$7"\n')
    nsys.chmod(nsys.stat().st_mode | stat.S_IXUSR)
    assert read(folder, report) == 0
    assert (tmp_path / "report.1.sqlite").exists()
    nsys.write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    assert read(folder, report) == 2
    assert "it failed: broken" in capsys.readouterr().err


def test_the_commands_run_the_same_cases_and_read_their_reports(tmp_path):
    given = ["--models", "small", "--filter", "naive .*step", "--out", str(tmp_path / "out"), "--trace"]
    run, read = (shlex.split(command) for command in commands("breakdown.py", tmp_path / "out", given))
    assert run[:3] == ["nsys", "profile", "--trace=cuda,nvtx"]
    assert run[run.index("--output") + 1] == str(tmp_path / "out-nsys")
    again = breakdown.make_parser([]).parse_args(run[run.index("--models") :])
    assert (again.nsys_ranges, again.trace, again.out) == (True, False, tmp_path / "out-nsys")
    assert (again.models, again.filter.pattern) == (["small"], "naive .*step")
    last = parse(breakdown.make_parser([]), read[2:])
    assert (str(last.nsys_reports[0]), last.out) == (f"{tmp_path / 'out-nsys'}.*.nsys-rep", tmp_path / "out-nsys")


@pytest.mark.parametrize("case", [CASE, changed(mode="forward", compile="blocks", warmup_steps=0, dtype="bfloat16")])
def test_a_row_tells_its_case(case):
    again = case_of(json.loads(json.dumps(case.columns)))
    assert (again.name, again.columns) == (case.name, case.columns)
