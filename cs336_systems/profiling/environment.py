"""What a measurement was made in: device, versions, commit, command. Written beside every result."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cs336_systems.files import write_text

_COMMAND_SECONDS = 10.0


@dataclass(frozen=True)
class Commit:
    """A git commit, and whether tracked files differed from it; both None where there is no repository."""

    identifier: str | None = None
    dirty: bool | None = None


@dataclass(frozen=True)
class DeviceState:
    """A GPU's clocks in MHz, power limit in W and temperature in °C, as `nvidia-smi` reports them at one moment."""

    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    maximum_sm_clock_mhz: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: float | None = None


@dataclass(frozen=True)
class Environment:
    """Everything needed to read a figure later. Fields are None where they do not apply or cannot be read."""

    device: str
    device_type: str
    torch: str
    triton: str | None
    cuda: str | None
    cudnn: str | None
    driver: str | None
    python: str
    platform: str
    cpu_threads: int
    load_average: float | None
    device_memory_bytes: int | None
    commit: str | None
    dirty: bool | None
    command: str
    date: str
    state_at_start: DeviceState | None = None
    packages: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """The same as plain dictionaries, for JSON."""
        return dataclasses.asdict(self)

    def write(self, path: Path) -> None:
        """Write it as JSON to `path`, in one step."""
        write_text(path, json.dumps(self.as_dict(), indent=2) + "\n")


def collect_environment(
    device: torch.device | str,
    *,
    packages: Iterable[str] = (),
    repository: Path | None = None,
    commit: str | None = None,
) -> Environment:
    """Read the environment of `device` now.

    `packages` are distributions whose versions are recorded where they are installed. The commit is that of
    `repository` (default: where this library lies); `commit` states it where the files are not in a repository.
    """
    where = torch.device(device)
    found = git_commit(Path(__file__).parent if repository is None else repository)
    on_cuda = where.type == "cuda"
    cudnn_version = torch.backends.cudnn.version() if on_cuda else None
    driver, state = nvidia_smi(where) if on_cuda else (None, None)
    return Environment(
        device=device_name(where),
        device_type=where.type,
        torch=torch.__version__,
        triton=package_version("triton"),
        cuda=torch.version.cuda if on_cuda else None,
        cudnn=None if cudnn_version is None else str(cudnn_version),
        driver=driver,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        cpu_threads=torch.get_num_threads(),
        load_average=load_average(),
        device_memory_bytes=torch.cuda.get_device_properties(where).total_memory if on_cuda else None,
        commit=found.identifier if commit is None else commit,
        dirty=found.dirty if commit is None else None,
        command=command_line(),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        state_at_start=state,
        packages={name: version for name in packages if (version := package_version(name)) is not None},
    )


def command_line() -> str:
    """How this program was called, the program's path from the working directory where it lies in it."""
    program = Path(sys.argv[0])
    here = Path.cwd()
    called = program.relative_to(here) if program.is_relative_to(here) else program
    return shlex.join([Path(sys.executable).name, str(called), *sys.argv[1:]])


def device_name(device: torch.device | str) -> str:
    """The device's own name: the GPU's, or the processor's model on a CPU."""
    where = torch.device(device)
    if where.type == "cuda":
        return torch.cuda.get_device_name(where)
    if where.type == "cpu":
        return _processor_name()
    return f"{where.type} {platform.machine()}"


def _processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        for line in cpuinfo.read_text().splitlines():
            label, _, value = line.partition(":")
            if label.strip() == "model name" and value.strip():
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"


def load_average() -> float | None:
    """How many processes wanted a processor, averaged over the last minute; None where the system does not say."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def package_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_commit(folder: Path) -> Commit:
    """The commit that `folder` is checked out at, and whether tracked files have changed since."""
    identifier = _output_of(["git", "-C", str(folder), "rev-parse", "HEAD"])
    if not identifier:
        return Commit()
    changes = _output_of(["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"])
    return Commit(identifier, None if changes is None else bool(changes))


_STATE_QUERY = ("clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit", "temperature.gpu")


def nvidia_smi(device: torch.device | str) -> tuple[str | None, DeviceState | None]:
    """The driver's version and the state of a CUDA device, by a query alone: no setting is touched.

    (None, None) where `nvidia-smi` is missing or does not answer.
    """
    # By its identifier: nvidia-smi numbers the machine's devices, CUDA only those that are visible to the process.
    identifier = f"GPU-{torch.cuda.get_device_properties(torch.device(device)).uuid}"
    query = ",".join(("driver_version", *_STATE_QUERY))
    answer = _output_of(["nvidia-smi", f"--id={identifier}", f"--query-gpu={query}", "--format=csv,noheader,nounits"])
    if not answer:
        return None, None
    values = [value.strip() for value in answer.splitlines()[0].split(",")]
    if len(values) != 1 + len(_STATE_QUERY):
        return None, None
    return values[0], DeviceState(*(_number(value) for value in values[1:]))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return None


def _output_of(command: list[str]) -> str | None:
    """The standard output of a command, or None when it is missing, fails or hangs."""
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return finished.stdout.strip() if finished.returncode == 0 else None
