"""Many benchmarks, and pages of their tables and plots.

    python benchmarks/report.py                                   # `quick`: a few minutes, with a GPU or without one
    python benchmarks/report.py --preset 2025 --dry-run           # the commands, and the cases of each
    python benchmarks/report.py --preset 2025 --out results/2025 --stop-after 600
    python benchmarks/report.py --preset 2025 --out results/2025 --stop-after 600 --resume    # until all is measured
    python benchmarks/report.py --redraw results/2025             # make the pages again

A part of a preset is a run of a benchmark, in a process, with a folder in --out. One that fails or exceeds --timeout
has that status on the first page, and the others go on. Several reports may work on one --out, each with a --filter
and a GPU. There is a page for each question of the course, with its table and plots, as HTML and as Markdown;
report.html leads to them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lib import flags
from benchmarks.lib.harness import default_folder
from benchmarks.lib.isolation import termination_as_interruption
from benchmarks.lib.results import JOURNAL
from benchmarks.parts.page import LOG, OUTCOME, write_pages
from benchmarks.parts.report_presets import OF_SEVERAL_PROCESSES, PRESETS, Part, parts_of
from cs336_systems.files import write_text

PROGRAMS = Path(__file__).resolve().parent
OK, FAILED, TIMED_OUT, INTERRUPTED, NOT_STARTED = "ok", "failed", "timed out", "interrupted", "not started"


@dataclass(frozen=True)
class Outcome:
    """How a part ended: a status, the reason unless it is `OK`, the seconds of its last run, and its arguments."""

    status: str
    reason: str = ""
    seconds: float | None = None
    arguments: tuple[str, ...] = ()


def command_of(part: Part, options: argparse.Namespace) -> list[str]:
    """The command of a part. It continues with the rows that its folder has if --resume is given."""
    command = [sys.executable, str(PROGRAMS / f"{part.program}.py"), *part.arguments]
    command += ["--device", str(options.device), "--seed", str(options.seed), "--out", str(options.out / part.name)]
    command += ["--visits", str(options.visits)] if options.visits > 1 else []
    command += ["--commit", options.commit] if options.commit else []
    return command + ["--resume"] * options.resume + ["--no-plots"] * (not options.plots)


def run_part(command: Sequence[str], folder: Path, limit: float, grace: float = 30.0) -> Outcome:
    """Run a program, with its output in a file of its folder, and interrupt it after ``limit`` seconds."""
    begin, outcome = time.monotonic(), Outcome(TIMED_OUT, f"took longer than {limit:g} s")
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with (folder / LOG).open("wb") as log:
        # In a session that can be killed as a whole. Ctrl-C reaches the program through `_stop` alone.
        output: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, **output, env=environment, start_new_session=True)
        try:
            status = process.wait(limit)
            last = (folder / LOG).read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2].strip()
            outcome = Outcome(FAILED, f"exit status {status}: {last[:300] or 'no output'}") if status else Outcome(OK)
        except subprocess.TimeoutExpired:
            _stop(process, grace)
        except KeyboardInterrupt:
            _stop(process, grace)
            raise
    return dataclasses.replace(outcome, seconds=round(time.monotonic() - begin, 1))


def _stop(process: subprocess.Popen[bytes], grace: float) -> None:
    """Interrupt a program, wait ``grace`` seconds for it to write its tables, and kill what is left of it."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_all(parts: Sequence[Part], options: argparse.Namespace) -> list[Outcome]:
    """Run the parts one after the other, and make the page after each. A part that is complete is not run again."""
    begin, outcomes = time.monotonic(), []
    for number, part in enumerate(parts, 1):
        folder, asked = options.out / part.name, (part.program, *part.arguments, f"--seed={options.seed}")
        outcome = read_outcome(folder)
        complete = outcome.status == OK and outcome.arguments == asked
        if not complete and (options.stop_after is None or time.monotonic() - begin < options.stop_after):
            write_outcome(folder, Outcome(INTERRUPTED, "the report ended, or the part still runs", arguments=asked))
            outcome = run_part(command_of(part, options), folder, options.timeout)
            write_outcome(folder, dataclasses.replace(outcome, arguments=asked))
            _try_pages(options)
        outcomes.append(outcome)
        print(f"[{number}/{len(parts)}] {part.name}: {outcome.status} {outcome.reason}", file=sys.stderr, flush=True)
    return outcomes


def _try_pages(options: argparse.Namespace) -> None:
    """Write the pages; if that fails, say why, and let the other parts be measured."""
    try:
        write_pages(options.out, plots=options.plots)
    except Exception:
        traceback.print_exc()


def read_outcome(folder: Path) -> Outcome:
    """How the part of a folder ended."""
    if not (folder / OUTCOME).exists():
        return Outcome(NOT_STARTED)
    stored = json.loads((folder / OUTCOME).read_text(encoding="utf-8"))
    return Outcome(**stored | {"arguments": tuple(stored["arguments"])})


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """Store how the part of a folder ended."""
    write_text(folder / OUTCOME, json.dumps(dataclasses.asdict(outcome), indent=2) + "\n")


def make_parser() -> argparse.ArgumentParser:
    parser = flags.make_parser(__doc__, "--preset quick", timeout=5400.0)
    text = "start no part after this many seconds"
    parser.add_argument("--stop-after", type=flags.seconds, metavar="S", help=text)
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options. Ends the program with a message if they are invalid."""
    parser = make_parser()
    options = flags.parse(parser, arguments)
    flags.restrict(parser, options, preset=PRESETS)
    return options


def chosen_parts(options: argparse.Namespace) -> list[Part]:
    """The parts that --filter leaves. Raises ValueError if there are none, or one has rows and --resume is missing."""
    device = options.device.type
    every = parts_of(options.preset, gpu=device == "cuda")
    if device not in ("cpu", "cuda"):
        every = [part for part in every if part.program not in OF_SEVERAL_PROCESSES]
    parts = [part for part in every if options.filter is None or options.filter.search(part.name)]
    if not parts:
        names = ", ".join(part.name for part in every)
        raise ValueError(f"--filter must match one of {names}; got {options.filter.pattern!r}")
    begun = [part.name for part in parts if (options.out / part.name / JOURNAL).exists()]
    if begun and not options.resume and not options.dry_run:
        raise ValueError(f"{options.out} has rows of {begun[0]}: add --resume to continue, or choose another --out")
    return parts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; the exit status is 0, 1 if one failed, 2 for invalid input, or 130 when interrupted."""
    options = parse(arguments)
    options.out = options.out or default_folder("report", str(options.device))
    try:
        if options.redraw is not None:
            print(*(f"wrote {path}" for path in write_pages(options.redraw)[:2]), sep="\n")
            return 0
        parts = chosen_parts(options)
    except ValueError as error:
        print(f"report.py: error: {error}", file=sys.stderr)
        return 2
    if options.dry_run:
        for part in parts:
            print(f"{part.name}: {shlex.join(command_of(part, options))}", flush=True)
            subprocess.run([*command_of(part, options), "--dry-run"], check=False)
        return 0
    for part in parts:
        write_outcome(options.out / part.name, read_outcome(options.out / part.name))
    try:
        with termination_as_interruption():
            outcomes = run_all(parts, options)
    except KeyboardInterrupt:
        print(f"interrupted; the same command with --out {options.out} --resume continues", file=sys.stderr)
        return 130
    finally:
        print(*(f"wrote {path}" for path in write_pages(options.out, plots=options.plots)[:2]), sep="\n")
    return int(any(outcome.status in (FAILED, TIMED_OUT) for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
