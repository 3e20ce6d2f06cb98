"""What a measurement was made in: device, versions, commit, command. Written beside every result."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..files import write_text

_STATE_QUERIES = {
    "sm_clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "maximum_sm_clock_mhz": "clocks.max.sm",
    "power_limit_watts": "power.limit",
    "temperature_celsius": "temperature.gpu",
}
DeviceState = dict[str, float | None]
"""A GPU's clocks in MHz, power limit in W and temperature in °C, as `nvidia-smi` reports them at one moment."""


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

    def write(self, path: Path) -> None:
        """Write it as JSON to ``path``, atomically."""
        write_text(path, json.dumps(dataclasses.asdict(self), indent=2) + "\n")


def collect_environment(
    device: torch.device | str,
    *,
    packages: Iterable[str] = (),
    commit: str | None = None,
) -> Environment:
    """Read the environment of ``device`` now.

    Args:
        packages: distributions whose versions are recorded if they are installed.
        commit: recorded instead of that of this library's repository, for files that are in none.
    """
    device = torch.device(device)
    on_cuda = device.type == "cuda"
    dirty = None
    if commit is None:
        commit, dirty = git_commit(Path(__file__).parent)
    cudnn_version = torch.backends.cudnn.version() if on_cuda else None
    driver, state = nvidia_smi(device) if on_cuda else (None, None)
    return Environment(
        device=device_name(device),
        device_type=device.type,
        torch=torch.__version__,
        triton=_package_version("triton"),
        cuda=torch.version.cuda if on_cuda else None,
        cudnn=None if cudnn_version is None else str(cudnn_version),
        driver=driver,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        cpu_threads=torch.get_num_threads(),
        load_average=_load_average(),
        device_memory_bytes=torch.cuda.get_device_properties(device).total_memory if on_cuda else None,
        commit=commit,
        dirty=dirty,
        command=command_line(),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        state_at_start=state,
        packages={name: version for name in packages if (version := _package_version(name)) is not None},
    )


def command_line() -> str:
    """How this program was called, the program's path from the working directory if it lies in it."""
    program, here = Path(sys.argv[0]), Path.cwd()
    called = program.relative_to(here) if program.is_relative_to(here) else program
    return shlex.join([Path(sys.executable).name, str(called), *sys.argv[1:]])


def device_name(device: torch.device | str) -> str:
    """The device's own name: the GPU's, or the processor's model on a CPU."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _processor_name() if device.type == "cpu" else f"{device.type} {platform.machine()}"


def _processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = cpuinfo.read_text().splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine() or "CPU"


def _load_average() -> float | None:
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def _package_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_commit(folder: Path) -> tuple[str | None, bool | None]:
    """The commit that ``folder`` is checked out at, and whether tracked files differ; None without a repository."""
    git = ["git", "-C", str(folder)]
    identifier = _output_of([*git, "rev-parse", "HEAD"])
    if not identifier:
        return None, None
    changes = _output_of([*git, "status", "--porcelain", "--untracked-files=no"])
    return identifier, None if changes is None else bool(changes)


def nvidia_smi(device: torch.device | str) -> tuple[str | None, DeviceState | None]:
    """The driver's version and the state of a CUDA device, by a query alone: no setting is touched.

    (None, None) if `nvidia-smi` is missing or does not answer.
    """
    # By its identifier: nvidia-smi numbers the machine's devices, CUDA only those that are visible to the process.
    identifier = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    query = ",".join(("driver_version", *_STATE_QUERIES.values()))
    answer = _output_of(["nvidia-smi", f"--id={identifier}", f"--query-gpu={query}", "--format=csv,noheader,nounits"])
    driver, *values = (value.strip() for value in (answer or "").partition("\n")[0].split(","))
    if len(values) != len(_STATE_QUERIES):
        return None, None
    numbers = (float(value) if re.fullmatch(r"[\d.]+", value) else None for value in values)  # "[N/A]"
    return driver, dict(zip(_STATE_QUERIES, numbers, strict=True))


def _output_of(command: list[str]) -> str | None:
    """The standard output of a command, or None if it is missing, fails or hangs."""
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=10.0, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return finished.stdout.strip() if finished.returncode == 0 else None
