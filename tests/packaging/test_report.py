"""`python -m cs336_systems`, with and without Triton, and where something is broken."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cs336_systems import __main__ as report

ROOT = Path(__file__).parents[2]
WITHOUT_TRITON = (
    "import runpy, sys; sys.modules['triton'] = None; runpy.run_module('cs336_systems', run_name='__main__')"
)


def run(*arguments: str) -> list[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_command():
    lines = run("-m", "cs336_systems")
    assert lines[0].startswith(f"Python {platform.python_version()} on ")
    assert any(line.startswith(f"torch {torch.__version__} for CUDA {torch.version.cuda}") for line in lines)
    assert f"imported from {ROOT / 'cs336_systems'}" in lines
    places = [line.partition(": ")[0] for line in lines if line.startswith(("cuda:", "cpu: "))]
    assert places == [*(f"cuda:{number}" for number in range(torch.cuda.device_count())), "cpu"]
    chosen = [line for line in lines if ": chosen" in line]
    assert len(chosen) == 2 * len(places)


def test_without_triton():
    lines = run("-c", WITHOUT_TRITON)
    assert "kernels in Gluon: triton is not installed" in lines
    assert "    triton: it needs the package triton, which is not installed" in lines
    assert lines.count("    sdpa: chosen") >= 2  # of the CPU, and of each GPU


def test_what_is_broken_is_reported_after_the_versions(monkeypatch, capsys):
    def broken():
        raise ImportError("libcuda.so.1")

    monkeypatch.setattr(report, "devices", broken)
    assert report.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "error: ImportError: libcuda.so.1"
    assert any(line.startswith("numpy ") for line in lines)


@pytest.mark.gpu
def test_a_gpu_has_its_capability():
    major, minor = torch.cuda.get_device_capability()
    assert any(f", compute capability {major}.{minor}, " in line for line in report.devices())
