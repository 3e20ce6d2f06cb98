"""The page that tells what a run of the tests showed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = """
import pytest

@pytest.mark.parametrize("n", range(3))
def test_good(n):
    assert n < {limit}

@pytest.mark.skip(reason="needs a unicorn")
def test_skipped():
    pass
"""


def summary_of(folder: Path, limit: int) -> subprocess.CompletedProcess[str]:
    """The page of a run in which tests from `limit` on fail."""
    test = folder / "test_it.py"
    test.write_text(RUN.format(limit=limit))
    pytest_run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}", str(test)]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # some import torch
    pytest_run += ["--junitxml", str(folder / "run.xml")]
    subprocess.run(pytest_run, cwd=folder, env=environment, capture_output=True, check=False)
    script = [sys.executable, str(ROOT / "tools" / "test_summary.py"), str(folder / "run.xml"), "--commit", "abc"]
    return subprocess.run([*script, "--command", "pytest -q"], capture_output=True, text=True, check=False)


def test_a_page_counts_and_names(tmp_path):
    """Failures are named, and told by the exit status."""
    good, bad = (summary_of(tmp_path, limit) for limit in (3, 1))
    assert (good.returncode, bad.returncode) == (0, 1), good.stderr
    assert "`pytest -q`: **3 passed, 0 failed, 1 skipped**" in good.stdout
    assert "- 1: needs a unicorn" in good.stdout
    assert "commit abc." in good.stdout
    assert "Failed" not in good.stdout
    assert "**1 passed, 2 failed, 1 skipped**" in bad.stdout
    assert "- `test_it::test_good[2]`" in bad.stdout
