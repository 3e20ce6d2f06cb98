"""Install into the running environment what one extra of pyproject.toml asks for and the environment lacks.

    python tools/missing.py EXTRA

What is there and fits stays, version for version. A tool that is too old is replaced, but not a dependency of the
library: with torch, say, somebody chose that build, so this stops and says what does not fit.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

# pip brings copies of both packages, for an environment that has nothing but pip yet.
if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib
try:
    from packaging.requirements import Requirement
except ModuleNotFoundError:
    from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]

ROOT = Path(__file__).resolve().parent.parent


def requirements(project: dict[str, Any], extra: str) -> Iterator[Requirement]:
    """What the project needs here with this extra, the extras it refers to included."""
    for line in [*project["dependencies"], *project["optional-dependencies"][extra]]:
        requirement = Requirement(line)
        if requirement.name == project["name"]:
            for other in requirement.extras:
                yield from requirements(project, other)
        elif requirement.marker is None or requirement.marker.evaluate():
            yield requirement


def canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def main(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {canonical(requirement.name): requirement for requirement in requirements(project, extra)}
    present: dict[str, str] = {}
    for distribution in metadata.distributions():  # in the order of sys.path: of two, the first is the one imported
        present.setdefault(canonical(distribution.name), distribution.version)

    fitting: dict[str, str] = {}
    unfit: dict[str, str] = {}
    for name in needed.keys() & present.keys():
        fits = needed[name].specifier.contains(present[name], prereleases=True)
        (fitting if fits else unfit)[name] = present[name]
    library = {canonical(Requirement(line).name) for line in project["dependencies"]}
    if wrong := sorted(unfit.keys() & library):
        lines = [f"{name}: expected {needed[name].specifier}; got {present[name]}" for name in wrong]
        sys.exit("\n".join([f"{sys.prefix} has versions that pyproject.toml does not allow:", *lines]))

    missing = sorted(needed.keys() - fitting.keys())
    if not missing:
        return
    print(f"installing into {sys.prefix}: {', '.join(missing)}", flush=True)
    keep = [f"{name}=={version}" for name, version in fitting.items()]
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in pins if line and line[0] != "#" and canonical(Requirement(line).name) not in fitting]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join([*keep, *pins]))
        constraints.flush()
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-c", constraints.name]
        sys.exit(subprocess.run([*command, *(str(needed[name]) for name in missing)], check=False).returncode)


if __name__ == "__main__":
    main(*sys.argv[1:])
