"""Running the parts of a suite: each a process, with what became of it kept in a file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.report_suites import PROGRAMS, Part
from cs336_systems.files import write_text
from cs336_systems.profiling.sweep import CONFIGURATION, JOURNAL, UNDER_WAY

FOLDER = Path(__file__).resolve().parent
"""Where the programs are."""
STATE, OUTCOME = "parts.json", "outcome.json"
LOG, PRINTED, TABLES, RESULTS = "log.txt", "printed.txt", "tables.md", "results.csv"

OK, FAILED, TIMED_OUT, INTERRUPTED = "ok", "failed", "ran out of time", "interrupted"
NOT_THERE, NOT_STARTED = "not there", "not started"

_GRACE_SECONDS = 30.0
"""For a program that was told to stop, to write its tables."""
_LONGEST_REASON = 300


@dataclass(frozen=True)
class Outcome:
    """What became of a part: a status, why, how many seconds its last run took, and what was run."""

    status: str
    reason: str = ""
    seconds: float | None = None
    command: tuple[str, ...] = ()


class State:
    """What became of the parts of a folder: what is run, in one file, and what became of each part, in its own folder.

    Several processes may work on the parts of one folder: each writes of the parts that it runs alone.
    """

    def __init__(self, folder: Path, facts: dict[str, Any], outcomes: dict[str, Outcome]) -> None:
        self.folder, self.facts, self.outcomes = folder, facts, outcomes

    @classmethod
    def read(cls, folder: Path) -> State | None:
        """What the folder has; None where it has nothing."""
        path = folder / STATE
        if not path.exists():
            return None
        facts = json.loads(path.read_text(encoding="utf-8"))
        outcomes = {name: _stored(folder / name / OUTCOME) for name in facts["programs"]}
        return cls(folder, facts, outcomes)

    def set(self, name: str, outcome: Outcome) -> None:
        """Keep what became of a part."""
        self.outcomes[name] = outcome
        write_text(self.folder / name / OUTCOME, json.dumps(asdict(outcome), indent=2) + "\n")

    def write(self) -> None:
        """Write what is run, in one step."""
        write_text(self.folder / STATE, json.dumps(self.facts, indent=2) + "\n")

    def forget(self) -> None:
        """Remove what became of the parts."""
        for name in self.outcomes:
            (self.folder / name / OUTCOME).unlink(missing_ok=True)


def _stored(path: Path) -> Outcome:
    if not path.exists():
        return Outcome(NOT_STARTED)
    fields = json.loads(path.read_text(encoding="utf-8"))
    return Outcome(**(fields | {"command": tuple(fields["command"])}))


def arguments_of(
    part: Part, folder: Path, device: str, *, resume: bool = False, commit: str | None = None
) -> list[str]:
    """What comes after the program's name: the part's arguments, and where and on what it runs."""
    program = PROGRAMS[part.program]
    arguments = [*part.arguments, "--device", device]
    arguments += ["--output", str(folder / part.name)]
    arguments += ["--commit", commit] if commit is not None else []
    return [*arguments, "--resume"] if resume and program.resumes else arguments


def command_of(part: Part, arguments: Sequence[str], programs: Path = FOLDER) -> list[str]:
    """The whole command."""
    return [sys.executable, str(programs / PROGRAMS[part.program].file), *arguments]


def forget(folder: Path) -> None:
    """Remove what a program would go on with, and what it would be taken for; figures of before stay until then."""
    for name in (CONFIGURATION, JOURNAL, UNDER_WAY, TABLES, RESULTS):
        (folder / name).unlink(missing_ok=True)


def run(command: Sequence[str], folder: Path, seconds: float, *, grace: float = _GRACE_SECONDS) -> Outcome:
    """Run a program to its end, or until its time is over; what it prints is in its folder.

    Raises:
        KeyboardInterrupt: the program was told to stop before, and has stopped.
    """
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with (folder / PRINTED).open("wb") as printed, (folder / LOG).open("wb") as log:
        # A session of its own: Ctrl-C reaches the program through `_stop` alone, and all it started can be ended.
        process = subprocess.Popen(command, stdout=printed, stderr=log, env=environment, start_new_session=True)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            _stop(process, grace)
            return _outcome(TIMED_OUT, f"its {seconds / 60:.3g} minutes were over", begin)
        except KeyboardInterrupt:
            _stop(process, grace)
            raise
    if status == 0:
        return _outcome(OK, "", begin)
    return _outcome(FAILED, f"exit status {status}: {_last_words(folder)}", begin)


def _stop(process: subprocess.Popen[bytes], grace: float) -> None:
    """Tell a program to stop, wait for the tables that it writes then, and end whatever is left of it."""
    process.terminate()
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        pass
    finally:
        _end_all(process)
        process.wait()


def _end_all(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # nothing is left of it
        os.killpg(process.pid, signal.SIGKILL)


def _outcome(status: str, reason: str, begin: float) -> Outcome:
    return Outcome(status, reason, round(time.monotonic() - begin, 1))


def _last_words(folder: Path) -> str:
    for name in (LOG, PRINTED):
        lines = (folder / name).read_text(encoding="utf-8", errors="replace").split("\n")
        if said := [line.strip() for line in lines if line.strip()]:
            return said[-1][:_LONGEST_REASON]
    return "it said nothing"
