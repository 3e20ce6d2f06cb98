"""pyproject.toml, constraints.txt and the tree say the same."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

tomllib = pytest.importorskip("tomllib")  # Python 3.11

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def folders_with_modules() -> set[str]:
    # pathlib follows no symbolic link on its way down, so the kernels are added by hand.
    modules = [*ROOT.glob("cs336_systems/**/*.py"), *ROOT.glob("cs336_systems/kernels/**/*.py")]
    return {".".join(module.parent.relative_to(ROOT).parts) for module in modules}


def direct_requirements() -> dict[str, Requirement]:
    lines = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]
    parsed = [Requirement(line) for line in [*lines, *PYPROJECT["build-system"]["requires"]]]
    return {canonicalize_name(each.name): each for each in parsed if each.name != PROJECT["name"]}


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    parsed = [Requirement(line) for line in lines]
    return {
        canonicalize_name(each.name): str(each.specifier).removeprefix("==")
        for each in parsed
        if each.marker is None or each.marker.evaluate()
    }


def test_every_folder_with_modules_is_found_as_a_package():
    setuptools = pytest.importorskip("setuptools")
    found = setuptools.find_namespace_packages(ROOT, **PYPROJECT["tool"]["setuptools"]["packages"]["find"])
    assert folders_with_modules() == set(found)


def test_kernels_shadow_no_other_package():
    assert (ROOT / "cs336_systems/kernels").resolve() == ROOT / "kernels"
    assert not (ROOT / "kernels/__init__.py").exists()


def test_every_direct_dependency_is_pinned_within_its_range():
    assert direct_requirements().keys() == pins().keys()
    for name, requirement in direct_requirements().items():
        assert pins()[name] in requirement.specifier, name


@pytest.mark.parametrize(
    ("imports", "module"),
    [
        ("cs336_systems, cs336_systems.compat", "torch"),
        ("cs336_systems.attention, cs336_systems.transformer", "torch._dynamo"),
    ],
    ids=["package", "attention"],
)
def test_importing_does_not_import(imports, module):
    """The compiler takes as long as torch itself, and is imported where something is compiled."""
    code = f"import sys, {imports}; print({module!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_changelog_begins_with_this_version():
    versions = re.findall(r"^## (\S+)", (ROOT / "docs/changelog.md").read_text(), re.MULTILINE)
    assert versions[0] == PROJECT["version"]


def test_classifiers_begin_with_the_oldest_python_supported():
    prefix = "Programming Language :: Python :: 3."
    minors = [int(each.removeprefix(prefix)) for each in PROJECT["classifiers"] if each.startswith(prefix)]
    assert minors == [*range(minors[0], minors[-1] + 1)]
    assert PROJECT["requires-python"] == f">=3.{minors[0]}"


def test_version(monkeypatch):
    source = (ROOT / "cs336_systems/__init__.py").read_text()
    namespace: dict[str, str] = {"__name__": "cs336_systems"}

    monkeypatch.setattr(metadata, "version", lambda name: {"cs336_systems": "1.2.3"}[name])
    exec(source, namespace)
    assert namespace["__version__"] == "1.2.3"

    def not_installed(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", not_installed)
    exec(source, namespace)
    assert namespace["__version__"] == "0+uninstalled"
