"""What tests of kernels share."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

Rows = list[dict[str, Any]]


def environment() -> dict[str, str]:
    """That of a program which decides for itself whether kernels are interpreted, and finds this checkout."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])])
    return {**inherited, "PYTHONPATH": path}


@pytest.fixture(scope="session")
def compiled_by() -> Iterator[Callable[..., Rows]]:
    """What one of the programs beside this file that compile kernels reports, for some options.

    They are programs because kernels defined under TRITON_INTERPRET, as the tests' are, cannot be compiled.
    """
    command = [sys.executable, str(HERE / "compiling.py")]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment(), **pipes) as process:
        questions, answers = process.stdin, process.stdout
        assert questions is not None
        assert answers is not None

        numbers = itertools.count()

        def run(program: str, *options: str) -> Rows:
            number, answered = next(numbers), None
            questions.write(json.dumps([number, program, options]) + "\n")
            questions.flush()
            while answered != number:  # a test that ran out of time has left its answer
                answer = answers.readline()
                assert answer, "the process that compiles has ended"
                answered, status, printed, said = json.loads(answer)
            assert status == 0, said
            rows: Rows = json.loads(printed.splitlines()[-1])
            return rows

        yield run


@pytest.fixture(scope="session")
def printed_by() -> Callable[..., Any]:
    """What a program beside this file prints last, which is JSON, in a process of its own."""

    def run(program: str, *options: str) -> Any:
        command = [sys.executable, str(HERE / program), *options]
        finished = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
        assert finished.returncode == 0, finished.stderr
        return json.loads(finished.stdout.splitlines()[-1])

    return run
