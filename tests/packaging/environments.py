"""New virtual environments, which find the dependencies in that of the tests: nothing is fetched."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]

# pip would leave the package out if the environment of the tests has it too, but for --ignore-installed.
INSTALL = ("-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=cwd, env=inherited | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def make_environment(folder: Path) -> tuple[Path, Path]:
    """The Python of a new environment in a folder, and where packages are installed in it."""
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv/bin/python"
    site_packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)[:-1])
    # Searched after the environment's own packages. An editable install of the checkout in there is not followed.
    borrowed = [entry for entry in sys.path if entry and Path(entry).is_dir() and Path(entry).resolve() != ROOT]
    (site_packages / "borrowed.pth").write_text("\n".join(borrowed))
    return python, site_packages
