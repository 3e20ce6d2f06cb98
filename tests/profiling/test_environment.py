"""What is recorded of the machine."""

from __future__ import annotations

import json
import subprocess
import types

import pytest
import torch

from cs336_systems.profiling import environment
from cs336_systems.profiling.environment import collect_environment, command_line, git_commit, nvidia_smi


def test_the_environment_of_this_cpu(tmp_path):
    found = collect_environment("cpu", packages=("torch", "no-such-distribution"), commit="abc")
    assert found.torch == torch.__version__
    assert found.device
    assert found.cuda is None
    assert found.driver is None
    assert (found.commit, found.dirty) == ("abc", None)
    assert list(found.packages) == ["torch"]
    found.write(tmp_path / "environment.json")
    assert json.loads((tmp_path / "environment.json").read_text())["cpu_threads"] == torch.get_num_threads()


def git(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_the_commit_and_whether_files_changed_since(tmp_path):
    assert git_commit(tmp_path) == (None, None)
    git(tmp_path, "init")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "one")
    identifier, dirty = git_commit(tmp_path)
    assert (len(identifier), dirty) == (40, False)
    (tmp_path / "other").write_text("untracked files do not count")
    assert git_commit(tmp_path) == (identifier, False)
    (tmp_path / "file").write_text("two")
    assert git_commit(tmp_path) == (identifier, True)


@pytest.fixture
def commands(monkeypatch):
    """Commands that were run, each answered with the next of `answers`."""
    seen, answers = [], []
    properties = types.SimpleNamespace(uuid="1234-5678", total_memory=7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(environment, "_output_of", lambda command: seen.append(command) or answers.pop(0))
    return types.SimpleNamespace(seen=seen, answers=answers)


@pytest.mark.parametrize("answer", [None, "", "580, 1"])
def test_a_silent_nvidia_smi_is_no_error(commands, answer):
    commands.answers.append(answer)
    assert nvidia_smi("cuda") == (None, None)


def test_the_environment_of_a_cuda_device(commands, monkeypatch):
    commands.answers += ["f00", "", "580.159.04, 1, 2, 3, 700.00, [N/A]"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    found = collect_environment("cuda")
    assert (found.device, found.driver) == ("NVIDIA H200", "580.159.04")
    assert (found.cudnn, found.device_memory_bytes) == ("91900", 7)
    assert (found.commit, found.dirty) == ("f00", False)
    names = ("sm_clock_mhz", "memory_clock_mhz", "maximum_sm_clock_mhz", "power_limit_watts", "temperature_celsius")
    assert found.state_at_start == dict(zip(names, (1, 2, 3, 700, None), strict=True))
    # nvidia-smi is asked about the device itself, and changes nothing.
    program, *arguments = commands.seen[-1]
    assert (program, arguments[0]) == ("nvidia-smi", "--id=GPU-1234-5678")
    assert all(argument.startswith(("--id=", "--query-gpu=", "--format=")) for argument in arguments)


def test_a_missing_command_has_no_output():
    assert environment._output_of(["no-such-command-anywhere"]) is None
    assert environment._output_of(["git", "no-such-verb"]) is None


def test_the_processors_name(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: Some CPU\n")
    assert environment._processor_name(tmp_path / "cpuinfo") == "Some CPU"
    assert environment._processor_name(tmp_path / "nowhere")


def test_the_command_has_the_programs_path_from_where_it_was_called(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", "/somewhere/bin/python3")
    monkeypatch.setattr("sys.argv", [str(tmp_path / "benchmarks" / "memory.py"), "--output", "two words"])
    assert command_line() == "python3 benchmarks/memory.py --output 'two words'"
    monkeypatch.setattr("sys.argv", ["/elsewhere/memory.py"])
    assert command_line() == "python3 /elsewhere/memory.py"
