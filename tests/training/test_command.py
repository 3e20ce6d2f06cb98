"""The command: how it ends, what it leaves, and that a run that is killed goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from cs336_systems import devices
from cs336_systems.training import Trainer
from cs336_systems.training.__main__ import main
from cs336_systems.training.checkpoint import checkpoints, newest

from .conftest import rows_of

ROOT = Path(__file__).parents[2]


def losses(folder):
    return {row["step"]: row["loss"] for row in rows_of(folder)}


def contents(folder, *, but=""):
    """The content of each file by its path, without those named ``but``."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != but]
    return {path.relative_to(folder): path.read_bytes() for path in files}


@pytest.fixture
def last_line(capsys):
    """Returns the last line that was printed to standard error."""
    return lambda: capsys.readouterr().err.strip().split("\n")[-1]


def test_a_run_and_more_steps(flags, tmp_path, last_line):
    out = tmp_path / "run"
    assert main(flags(out=out, steps=6, keep=2)) == 0
    assert last_line() == f"done; the model is in {out}"
    assert [path.name for path in checkpoints(out / "checkpoints")] == ["step-00000004.pt", "step-00000006.pt"]
    assert main(["--resume", str(out)]) == 2
    assert last_line() == f"error: steps must be more than the 6 that {out} has; got 6"
    first = losses(out)
    (out / "checkpoints/step-00000006.pt").write_bytes(b"damaged")
    with pytest.warns(UserWarning, match=r"step-00000006\.pt in .* is damaged; using step-00000004\.pt"):
        assert main(["--resume", str(out), "--steps", "8"]) == 0
    assert sorted(losses(out)) == list(range(1, 9))
    assert losses(out)[5] == first[5]
    assert json.loads((out / "config.json").read_text())["steps"] == 8


@pytest.mark.parametrize(("given", "taken"), [({}, 3), ({"threads": 2}, 2)])
def test_threads_are_measured_unless_given_and_recorded(flags, tmp_path, monkeypatch, capsys, given, taken):
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("cs336_systems.training.__main__.fastest_threads", lambda work: work() or 3)
    out = tmp_path / "run"
    assert main(flags(out=out, steps=2, **given)) == 0
    assert f"device: cpu, threads: {taken}" in capsys.readouterr().err
    assert json.loads((out / "config.json").read_text())["threads"] == taken
    assert torch.get_num_threads() == before
    assert main(["--resume", str(out), "--steps", "3"]) == 0
    assert f"device: cpu, threads: {taken}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "fastest"), [({1: 0.3, 2: 0.10, 4: 0.099}, 2), ({1: 0.1, 2: 0.2, 4: 0.4}, 1), ({1: 0.6, 2: 0, 4: 0}, 4)]
)
def test_the_fewest_threads_that_are_nearly_the_fastest(monkeypatch, seconds, fastest):
    threads, clock = [4], [0.0]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(devices, "time", SimpleNamespace(perf_counter=lambda: clock[-1]))
    assert devices.fastest_threads(lambda: clock.append(clock[-1] + seconds[threads[-1]])) == fastest
    assert threads[-1] == 4


@pytest.fixture
def one_thread():
    """As many as the other process has: sums have the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_a_run_killed_and_resumed_is_the_run_that_was_not(flags, text, tmp_path, capsys):
    """SIGKILL, somewhere after the first checkpoint and before the last step; the text is gone by then."""
    settings = {"steps": 150, "checkpoint_every": 9, "eval_every": 20}
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    command = [sys.executable, "-m", "cs336_systems.training", *flags(out=killed, **settings)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        while not checkpoints(killed / "checkpoints"):
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        process.kill()
    step = int(newest(killed / "checkpoints").stem.removeprefix("step-"))
    assert 0 < step < 150
    assert main(flags(out=straight, **settings)) == 0
    (text / "a.txt").unlink()
    assert main(["--resume", str(killed)]) == 0
    assert f"from step {step}" in capsys.readouterr().err
    assert losses(killed) == losses(straight)
    assert len(losses(killed)) == 150
    one, other = (torch.load(newest(folder / "checkpoints")) for folder in (killed, straight))
    torch.testing.assert_close(one["model"], other["model"], rtol=0, atol=0)
    torch.testing.assert_close(one["optimizer"]["state"], other["optimizer"]["state"], rtol=0, atol=0)


def test_sigterm_writes_a_checkpoint(flags, tmp_path, last_line, monkeypatch):
    out, train_step = tmp_path / "run", Trainer.train_step

    def stopped(trainer):
        if trainer.step == 4:
            signal.raise_signal(signal.SIGTERM)
        return train_step(trainer)

    monkeypatch.setattr(Trainer, "train_step", stopped)
    assert main(flags(out=out)) == 143
    assert last_line() == f"SIGTERM at step 5; --resume {out} continues"
    assert newest(out / "checkpoints").name == "step-00000005.pt"
    assert max(losses(out)) == 5


def test_a_second_ctrl_c_interrupts_at_once(flags, tmp_path, last_line, monkeypatch):
    def train_step(_):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(Trainer, "train_step", train_step)
    assert main(flags(out=tmp_path / "run")) == 130
    assert "interrupted within a step" in last_line()
    assert signal.getsignal(signal.SIGINT) is before


def test_options_that_cannot_be_used_are_one_line_and_code_2(flags, tmp_path, last_line):
    (tmp_path / "binary").write_bytes(b"\xff\x00\xa4")
    run = tmp_path / "run"
    assert main(flags(out=run, steps=2)) == 0
    resume, other = ["--resume", str(run), "--steps", "4"], tmp_path / "other"
    rows = (run / "metrics.jsonl").read_bytes()
    for arguments, changed, message in (
        ([], {}, "data must be at least one file or folder; got none"),
        (flags(data=tmp_path / "none", out=other), {}, "data must be text files"),
        (flags(data=tmp_path / "binary", out=other), {}, "data must be text in UTF-8"),
        (flags(device="nowhere", out=other), {}, "device must be auto, cuda"),
        (flags(parallel="ddp", out=other), {}, "parallel 'ddp' needs torchrun"),
        (flags(out=tmp_path / "binary"), {}, "File exists"),
        (flags(out=tmp_path / "binary/run"), {}, "Not a directory"),
        (flags(out=run), {}, "has files: --resume"),
        (flags(context_length=5000, out=other), {}, "data must have at least 2 · context_length = 10000 tokens"),
        (flags(val_fraction=0.001, out=other), {}, "validation must have more than context_length = 16 tokens; got 2"),
        (flags(sample_prompt="x" * 17, out=other), {}, "sample_prompt must be at most 16 tokens, context_length; got"),
        ([*resume, "--micro-batch-size", "3"], {}, "micro_batch_size must divide the 4 sequences"),
        ([*resume, "--window", "9"], {}, "window must stay None in a resumed run; got 9"),
        (resume, {"metrics.jsonl": b"{\n" + rows}, "metrics.jsonl must have JSON on each line"),
        (resume, {"checkpoints/step-00000002.pt": b""}, "must have a checkpoint; got step-00000002.pt, damaged"),
    ):
        before = {run / name: (run / name).read_bytes() for name in changed}
        for name, content in changed.items():
            (run / name).write_bytes(content)
        found = contents(run)
        assert main(arguments) == 2
        line = last_line()
        assert line.startswith("error: ")
        assert message in line
        assert contents(run) == found
        for path, content in before.items():
            path.write_bytes(content)
    assert {path.name for path in other.iterdir()} == {"train.bin"}


def test_a_run_that_fails_at_its_first_step_changes_nothing(flags, tmp_path, last_line, monkeypatch):
    """So that a second attempt with other options finds what it needs."""

    out = tmp_path / "run"
    for arguments in (flags(out=out, steps=2), ["--resume", str(out), "--steps", "4", "--log-every", "3"]):
        before = contents(out, but="train.bin")
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "train_step", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
            assert main(arguments) == 1
        assert "--recompute-every 1" in last_line()
        assert contents(out, but="train.bin") == before
        assert main(arguments) == 0
    assert json.loads((out / "config.json").read_text())["log_every"] == 3


@pytest.fixture
def limit_file_size():
    """Limits the size of files, in bytes, like a full disk: ``limit_file_size(1000)``."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [100_000, 900, 10], ids=["checkpoint", "config", "metrics"])
def test_a_full_disk_is_code_1_and_loses_nothing(flags, tmp_path, last_line, limit_file_size, size):
    out = tmp_path / "run"
    assert main(flags(out=out, steps=4)) == 0
    before, rows = contents(out / "checkpoints"), losses(out)
    limit_file_size(size)
    assert main(["--resume", str(out), "--steps", "6"]) == 1
    assert last_line().endswith(f"[Errno 27] File too large; the checkpoints in {out / 'checkpoints'} are intact")
    assert contents(out / "checkpoints") == before
    assert losses(out).items() >= rows.items()
    assert json.loads((out / "config.json").read_text())["steps"] == (6 if size == 100_000 else 4)


@pytest.mark.parametrize("every", ["log_every", "eval_every", "sample_every", "checkpoint_every"])
def test_numbers_that_are_not_finite_are_code_1(flags, tmp_path, last_line, every):
    """The first update spoils the parameters; its loss and its gradient are finite."""
    never = {"log_every": 99, "eval_every": 0, "sample_every": 0, "checkpoint_every": 99}
    settings = {"steps": 5, "learning_rate": 1e38, "grad_clip": 0, "warmup_steps": 0} | never | {every: 1}
    assert main(flags(out=tmp_path / "run", **settings)) == 1
    assert last_line().startswith("error: ")
    assert not checkpoints(tmp_path / "run/checkpoints")


def test_a_window_can_be_any_number(flags, tmp_path):
    assert main(flags(out=tmp_path / "run", steps=1, window=2**70)) == 0
    assert main(flags(out=tmp_path / "other", steps=1)) == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "other")
