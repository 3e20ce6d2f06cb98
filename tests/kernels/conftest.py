"""What tests of kernels share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

Rows = list[dict[str, Any]]


@pytest.fixture(scope="session")
def compiled_by() -> Callable[..., Rows]:
    """What one of the programs beside this file that compile kernels reports, for some options.

    They are programs because kernels defined under TRITON_INTERPRET, as the tests' are, cannot be compiled.
    """

    def run(program: str, *options: str) -> Rows:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
        finished = subprocess.run(
            [sys.executable, str(HERE / program), *options],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr
        rows: Rows = json.loads(finished.stdout.splitlines()[-1])
        return rows

    return run
