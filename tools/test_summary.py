"""Write what a run of the tests showed, and on which machine, as a Markdown page.

    python -m pytest -m gpu --junitxml tests.xml
    python tools/test_summary.py tests.xml --command "python -m pytest -m gpu" > docs/results/<machine>/tests.md

Run it on the machine that ran the tests: the page names its device and versions, and the commit of the checkout.
"""

from __future__ import annotations

import argparse
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from cs336_systems.profiling import Environment, collect_environment, markdown_table


@dataclass
class Run:
    """The outcomes of one run: how many tests passed in each folder, which failed, and why others were skipped."""

    seconds: float = 0.0
    passed: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)


def read(path: Path) -> Run:
    """The run that pytest wrote to `path` with ``--junitxml``."""
    run = Run()
    root = ElementTree.parse(path).getroot()
    for suite in root.iter("testsuite"):
        run.seconds += float(suite.get("time", 0.0))
    for case in root.iter("testcase"):
        module = case.get("classname", "")
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            run.failed.append(f"{module}::{case.get('name')}")
        elif skipped is not None:
            run.skipped[re.sub(r"^.*?:\d+: ", "", skipped.get("message", ""))] += 1
        else:
            run.passed[module.rpartition(".")[0]] += 1
    return run


def page(run: Run, environment: Environment, command: str) -> str:
    """The run as Markdown."""
    versions = [f"torch {environment.torch}", f"triton {environment.triton}", f"Python {environment.python}"]
    if environment.driver is not None:
        versions.append(f"driver {environment.driver}")
    commit = f"{environment.commit or 'unknown'}{', with changes' if environment.dirty else ''}"
    counts = f"{run.passed.total()} passed, {len(run.failed)} failed, {run.skipped.total()} skipped"
    lines = [f"# Tests on {torch.cuda.device_count() or 1} × {environment.device}", ""]
    lines += [f"{', '.join(versions)}; {environment.date[:10]}; commit {commit}.", ""]
    folders = [(folder.replace(".", "/"), str(count)) for folder, count in sorted(run.passed.items())]
    lines += [f"`{command}`: **{counts}** in {run.seconds:.0f} s.", "", markdown_table(["folder", "passed"], folders)]
    if run.failed:
        lines += ["", "Failed:", "", *[f"- `{name}`" for name in run.failed]]
    if run.skipped:
        lines += ["", "Skipped:", "", *[f"- {count}: {reason}" for reason, count in run.skipped.most_common()]]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the page; the exit status is 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("junit", type=Path, help="what pytest wrote with --junitxml")
    parser.add_argument("--command", default="python -m pytest", help="the command that ran the tests")
    parser.add_argument("--commit", help="of the files, where they are no repository")
    options = parser.parse_args(arguments)
    run = read(options.junit)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(page(run, collect_environment(device, commit=options.commit), options.command), end="")
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
