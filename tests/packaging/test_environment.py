"""What make does about its environment, with a stand-in for pip that writes down how it was called."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAND_IN_FOR_PIP = """
import os, sys
with open(os.environ["PIP_LOG"], "a") as log:
    print(*sys.argv[1:], file=log)
sys.exit("install" in sys.argv and int(os.environ["PIP_STATUS"]))
"""


# tools/missing.py reads pyproject.toml with what the real pip brings along.
BESIDE_THE_REAL_ONE = """
from pkgutil import extend_path
__path__ = extend_path(__path__, __name__)
"""


EVERYTHING = ["setuptools", ".[dev]"]


class Project:
    """A folder with a Makefile, its tools, and nothing to install."""

    def __init__(self, root: Path):
        self.root = root
        self.venv = root / ".venv"
        self.pip_log = root / "pip.log"
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, root)
        shutil.copytree(ROOT / "tools", root / "tools", ignore=shutil.ignore_patterns("__pycache__"))
        (root / "stand-in/pip").mkdir(parents=True)
        (root / "stand-in/pip/__init__.py").write_text(BESIDE_THE_REAL_ONE)
        (root / "stand-in/pip/__main__.py").write_text(STAND_IN_FOR_PIP)
        # Installing the real pip takes most of the time that an environment takes to make; the stand-in is found first.
        without_pip = '[ "$1 $2" = "-m venv" ] && shift 2 && set -- -m venv --without-pip "$@"'
        self.python = self.program("python", f'{without_pip}\nexec "{sys.executable}" "$@"')

    def environment(self, *, venv: str = ".venv", python: str | None = None, pip_status: int = 0, torch: str = ""):
        variables = {"PYTHONPATH": str(self.root / "stand-in"), "PIP_LOG": str(self.pip_log)}
        variables |= {"PIP_STATUS": str(pip_status), "TORCH": torch}
        return subprocess.run(
            ["bash", self.root / "tools/environment.sh", venv, python or self.python, "test"],
            env=os.environ | variables,
            capture_output=True,
            text=True,
        )

    def installs(self) -> list[str]:
        """What pip was asked to install since the last call."""
        lines = self.pip_log.read_text().splitlines() if self.pip_log.exists() else []
        self.pip_log.unlink(missing_ok=True)
        return [line.split()[-1] for line in lines if "install" in line.split()]

    def pretend_python(self, name: str, setup: str) -> str:
        """A Python that runs `setup` before what it is told to run with -c."""
        return self.program(name, f"""exec "{sys.executable}" -c 'import sys; {setup}; exec(sys.argv[2])' "$@\"""")

    def program(self, name: str, script: str) -> str:
        """A shell script, as a program that can be run."""
        path = self.root / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)


@pytest.fixture
def project(tmp_path) -> Project:
    root = tmp_path / "a project"
    root.mkdir()
    return Project(root)


def test_installs_once_and_again_when_a_pin_changes(project):
    assert project.environment(python=sys.executable).returncode == 0
    assert project.installs() == EVERYTHING
    again = project.environment(python="no-python-is-needed")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert project.installs() == []
    with (project.root / "constraints.txt").open("a") as constraints:
        constraints.write("colorama==0.4.6\n")
    assert project.environment().returncode == 0
    assert project.installs() == EVERYTHING


def test_another_pytorch_brings_its_own_triton_and_the_newest_is_asked_for_every_time(project):
    for installs in (EVERYTHING, []):
        assert project.environment(torch="2.14").returncode == 0
        assert project.installs() == installs
    pins = (project.venv / "cs336_systems.constraints").read_text().splitlines()
    moved = ("torch", "triton", "setuptools", "numpy")
    assert [pin for pin in pins if pin.startswith(moved)] == ["torch==2.14.*", "setuptools>=77.0.3,<82", "numpy<2.4"]
    assert any(pin.startswith("pytest==") for pin in pins)
    for _ in range(2):
        assert project.environment(torch="newest").returncode == 0
        assert (project.venv / "cs336_systems.constraints").read_text() == ""
        assert "--upgrade --upgrade-strategy eager" in project.pip_log.read_text()
        assert project.installs() == EVERYTHING


def test_what_failed_is_tried_again(project):
    """Also where the environment was left half made."""
    assert project.environment(pip_status=3).returncode == 3
    assert project.installs() == EVERYTHING[:1]
    assert project.environment().returncode == 0
    assert project.installs() == EVERYTHING
    (project.venv / "cs336_systems.stamp").write_text("")
    shutil.rmtree(project.venv / "bin")
    assert project.environment().returncode == 0
    assert (project.venv / "bin/activate").exists()


REFUSED = {
    "torch_of_an_active_environment": (
        {"venv": "active", "torch": "2.14"},
        "expected no TORCH with VENV=active, whose PyTorch stays; got TORCH=2.14",
    ),
    "old": ({"setup": "sys.version_info = (3, 9, 18)"}, "expected Python 3.10 or newer; {} is Python 3.9.18"),
    "missing": ({"python": "not-there"}, "expected a Python 3.10 or newer called not-there; got none that runs"),
    "bare": ({"setup": 'sys.modules["ensurepip"] = None'}, "to have the modules venv and ensurepip"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(project, name):
    arguments, message = REFUSED[name]
    arguments = dict(arguments)
    if "setup" in arguments:
        arguments["python"] = project.pretend_python(name, arguments.pop("setup"))
    done = project.environment(**arguments)
    assert done.returncode == 1
    assert message.format(arguments.get("python")) in done.stderr
    assert project.installs() == []
    assert not project.venv.exists()


def test_an_environment_of_somebody_else_is_left_alone(project):
    project.venv.mkdir()
    (project.venv / "pyvenv.cfg").touch()
    done = project.environment()
    assert done.returncode == 1
    assert "expected .venv to be missing, empty or made by make; got a folder of somebody else's" in done.stderr
    assert [path.name for path in project.venv.iterdir()] == ["pyvenv.cfg"]
    assert project.installs() == []


@pytest.mark.parametrize(
    ("old", "new", "status", "installs"),
    [
        ("test = [", "test = [", 0, []),
        ("test = [", 'test = ["no-such-package>=1.5", ', 0, ["no-such-package>=1.5"]),
        ("pytest-timeout>=2.3", "pytest-timeout>=99", 0, ["pytest-timeout>=99"]),
        ("einops>=0.8", "einops>=99", 1, []),
    ],
    ids=["complete", "missing", "old_tool", "old_dependency"],
)
def test_an_active_environment_gets_only_what_it_lacks(project, old, new, status, installs):
    """A newer tool too; a dependency that is out of range is kept, and told."""
    path = project.root / "pyproject.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    done = project.environment(venv="active")
    assert done.returncode == status, done.stderr
    assert ("einops: expected >=99; got 0." in done.stderr) == (status == 1)
    assert project.installs() == installs
    assert not project.venv.exists()
