"""Runs of several processes: the losses of one, checkpoints for any other layout, and endings of all at once."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cs336_systems.training import Trainer, checkpoint, load_run, prepare
from cs336_systems.training import __main__ as command
from cs336_systems.training.checkpoint import checkpoints, latest
from cs336_systems.training.integrity import verify
from cs336_systems.training.metrics import read_rows
from cs336_systems.training.optimizer import adamw
from cs336_systems.training.prepare import newest_checkpoint
from cs336_systems.training.stopping import SAME_WITHIN, NotFiniteError, StopRequest
from cs336_systems.training.storage import TensorWriter

from ..parallel.processes import free_ports, layout_of, spawn

ROOT = Path(__file__).parents[2]
MODES = ("ddp", "fsdp", "context", "fsdp+context")
OPTIONS = {
    "context_length": 18,  # no multiple of 4 chunks
    "num_layers": 2,
    "num_kv_heads": 1,
    "steps": 10,
    "eval_every": 2,
    "eval_sequences": 3,  # one process of two has a sequence less
    "sample_every": 10,
    "checkpoint_every": 2,
    "dtype": "float32",
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.multi_gpu])])
def place(request):
    """The type of the device, which goes to other processes."""
    return request.param


def rows_of(folder, kind):
    return [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == kind]


def go_on(trainer, steps):
    for _ in range(steps):
        trainer._pending.append((trainer.step + 1, 0.0, *trainer.update()[:2]))
        trainer._between()


def one_mode_after_the_other(place, config, folder):
    """Two steps under each; each goes on from the checkpoint of the one before."""
    for mode in MODES:
        with layout_of(mode, place) as layout:
            # A step of four sequences has two parts where they are whole, and four where they are shared.
            changed = dataclasses.replace(config, parallel=mode, micro_batch_size=1, device=place)
            trainer = Trainer(prepare(changed, layout), folder, latest(folder / "checkpoints"))
            go_on(trainer, 2)


@pytest.mark.parametrize("changes", [{"tie_embeddings": True, "recompute_every": 1, "window": 6}], ids=["tied"])
def test_each_layout_goes_on_from_the_checkpoint_of_another(options, tmp_path, place, changes):
    config = options(**OPTIONS | changes)
    straight = tmp_path / "straight"
    straight.mkdir()
    alone = Trainer(prepare(dataclasses.replace(config, device=place)), straight)
    alone.run()

    shared = tmp_path / "shared"
    shared.mkdir()
    spawn(one_mode_after_the_other, 2, place, config, shared)
    last = dataclasses.replace(config, device=place)
    resumed = Trainer(prepare(last), shared, latest(shared / "checkpoints"))
    assert resumed.step == 8
    resumed.run()
    for kind, columns in (("train", ("loss", "grad_norm")), ("validation", ("loss",))):
        expected, found = rows_of(straight, kind), rows_of(shared, kind)
        assert [row["step"] for row in found] == [row["step"] for row in expected]
        for one, other in zip(expected, found, strict=True):
            for column in columns:
                assert math.isclose(one[column], other[column], rel_tol=2e-4), (kind, one["step"], column)
    assert rows_of(shared, "sample")
    config.save(shared / "config.json")
    model, _ = load_run(shared, device="cpu")
    for name, value in alone.model.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value.cpu(), rtol=1e-3, atol=1e-4, msg=name)


def endings(place, config, folder):
    with layout_of("ddp", place) as layout:
        config = dataclasses.replace(config, parallel="ddp", device=place)
        trainer = Trainer(prepare(config, layout), folder / "stopped")
        update = trainer.update

        def interrupted():
            if layout.rank == 1 and trainer.step == 2:
                # A terminal sends one to every process, and torchrun passes its own on.
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            return update()

        trainer.update = interrupted  # type: ignore[method-assign]
        ending = trainer.run()
        assert (ending.step, ending.signal) == (3, signal.SIGINT)
        assert newest_checkpoint(folder / "stopped").path == folder / "stopped/checkpoints/step-00000003"

        spoiled = dataclasses.replace(config, learning_rate=1e30, grad_clip=0.0, warmup_steps=0)
        with pytest.raises(NotFiniteError, match="the loss of step"):
            Trainer(prepare(spoiled, layout), folder / "spoiled").run()
        assert (folder / "stopped/metrics.jsonl").exists()

        with pytest.raises(ValueError, match=r"batch_size must be a multiple of 2, .*; got 3"):
            prepare(dataclasses.replace(config, batch_size=3), layout)
        with pytest.raises(ValueError, match="micro_batch_size must divide batch_size / 2, 2; got 4"):
            prepare(dataclasses.replace(config, micro_batch_size=4), layout)
    with (
        layout_of("context", place) as layout,
        pytest.raises(ValueError, match="context_length must be at least 2 · 2"),
    ):
        prepare(dataclasses.replace(config, context_length=2, parallel="context"), layout)


def test_all_processes_end_at_once(options, tmp_path, place):
    for name in ("stopped", "spoiled"):
        (tmp_path / name).mkdir()
    spawn(endings, 2, place, options(steps=50, checkpoint_every=50), tmp_path)


def failing_save(folder):
    """The second of two processes cannot write; then neither begins the file that says that the checkpoint is whole."""
    with layout_of("ddp", "cpu") as layout:
        model = torch.nn.Linear(4, 4)
        optimizer = adamw(model, learning_rate=0.1, betas=(0.9, 0.95), weight_decay=0.0)

        def write(step):
            checkpoint.save(folder, model, optimizer, checkpoint.Progress(step, "text"), keep=9, layout=layout)

        write(1)
        for owner, name in ((checkpoint, "write_random_states"), (TensorWriter, "write_data")):
            with pytest.MonkeyPatch.context() as patch:
                if layout.rank == 1:
                    patch.setattr(owner, name, full_disk)
                with pytest.raises(OSError, match="No space left on device"):
                    write(2)
            layout.barrier()
            assert [path.name for path in folder.iterdir()] == ["step-00000001"]
            layout.barrier()
        write(2)
        assert checkpoint.is_whole(folder / "step-00000002")


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_one_process_that_cannot_write_fails_all(tmp_path):
    spawn(failing_save, 2, tmp_path)
    assert {name for path in tmp_path.iterdir() for name in verify(path).files} == {
        *("tensors-0.bin", "tensors-1.bin", "tensors.json", "random-0.json", "random-1.json")
    }


def test_signals_within_seconds_are_one(monkeypatch):
    stop = StopRequest(SAME_WITHIN)
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    stop._note(signal.SIGTERM, None)
    stop._note(signal.SIGINT, None)
    assert stop.signal == signal.SIGTERM
    now += SAME_WITHIN
    with pytest.raises(KeyboardInterrupt):
        stop._note(signal.SIGINT, None)


def torchrun(*arguments):
    (port,) = free_ports(1)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    where = ["--nproc-per-node", "2", "--master-port", str(port), "-m", "cs336_systems.training"]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *where, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_torchrun_trains_and_goes_on(flags, tmp_path, place):
    out = tmp_path / "run"
    settings = {"out": out, "steps": 4, "device": place, "parallel": "context", "sample_every": 4}
    process = torchrun(*flags(**settings))
    printed, said = process.communicate(timeout=300)
    assert (process.returncode, printed) == (0, ""), said
    assert f"on 2 processes (context, 2 to a sequence), the first on {place}" in said
    assert said.count("done after 4 steps") == 1
    assert place != "cpu" or "Warning" not in said
    expected = {"config.json", "metrics.jsonl", "environment.json", "checkpoints"}
    assert {path.name for path in out.iterdir()} == expected

    damaged = out / "checkpoints/step-00000004/tensors-1.bin"
    damaged.write_bytes(bytes(byte ^ (index == 99) for index, byte in enumerate(damaged.read_bytes())))
    process = torchrun("--resume", out, "--parallel", "fsdp", "--context-size", "0", "--steps", "100000")
    with process:
        begun = ""
        for line in process.stderr:
            begun += line
            if line.startswith("[9/"):
                break
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
    assert begun.count("step-00000002 is the newest whole checkpoint") == 1
    assert "step-00000004: the contents of tensors-1.bin differ from what was written" in begun
    assert f"in {out}, from step 2 on" in begun
    step = int(checkpoints(out / "checkpoints")[-1].name.removeprefix("step-"))
    assert f"stopped by SIGTERM after step {step}" in said
    assert f"torchrun --nproc-per-node 2 -m cs336_systems.training --resume {out}" in said
    assert [row["step"] for row in rows_of(out, "train")] == list(range(1, step + 1))


def test_several_processes_and_no_torchrun_or_the_reverse(flags, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert command.main(flags(out=tmp_path / "run", parallel="ddp")) == 2
    assert capsys.readouterr().err.startswith("error: parallel 'ddp' needs torchrun")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert command.main(flags(out=tmp_path / "run")) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: parallel must be one of 'ddp'")
    assert said.count("\n") == 1
    monkeypatch.setenv("RANK", "1")
    assert command.main(flags(out=tmp_path / "run")) == 2
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "run").exists()
