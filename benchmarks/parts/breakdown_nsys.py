"""The reports of Nsight Systems on a run of breakdown.py --nsys-ranges, and the rows of that run, put together."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lib.harness import Program, write_results
from benchmarks.lib.models import SIZES, ModelCase
from benchmarks.lib.results import SETTINGS, Row, RowStore, Status
from benchmarks.parts.breakdown_tables import profiled_columns
from cs336_systems.profiling.environment import Environment
from cs336_systems.profiling.module_ranges import PHASE
from cs336_systems.profiling.nsys import read_nsys, read_ranges
from cs336_systems.transformer import TransformerConfig

_FIELDS = ("model", "suite", "batch", "provider", "dtype", "tf32", "compile", "mode", "warmup_steps")
_FORWARD = f"[{PHASE}] forward"


def commands(program: str, out: Path | None, arguments: Sequence[str]) -> tuple[str, str]:
    """The command that runs the same cases under Nsight Systems, with a report for each, and the one that reads them.

    Neither --out nor the reports, which are beside it, are those of the run without Nsight Systems.
    """
    folder = f"{out or 'results/breakdown'}-nsys"
    kept = [text for text in arguments if text not in ("--trace", "--resume", "--dry-run")]
    python = [sys.executable, str(Path(program).resolve())]
    # Of two --out the last one counts.
    run = [*python, *kept, "--nsys-ranges", "--out", folder]
    nsys = "nsys profile --trace=cuda,nvtx --sample=none --cpuctxsw=none --capture-range=cudaProfilerApi"
    nsys += f" --capture-range-end=repeat --output {shlex.quote(folder)}"
    reports = f"{shlex.quote(folder)}.*.nsys-rep"
    read = f"{shlex.join(python)} --nsys-reports {reports} {shlex.join(['--out', folder])}"
    return f"{nsys} {shlex.join(run)}", read


def add_reports(program: Program[ModelCase], parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Add what the reports hold to the rows of ``options.out``, and write its results again; the exit status."""
    folder: Path | None = options.out
    try:
        if folder is None or not (folder / SETTINGS).is_file():
            raise ValueError(f"--nsys-reports needs the folder of the run of --nsys-ranges: --out FOLDER; got {folder}")
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        store = RowStore(folder, settings, resume=True)
        rows = {row["case"]: row for row in store.rows}
        for report in options.nsys_reports:
            row = with_report(report, rows, settings.get("profiled_steps", 0), folder)
            store.replace(row["case"], [row])
            rows[row["case"]] = row
    except (ValueError, RuntimeError, FileNotFoundError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    for name in [name for name, row in rows.items() if row["status"] == Status.OK.value and "work_ms" not in row]:
        print(f"no report: {name}", file=sys.stderr)
    environment = Environment(**json.loads((folder / "environment.json").read_text(encoding="utf-8")))
    run = argparse.Namespace(**vars(options) | settings)
    write_results(program, run, store.rows, environment)
    return 0


def with_report(report: Path, rows: dict[str, Row], steps: int, folder: Path) -> Row:
    """The row of the case that a report is of, with what it holds unless the case failed; writes the case's files.

    Raises ValueError if the report is not of ``steps`` steps of one of the cases, and as `read_nsys`.
    """
    export = exported(report)
    ranges = read_ranges(export)
    found = [name for name in rows if ranges["name"].eq(name).any()]
    if len(found) != 1:
        raise ValueError(f"{report} must have the range of one case of {folder}; it has {found or 'none'}")
    row, forwards = rows[found[0]], int(ranges["name"].eq(_FORWARD).sum())
    if row["status"] != Status.OK.value:
        return row
    if forwards != steps:
        raise ValueError(f"{report} must have {steps} ranges {_FORWARD!r}, one for each step; it has {forwards}")
    ms = float(ranges["milliseconds"][ranges["name"] == row["case"]].iloc[0]) / steps
    unprofiled_ms = row["median_ms"]
    calls = read_nsys(export)
    return row | profiled_columns(calls, case_of(row), steps=steps, ms=ms, unprofiled_ms=unprofiled_ms, out=folder)


def case_of(row: Row) -> ModelCase:
    """The case of a row of breakdown.py; which attention its config names is not known, and is the default."""
    config = TransformerConfig(**{name: row[name] for name in SIZES}, context_length=row["length"])
    return ModelCase(config=config, **{name: row[name] for name in _FIELDS})


def exported(report: Path) -> Path:
    """The SQLite export of a report: itself, or what `nsys export` makes beside it. Raises ValueError if it fails."""
    if report.suffix == ".sqlite":
        return report
    if report.suffix != ".nsys-rep" or not report.is_file():
        raise ValueError(f"--nsys-reports must be .nsys-rep or .sqlite files that exist; got {report}")
    nsys = shutil.which("nsys")
    if nsys is None:
        raise ValueError(f"{report} must be exported by nsys, which is not on PATH: give its .sqlite instead")
    export = report.with_suffix(".sqlite")
    command = [nsys, "export", "--type", "sqlite", "--force-overwrite", "true", "--output", str(export), str(report)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode or not export.is_file():
        raise ValueError(f"{shlex.join(command)} must write {export}; it failed: {(ran.stderr or ran.stdout)[-300:]}")
    return export
