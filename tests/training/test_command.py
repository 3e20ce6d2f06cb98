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
from cs336_systems.training.checkpoint import checkpoints, is_whole, latest
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
    names = ("tensors-0.bin", "tensors.json")
    return all((one.path / name).read_bytes() == (other.path / name).read_bytes() for name in names)


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


def test_files_that_cannot_be_read_are_one_line_and_code_2(flags, text, tmp_path, capsys):
    (tmp_path / "binary").write_bytes(b"\xff\x00\xa4")
    run = tmp_path / "run"
    assert command.main(flags(out=run, steps=2)) == 0
    config, rows = (run / "config.json").read_bytes(), (run / "metrics.jsonl").read_bytes()
    for arguments, changed, message in (
        (["--config", str(tmp_path)], {}, "--config must be a TOML file that can be read: "),
        (["--config", str(tmp_path / "binary")], {}, "is none: 'utf-8' codec"),
        (["--resume", str(run)], {"config.json": b"{"}, "config.json must hold the options of a run as JSON: "),
        (["--resume", str(run)], {"config.json": b"[1]"}, "options of a run as JSON; got a list"),
        (["--resume", str(run)], {"config.json": b"\xff"}, "config.json must hold the options of a run as JSON: "),
        (["--resume", str(run), "--steps", "4"], {"metrics.jsonl": b"{\n" + rows}, "must have JSON on every line: "),
        (["--resume", str(run), "--steps", "4"], {"metrics.jsonl": b"\xff\n"}, "must have JSON on every line: "),
        (flags(out=tmp_path / "binary"), {}, "File exists"),
        (flags(out=tmp_path / "binary/run"), {}, "Not a directory"),
        (flags(tokens=tmp_path / "binary", out=tmp_path / "other"), {}, "binary"),
        (flags(data=tmp_path / "binary", out=tmp_path / "other"), {}, "data must be text in UTF-8"),
        (flags(seed=2**70, out=tmp_path / "other"), {}, f"seed must be at most {2**64 - 1}; got {2**70}"),
        (flags(loss_chunk=2**70, out=tmp_path / "other"), {}, f"loss_chunk must be at most {2**31 - 1}; got {2**70}"),
    ):
        (run / "config.json").write_bytes(config)
        (run / "metrics.jsonl").write_bytes(rows)
        for name, content in changed.items():
            (run / name).write_bytes(content)
        assert command.main(arguments) == 2
        last = capsys.readouterr().err.strip().split("\n")[-1]
        assert last.startswith("error: ")
        assert message in last
    assert not (tmp_path / "other").exists()


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


@pytest.fixture
def small_files():
    """Makes the largest file that this process may write, in bytes, as a full disk would: ``small_files(1000)``."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("size", [100_000, 20_000, 3000], ids=["tensors", "generators", "state"])
def test_a_full_disk_is_code_5_and_loses_nothing(flags, tmp_path, capsys, small_files, size):
    out = tmp_path / "run"
    assert command.main(flags(out=out, steps=4)) == 0
    before = contents(out / "checkpoints")
    capsys.readouterr()
    small_files(size)
    assert command.main(["--resume", str(out), "--steps", "6"]) == 5
    last = capsys.readouterr().err.strip().split("\n")[-1]
    assert last == f"error: [Errno 27] File too large; the checkpoints of {out / 'checkpoints'} are intact"
    assert contents(out / "checkpoints") == before


@pytest.mark.parametrize(("size", "code"), [(900, 5), (10, 2)], ids=["config", "metrics"])
def test_a_disk_that_is_full_from_the_beginning(flags, tmp_path, capsys, small_files, size, code):
    out = tmp_path / "run"
    assert command.main(flags(out=out, steps=2)) == 0
    before = contents(out)
    small_files(size)
    assert command.main(["--resume", str(out), "--steps", "4"]) == code
    assert capsys.readouterr().err.strip().split("\n")[-1].startswith("error: [Errno 27] File too large")
    after = contents(out)
    assert all(after[name] == before[name] for name in before if name.parts[0] in ("config.json", "checkpoints"))
    assert [row["step"] for row in read_rows(out / "metrics.jsonl") if row["kind"] == "train"][:2] == [1, 2]


def test_a_resume_that_fails_leaves_the_options_as_they_were(flags, tmp_path, capsys, monkeypatch):
    """Else the next one, without any option, would fail as well."""
    out = tmp_path / "run"
    assert command.main(flags(out=out, steps=2)) == 0
    before = (out / "config.json").read_bytes()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for arguments, message in (
        (["--attn", "flash"], "error: attn must be an implementation that can compute this model's attention: "),
        (["--micro-batch-size", "3"], "error: micro_batch_size must divide batch_size, 4; got 3"),
        (["--sample-prompt", "x" * 17], "error: sample_prompt must be at most 16 tokens"),
        (["--window", "9"], "error: window must stay None in a resumed run; got 9"),
        (["--steps", "1"], "error: steps must be more than the 2"),
    ):
        assert command.main(["--resume", str(out), "--steps", "4", *arguments]) == 2
        assert capsys.readouterr().err.strip().split("\n")[-1].startswith(message)
        assert (out / "config.json").read_bytes() == before

    def fail(_):
        raise RuntimeError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("cs336_systems.training.loop.Trainer.update", fail)
        assert command.main(["--resume", str(out), "--steps", "4", "--micro-batch-size", "2"]) == 3
    assert (out / "config.json").read_bytes() == before
    assert command.main(["--resume", str(out), "--steps", "4", "--log-every", "3"]) == 0
    assert json.loads((out / "config.json").read_text())["log_every"] == 3


def test_a_run_that_fails_at_its_first_step_does_not_take_its_folder(flags, tmp_path, capsys, monkeypatch):
    def fail(_):
        raise RuntimeError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("cs336_systems.training.loop.Trainer.update", fail)
        assert command.main(flags(out=tmp_path / "run", steps=1)) == 3
    assert command.main(flags(out=tmp_path / "run", steps=1)) == 0


@pytest.mark.parametrize("window", [2**31, 2**70])
def test_a_window_may_be_any_number(flags, tmp_path, window):
    assert command.main(flags(out=tmp_path / "run", steps=1, window=window)) == 0
    assert command.main(flags(out=tmp_path / "other", steps=1)) == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "other")


def test_a_resume_falls_back_to_the_newest_whole_checkpoint(flags, tmp_path, capsys):
    out = tmp_path / "run"
    assert command.main(flags(out=out, steps=4)) == 0
    expected = losses(out)
    path = out / "checkpoints/step-00000004/tensors-0.bin"
    content = bytearray(path.read_bytes())
    content[1000] ^= 4
    path.write_bytes(content)
    with pytest.warns(
        UserWarning, match=r"step-00000002 is the newest .*: step-00000004: the contents of tensors-0\.bin"
    ):
        assert command.main(["--resume", str(out), "--steps", "5"]) == 0
    assert "from step 2 on" in capsys.readouterr().err
    found = losses(out)
    assert sorted(found) == [1, 2, 3, 4, 5]
    assert found[3] == expected[3]
    assert [is_whole(path) for path in checkpoints(out / "checkpoints")] == [True] * 3


@pytest.mark.parametrize("every", ["eval_every", "sample_every", "checkpoint_every"])
def test_parameters_that_an_update_spoils_are_code_4(flags, tmp_path, capsys, every):
    """The loss and the gradient of the step were finite."""
    never = {"eval_every": 0, "sample_every": 0, "checkpoint_every": 99}
    settings = {"steps": 5, "learning_rate": 1e38, "grad_clip": 0, "warmup_steps": 0} | never | {every: 1}
    assert command.main(flags(out=tmp_path / "run", **settings)) == 4
    assert "training cannot go on" in capsys.readouterr().err.strip().split("\n")[-1]
    assert not checkpoints(tmp_path / "run/checkpoints")


def test_a_second_ctrl_c_has_no_traceback(flags, tmp_path, capsys, monkeypatch):
    def update(_):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("cs336_systems.training.loop.Trainer.update", update)
    assert command.main(flags(out=tmp_path / "run")) == 130
    assert f"--resume {tmp_path / 'run'}" in capsys.readouterr().err
