"""One report of many measurements: runs a named suite of the programs here, and makes one page of what they found.

    python benchmarks/report.py                                   # the quick suite, on a GPU where there is one
    python benchmarks/report.py --suite 2025 --dry-run            # its commands, and what each would measure
    python benchmarks/report.py --suite 2025 --minutes 10         # begins no part after ten minutes; then, until done:
    python benchmarks/report.py --suite 2025 --minutes 10 --resume
    python benchmarks/report.py --only-assemble results/report    # makes the page again

Each part is a process with a folder of its own in --output. What is not there, fails, or runs out of time has a status
on the page, and the others go on. The page is report.html, which needs no other file and no network, and report.md.
Several of these may work on one --output, each with a --filter and a GPU of its own.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cell_filter import check_filter
from benchmarks.isolation import termination_as_interruption
from benchmarks.report_page import assemble
from benchmarks.report_parts import (
    FOLDER,
    INTERRUPTED,
    NOT_STARTED,
    NOT_THERE,
    OK,
    Outcome,
    State,
    arguments_of,
    command_of,
    forget,
    run,
)
from benchmarks.report_suites import PROGRAMS, SUITES, Part
from cs336_systems.devices import choose_device
from cs336_systems.profiling.progress import readable_seconds


def build_parser() -> argparse.ArgumentParser:
    """The parser."""
    suites = "\n".join(f"  {name:8}{suite.about}" for name, suite in SUITES.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"suites:\n{suites}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--suite", choices=SUITES, default="quick", help="default: %(default)s")
    add("--device", default="auto", help="cuda, cuda:1, mps or cpu (default: a GPU where there is one)")
    add("--output", type=Path, default=Path("results/report"), metavar="FOLDER", help="default: %(default)s")
    add("--resume", action="store_true", help="run what the output folder does not have yet")
    add("--filter", metavar="REGEX", help="run only parts in whose names it is found")
    add("--dry-run", action="store_true", help="list the commands, and what each would measure")
    add("--minutes", type=float, metavar="N", help="begin no part after so many minutes")
    add("--part-minutes", type=float, metavar="N", help="stop a part after so many minutes (default: each its own)")
    add("--only-assemble", type=Path, metavar="FOLDER", help="make the page again of what is in a folder")
    add("--commit", help="the commit to record where the checkout is not in a git repository")
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Ends the program with a message for what cannot be done."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        options.device = choose_device(options.device)
    except ValueError as error:
        parser.error(str(error))
    check_filter(parser, options)
    for name in ("minutes", "part_minutes"):
        value = getattr(options, name)
        if value is not None and value < 0:
            parser.error(f"--{name.replace('_', '-')} must be at least 0; got {value:g}")
    return options


def parts_of(options: argparse.Namespace) -> list[Part]:
    """The parts of the suite that --filter leaves."""
    parts = SUITES[options.suite].parts(options.device.type == "cuda")
    return [part for part in parts if options.filter is None or options.filter.search(part.name)]


def dry_run(options: argparse.Namespace, programs: Path = FOLDER) -> None:
    """Print each command, and below it what the program says it would measure."""
    for part in parts_of(options):
        arguments = arguments_of(part, options.output, str(options.device))
        command = command_of(part, arguments, programs)
        print(f"{part.name}: {shlex.join(command)}", flush=True)
        if not Path(command[1]).exists():
            print(f"  {NOT_THERE}: {command[1]}", flush=True)
        elif PROGRAMS[part.program].lists:
            listed = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, check=False)
            said = listed.stdout if listed.returncode == 0 else listed.stderr
            print("\n".join(f"  {line}" for line in said.splitlines()), flush=True)


def opened(options: argparse.Namespace) -> State:
    """The record of the output folder, with every part of the suite in it.

    Raises:
        ValueError: the folder has the record of another suite or device, and --resume is to go on with it.
    """
    suite = SUITES[options.suite]
    parts = suite.parts(options.device.type == "cuda")
    facts = {"suite": options.suite, "about": suite.about, "device": str(options.device)}
    before = State.read(options.output)
    if before is not None:
        differing = [
            f"{name} was {before.facts.get(name)} and is now {facts[name]}"
            for name in ("suite", "device")
            if before.facts.get(name) != facts[name]
        ]
        if differing and options.resume:
            raise ValueError(f"{options.output} has another report: {'; '.join(differing)}. Choose another folder")
        if differing:
            before.forget()
    state = State(options.output, facts | {"programs": {part.name: part.program for part in parts}}, {})
    state.write()
    return State.read(options.output) or state


def run_all(state: State, options: argparse.Namespace, programs: Path = FOLDER) -> None:
    """Run the parts one after another, and make the page after each.

    Raises:
        KeyboardInterrupt: the run was told to stop; what there is by then is kept, and on the page.
    """
    parts = parts_of(options)
    deadline = time.monotonic() + (float("inf") if options.minutes is None else 60 * options.minutes)
    for number, part in enumerate(parts, 1):
        before = state.outcomes[part.name]
        same = options.resume and before.command == measurement(part)
        if same and before.status == OK:
            _say(number, parts, part, "kept")
            continue
        outcome = _run_part(part, options, programs, state, deadline, go_on=same)
        state.set(part.name, outcome)
        assemble(options.output)
        took = "" if outcome.seconds is None else f", {readable_seconds(outcome.seconds)}"
        _say(number, parts, part, f"{outcome.status}{took}{f' ({outcome.reason})' if outcome.reason else ''}")


def measurement(part: Part) -> tuple[str, ...]:
    """What a part measures, wherever its results go: runs with another are not gone on with."""
    return (PROGRAMS[part.program].file, *part.arguments)


def _run_part(
    part: Part, options: argparse.Namespace, programs: Path, state: State, deadline: float, *, go_on: bool
) -> Outcome:
    """Run one part, if it is there and there is time for it."""
    asked = measurement(part)
    if not (programs / asked[0]).exists():
        return Outcome(NOT_THERE, f"there is no benchmarks/{asked[0]}")
    if time.monotonic() >= deadline:
        # What an earlier run began stays what it is: it can still be gone on with.
        before = state.outcomes[part.name]
        return before if go_on else Outcome(NOT_STARTED, f"the {options.minutes:g} minutes were over")
    folder = options.output / part.name
    if not go_on:
        forget(folder)
    arguments = arguments_of(part, options.output, str(options.device), resume=go_on, commit=options.commit)
    minutes = part.minutes if options.part_minutes is None else options.part_minutes
    state.set(part.name, Outcome(INTERRUPTED, "the report was stopped while it ran, or it runs still", command=asked))
    outcome = run(command_of(part, arguments, programs), folder, 60 * minutes)
    return Outcome(outcome.status, outcome.reason, outcome.seconds, asked)


def _say(number: int, parts: Sequence[Part], part: Part, what: str) -> None:
    print(f"[{number}/{len(parts)}] {part.name}: {what}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit status is 0, 1 where a part failed or took too long, 2 for what cannot be, 130 interrupted."""
    options = parse(arguments)
    if options.dry_run:
        dry_run(options)
        return 0
    folder = options.only_assemble or options.output
    try:
        if options.only_assemble is not None:
            ran = []
        else:
            state = opened(options)
            with termination_as_interruption():
                run_all(state, options)
            ran = [state.outcomes[part.name] for part in parts_of(options)]
        written = assemble(folder)
    except (ValueError, FileNotFoundError) as error:
        print(f"report.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        assemble(folder)
        print("interrupted; the same command with --resume goes on", file=sys.stderr)
        return 130
    print("\n".join(f"wrote {path}" for path in written))
    return int(any(outcome.status not in (OK, NOT_THERE, NOT_STARTED) for outcome in ran))


if __name__ == "__main__":
    sys.exit(main())
