"""The package imports, kernels and all, however it was installed.

Nothing is fetched: the build runs in the environment of the tests, and each new environment finds torch and the other
dependencies there.
"""

import os
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from .environments import INSTALL, ROOT, make_environment, run

pytestmark = [pytest.mark.wheel, pytest.mark.slow]

FILES = ["pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "Makefile"]
FOLDERS = ["cs336_systems", "kernels", "tests", "benchmarks", "tools"]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy to build in, so that no build folder of the developer's own gets into the result or is left behind."""
    copy: Path = tmp_path_factory.mktemp("check out")  # with a space, as some people's folders have
    for name in FILES:
        shutil.copy(ROOT / name, copy)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module")
def modules(checkout) -> list[str]:
    """Every module of the library and py.typed, relative to the root: through the link to kernels/ too."""
    found = [
        Path(folder, name).relative_to(checkout).as_posix()
        for folder, _, names in os.walk(checkout / "cs336_systems", followlinks=True)
        for name in names
        if name.endswith((".py", ".typed"))
    ]
    assert any(name.startswith("cs336_systems/kernels/triton/") for name in found)
    return sorted(found)


@pytest.fixture(scope="module")
def built(checkout, tmp_path_factory) -> Path:
    """The folder with the sdist, and the wheel made from that sdist."""
    out: Path = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, cwd=checkout)
    return out


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def test_wheel_holds_the_library_and_nothing_else(built, checkout, modules, tmp_path):
    """Made from the sdist, or from the checkout."""
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, cwd=checkout)
    for folder in (built, tmp_path):
        names = zipfile.ZipFile(only(folder, "*.whl")).namelist()
        assert sorted(name for name in names if ".dist-info/" not in name) == modules


def test_sdist_holds_the_library_and_what_builds_it(built, modules):
    with tarfile.open(only(built, "*.tar.gz")) as archive:
        files = {member.name.partition("/")[2] for member in archive if member.isfile()}
    generated = {"PKG-INFO", "setup.cfg"} | {name for name in files if ".egg-info/" in name}
    assert files - generated == {*modules, "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"}


def test_an_index_would_take_them(built):
    """Their metadata, and the README that the index shows."""
    assert len([*built.iterdir()]) == 2
    run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir(), cwd=built)


@pytest.mark.parametrize("way", ["wheel", "sdist", "checkout", "editable", "path"])
def test_imports(way, built, checkout, modules, tmp_path):
    python, site_packages = make_environment(tmp_path)
    environment = {}
    if way == "path":
        environment["PYTHONPATH"] = str(checkout)
    else:
        what = {
            "wheel": [only(built, "*.whl")],
            "sdist": [only(built, "*.tar.gz")],
            "checkout": [checkout],
            "editable": ["--editable", checkout],
        }
        run(python, *INSTALL, *what[way], cwd=tmp_path)

    files = [name for name in modules if name.endswith(".py") and not name.endswith("__main__.py")]
    names = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files]
    code = (
        "import importlib, importlib.util, sys\n"
        "for name in sys.argv[1:]: print(importlib.import_module(name).__file__)\n"
        "spec = importlib.util.find_spec('kernels')\n"
        "assert spec is None or spec.origin is None, f'expected no package called kernels; got {spec}'\n"
    )
    where = run(python, "-c", code, *names, cwd=tmp_path, **environment).splitlines()
    expected = checkout if way in ("editable", "path") else site_packages
    assert where == [str(expected / name) for name in files]
