"""The command: what it prints and how it ends, in this process and as a program that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cs336_systems.training import __main__ as command
from cs336_systems.training.checkpoint import checkpoints, latest
from cs336_systems.training.metrics import read_rows

ROOT = Path(__file__).parents[2]


def program(*arguments, **keywords):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "cs336_systems.training", *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **keywords,
    )


def losses(folder):
    return {row["step"]: row["loss"] for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "train"}


def wait_for_checkpoint(process, folder):
    for _ in range(1200):
        if latest(folder / "checkpoints") or process.poll() is not None:
            break
        time.sleep(0.05)
    assert process.poll() is None, process.stderr.read()


def test_help_names_the_options_and_the_exit_codes(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    for word in ("--data", "--resume", "--dry-run", "exit codes", "examples:"):
        assert word in text


def test_a_dry_run_says_what_would_be_and_does_nothing(flags, text, tmp_path, capsys):
    assert command.main([*flags(out=tmp_path / "run"), "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert "parameters, 320 tokens, context 16" in said
    assert "optimizer" in said
    tokens = sum(file.stat().st_size + 1 for file in text.iterdir())
    assert f"2 files, {tokens - tokens // 20:,} tokens to train on, {tokens // 20:,} to validate on" in said
    assert not (tmp_path / "run").exists()


def test_a_run_its_folder_and_more_steps(flags, tmp_path, capsys):
    out = tmp_path / "run"
    assert command.main([*flags(out=out, steps=20, checkpoint_every=5, keep=2), "--sample-every", "20"]) == 0
    assert "done after 20 steps" in capsys.readouterr().err
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000015", "step-00000020"]
    assert {"config.json", "metrics.jsonl", "environment.json", "checkpoints"} == {path.name for path in out.iterdir()}
    assert json.loads((out / "config.json").read_text())["steps"] == 20

    assert command.main(["--resume", str(out)]) == 2
    assert "steps must be more than the 20" in capsys.readouterr().err
    assert command.main(["--resume", str(out), "--steps", "22"]) == 0
    assert "from step 20 on" in capsys.readouterr().err
    assert sorted(losses(out)) == list(range(1, 23))


def test_a_run_killed_and_resumed_is_the_run_that_was_not(flags, tmp_path):
    """SIGKILL, somewhere after the first checkpoint and before the last step."""
    settings = {"steps": 150, "checkpoint_every": 9, "eval_every": 20}
    straight = program(*flags(out=tmp_path / "straight", **settings))
    killed = program(*flags(out=tmp_path / "killed", **settings))
    wait_for_checkpoint(killed, tmp_path / "killed")
    killed.kill()
    killed.communicate()
    step = int(checkpoints(tmp_path / "killed/checkpoints")[-1].name.removeprefix("step-"))
    assert 0 < step < 150
    resumed = program("--resume", tmp_path / "killed")
    for process in (straight, resumed):
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    assert f"from step {step} on" in said
    assert losses(tmp_path / "killed") == losses(tmp_path / "straight")
    assert len(losses(tmp_path / "killed")) == 150
    assert same_tensors(*(latest(tmp_path / name / "checkpoints") for name in ("killed", "straight")))


def same_tensors(one, other):
    files = [[(checkpoint.path / name).read_bytes() for name in checkpoint.files] for checkpoint in (one, other)]
    return len(files[0]) == 3 and files[0] == files[1]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to send")
def test_sigterm_writes_a_checkpoint_and_says_how_to_go_on(flags, tmp_path):
    out = tmp_path / "run"
    process = program(*flags(out=out, steps=100_000, checkpoint_every=3, eval_every=0))
    wait_for_checkpoint(process, out)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    step = int(checkpoints(out / "checkpoints")[-1].name.removeprefix("step-"))
    assert f"stopped by SIGTERM after step {step}" in said
    assert f"--resume {out}" in said
    assert max(losses(out)) == step


def test_what_cannot_be_done_is_one_line_and_code_2(flags, tmp_path, capsys):
    for arguments, message in (
        (["--data", str(tmp_path / "none")], "data must be files and folders that exist"),
        ([], "data must be at least one file or folder"),
        (flags(steps=0), "steps must be at least 1; got 0"),
        (["--resume", str(tmp_path)], "must have a config.json"),
        (["--config", str(tmp_path / "none.toml")], "does not exist"),
    ):
        assert command.main(arguments) == 2
        said = capsys.readouterr().err.strip()
        assert message in said
        assert said.startswith("error: ")
        assert "\n" not in said


def test_an_unknown_flag_is_code_2(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--stepps", "3"])
    assert ended.value.code == 2


def test_as_a_program_errors_have_no_traceback(tmp_path):
    process = program("--data", tmp_path / "none")
    out, said = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert said == f"error: data must be files and folders that exist; got {tmp_path / 'none'}\n"


def test_a_folder_with_a_run_is_not_written_over(flags, tmp_path, capsys):
    assert command.main(flags(out=tmp_path / "run", steps=1)) == 0
    assert command.main(flags(out=tmp_path / "run", steps=1)) == 2
    assert "--resume" in capsys.readouterr().err


def test_a_run_without_a_whole_checkpoint_is_not_resumed(flags, tmp_path, capsys):
    assert command.main(flags(out=tmp_path / "run", steps=2)) == 0
    (tmp_path / "run/checkpoints/step-00000002/state.json").unlink()
    assert command.main(["--resume", str(tmp_path / "run"), "--steps", "4"]) == 2
    assert "must have a whole checkpoint" in capsys.readouterr().err


def test_too_little_memory_is_code_3_unless_forced(flags, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("cs336_systems.training.estimate.available_bytes", lambda _: 1000)
    assert command.main(flags(out=tmp_path / "run", steps=1)) == 3
    assert "cpu has 0.00 GiB available" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert command.main([*flags(out=tmp_path / "run", steps=1), "--force"]) == 0


def test_a_loss_that_is_no_number_is_code_4(flags, tmp_path, capsys):
    assert command.main(flags(out=tmp_path / "run", learning_rate=1e30, grad_clip=0, warmup_steps=0)) == 4
    said = capsys.readouterr().err
    assert "training cannot go on" in said
    assert str(tmp_path / "run/checkpoints") in said


def test_memory_that_runs_out_is_code_3_and_other_errors_are_shown(flags, tmp_path, capsys, monkeypatch):
    def fail(error):
        def update(_):
            raise error

        monkeypatch.setattr("cs336_systems.training.loop.Trainer.update", update)

    fail(RuntimeError("CUDA out of memory"))
    assert command.main(flags(out=tmp_path / "one")) == 3
    assert "--recompute-every 1" in capsys.readouterr().err
    fail(RuntimeError("a mistake"))
    with pytest.raises(RuntimeError, match="a mistake"):
        command.main(flags(out=tmp_path / "two"))


def test_a_second_ctrl_c_has_no_traceback(flags, tmp_path, capsys, monkeypatch):
    def update(_):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("cs336_systems.training.loop.Trainer.update", update)
    assert command.main(flags(out=tmp_path / "run")) == 130
    assert f"--resume {tmp_path / 'run'}" in capsys.readouterr().err
