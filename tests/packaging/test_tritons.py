"""The tests with every other Triton: each is fetched once, whole or not at all, and a failure is one of the run."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cs336_systems.kernels.versions import KNOWN

ROOT = Path(__file__).parents[2]
SCRIPT = (ROOT / "tools/tritons.sh").read_text()
FETCHED = re.findall(r"triton==(\d[\d.]*\d)", SCRIPT)

STAND_IN_FOR_PYTHON = """#!/bin/sh
echo "$@" >> calls
case "$*" in
    *"-m pip "*) [ ! -e no-network ] ;;
    *version_info*) echo cp399 ;;
    *every_triton*) echo "3 passed in 1.0s"; case "$PYTHONPATH" in *3.8.0*) [ ! -e defect ] ;; esac ;;
esac
"""


@pytest.fixture
def run(tmp_path):
    """Runs the script in a folder of its own, with a stand-in for Python, and returns how it went and its calls."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/tritons.sh", tmp_path / "tools")
    (tmp_path / "python").write_text(STAND_IN_FOR_PYTHON)
    (tmp_path / "python").chmod(0o755)

    def run() -> tuple[subprocess.CompletedProcess[str], str]:
        (tmp_path / "calls").write_text("")
        command = ["bash", "tools/tritons.sh", "./python"]
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done, (tmp_path / "calls").read_text()

    return run


def test_every_known_triton_is_pinned_or_fetched():
    pinned = re.findall(r"^triton==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert sorted(f"{version.rpartition('.')[0]}." for version in [*FETCHED, *pinned]) == sorted(KNOWN)


def test_each_is_fetched_once(run, tmp_path):
    done, calls = run()
    assert done.returncode == 0, done.stderr
    assert calls.count("-m pip") == calls.count("every_triton") == len(FETCHED)
    assert "--no-deps" in calls
    names = {path.name for path in (tmp_path / "cache/cs336_systems").iterdir()}
    assert names == {f"triton-{version}-cp399" for version in FETCHED}
    assert "triton 3.9.0 passed 3 passed in 1.0s" in done.stdout
    assert "-m pip" not in run()[1]


def test_what_cannot_be_fetched_fails_and_leaves_nothing(run, tmp_path):
    (tmp_path / "no-network").touch()
    done, calls = run()
    assert done.returncode == 1
    assert "every_triton" not in calls
    assert done.stdout.count("FAILED: it could not be fetched") == len(FETCHED)
    assert not [*(tmp_path / "cache/cs336_systems").iterdir()]
    # One failure fails all, and stops none.
    (tmp_path / "no-network").unlink()
    (tmp_path / "defect").touch()
    done, calls = run()
    assert done.returncode == 1
    assert calls.count("every_triton") == len(FETCHED)
    assert done.stdout.count("FAILED") == 1
    assert "triton 3.8.0 FAILED" in done.stdout
