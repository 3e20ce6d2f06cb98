"""Every block of Python of README.md and the pages runs as printed, on a CPU, after the blocks above it on its page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from .pages import examples

ROOT = Path(__file__).parents[2]
PATHS = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if "results" not in path.parts)]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PATHS}
RUN_BY = {
    "README.md": "test_readme, test_training",
    "docs/course.md": "test_course",
    "docs/scaling.md": "test_training",
    "docs/training.md": "test_training",
    **{f"docs/measuring/{path.name}": "test_measuring" for path in (ROOT / "docs/measuring").glob("*.md")},
}
"""Pages whose blocks other tests run, which also look at what they print."""
SEVERAL_SECONDS = {"docs/transformer.md"}
NEED_MORE_THAN_A_CPU = {"docs/compat.md": 4, "docs/transformer.md": 1, "docs/tutorial.md": 1}
"""How many blocks of a page are not run: they load weights, import transformers, replace a package or need a GPU."""


def pages_to_run() -> list[object]:
    named = [name for name, page in PAGES.items() if examples(page) and name not in RUN_BY]
    return [pytest.param(name, marks=[pytest.mark.slow] if name in SEVERAL_SECONDS else []) for name in named]


# What is used of torch.compile beyond its own warnings, and of random numbers for DTensor on a CPU.
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch", "ignore:DTensor random operators:UserWarning"
)
@pytest.mark.usefixtures("compile_afresh")
@pytest.mark.parametrize("name", pages_to_run())
def test_blocks_run(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    names: dict[str, object] = {"__name__": "page", "__package__": "page"}
    for number, block in enumerate(examples(PAGES[name]), start=1):
        exec(compile(block, f"{name}, block {number}", "exec", dont_inherit=True), names)


def test_no_block_of_python_is_left_out():
    """Fences of Python are ```python, or ```python notest where no CPU can run them, from the first column on."""
    for name, page in PAGES.items():
        fences = re.findall(r"^ *```+ *\{?\.?py.*$", page, re.MULTILINE)
        notest = fences.count("```python notest")
        assert len(fences) == len(examples(page)) + notest, name
        assert notest <= NEED_MORE_THAN_A_CPU.get(name, 0), name
    assert [name for name in RUN_BY if name not in PAGES] == []
