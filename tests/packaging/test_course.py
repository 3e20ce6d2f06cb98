"""The library beside the course's package, which has its name too: docs/course.md."""

from __future__ import annotations

import pytest

from ..docs.pages import examples
from .environments import INSTALL, ROOT, make_environment, run

pytestmark = [pytest.mark.wheel, pytest.mark.slow]

ASSIGNMENT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "cs336-systems"
version = "1.0.4"

[tool.setuptools]
packages = ["cs336_systems"]
"""
BESIDE = """
import importlib.util, pkgutil, sys, torch
import cs336_systems.own, cs336_attention
from tests import adapters

assert cs336_systems.own.ANSWER == 42 and cs336_systems.__version__ == "1.0.4"
assert not importlib.util.find_spec("cs336_systems.attention")
assert cs336_attention.__version__ != cs336_systems.__version__
for module in pkgutil.walk_packages(cs336_attention.__path__, "cs336_attention."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
loaded = [name for name in sys.modules if name.startswith("cs336_systems.")]
assert loaded == ["cs336_systems.own"], loaded

q, k, v = torch.randn(3, 2, 32, 16, dtype=torch.float64, requires_grad=True)
out = adapters.get_flashattention_autograd_function_pytorch().apply(q, k, v, True)
hidden = torch.ones(32, 32).triu(1).bool()
expected = ((q @ k.mT) / 4).masked_fill(hidden, -torch.inf).softmax(-1) @ v
torch.testing.assert_close(out, expected)
out.sum().backward()
flash = adapters.get_flashattention_autograd_function_triton()
torch.testing.assert_close(flash.apply(q.float(), k.float(), v.float(), True), expected.float())
"""


def test_both_are_imported_side_by_side(tmp_path):
    """The assignment installed as an editable distribution, its tests run from its folder."""
    python, _ = make_environment(tmp_path)
    folder = tmp_path / "assignment"
    (folder / "cs336_systems").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(ASSIGNMENT)
    version = 'import importlib.metadata\n__version__ = importlib.metadata.version("cs336-systems")\n'
    (folder / "cs336_systems/__init__.py").write_text(version)
    (folder / "cs336_systems/own.py").write_text("ANSWER = 42\n")
    (folder / "tests").mkdir()
    (example,) = examples((ROOT / "docs/course.md").read_text())
    (folder / "tests/adapters.py").write_text(example)
    run(python, *INSTALL, "--editable", folder, cwd=tmp_path)

    (folder / "cs336_attention").symlink_to(ROOT / "cs336_systems")
    run(python, "-c", BESIDE, cwd=folder, TRITON_INTERPRET="1")
