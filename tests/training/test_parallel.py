"""Runs of several processes: the losses of one, checkpoints for any other layout, and one ending for all."""

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

from benchmarks.lib.process_groups import free_ports
from cs336_systems.training import Trainer, load_run
from cs336_systems.training import checkpoint as checkpoint_module
from cs336_systems.training.__main__ import begin
from cs336_systems.training.checkpoint import checkpoints, newest
from cs336_systems.training.data import prepare

from ..parallel.processes import layout_of, spawn
from .conftest import rows_of

ROOT = Path(__file__).parents[2]
MODES = ("ddp", "fsdp", "context", "fsdp+context")
OPTIONS = {
    "context_length": 18,  # no multiple of 4 chunks
    "num_layers": 2,
    "num_kv_heads": 1,
    "tie_embeddings": True,
    "recompute_every": 1,
    "window": 6,
    "steps": 10,
    "eval_every": 2,
    "eval_sequences": 3,  # one process of two has a sequence less
    "sample_every": 10,
    "dtype": "float32",
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.multi_gpu])])
def place(request):
    """The type of the device."""
    return request.param


def two_steps_in_each_mode(config, folder):
    """Each mode resumes from the checkpoint of the one before."""
    for mode in MODES:
        with layout_of(mode, config.device) as layout:
            # A step of four sequences is two micro-batches where sequences are whole, and four where they are shared.
            changed = dataclasses.replace(config, parallel=mode, micro_batch_size=1)
            resume = newest(folder / "checkpoints") if mode != "ddp" else None
            trainer = Trainer(changed, folder, layout, resume)
            assert trainer.run(lambda end=trainer.step + 2, run=trainer: 15 * (run.step == end)) == 15


def test_each_layout_resumes_from_the_checkpoint_of_another(options, begin, tmp_path, place):
    config = options(**OPTIONS, device=place)
    alone = begin("straight", **dataclasses.asdict(config))
    alone.run()
    shared = tmp_path / "shared"
    prepare(config, shared)
    spawn(two_steps_in_each_mode, 2, config, shared)
    resumed = Trainer(config, shared, alone.layout, newest(shared / "checkpoints"))
    assert resumed.step == 8
    resumed.run()
    steps = [row["step"] for row in rows_of(shared, "train")]
    assert steps == list(range(1, 11))
    for kind, column in (("train", "loss"), ("train", "grad_norm"), ("validation", "loss")):
        expected = {row["step"]: row[column] for row in rows_of(tmp_path / "straight", kind)}
        for row in rows_of(shared, kind):
            assert math.isclose(row[column], expected[row["step"]], rel_tol=2e-4), (kind, row["step"], column)
    model, _ = load_run(shared, device="cpu")
    torch.testing.assert_close(model.state_dict(), alone.model.cpu().state_dict(), rtol=1e-3, atol=1e-4)


def endings(config, folder):
    with layout_of("ddp", config.device) as layout:
        config = dataclasses.replace(config, parallel="ddp", out=str(folder / "run"))
        trainer = begin(config, None, layout)
        # Only the second process receives the signal.
        assert trainer.run(lambda: 15 if layout.rank == 1 and trainer.step == 3 else 0) == 15
        assert newest(folder / "run/checkpoints").name == "step-00000003.pt"

        spoiled = dataclasses.replace(
            config, learning_rate=1e30, grad_clip=0.0, warmup_steps=0, out=str(folder / "nan")
        )
        with pytest.raises(FloatingPointError, match="the loss of step"):
            begin(spoiled, None, layout).run()

        # The first process finds out, and no other waits for it.
        with pytest.raises(ValueError, match="out must be a new folder"):
            begin(config, None, layout)
        with pytest.MonkeyPatch.context() as patch:
            if layout.is_main:
                patch.setattr(checkpoint_module, "replacing", full_disk)
            with pytest.raises(OSError, match="No space left on device"):
                Trainer(config, folder / "run", layout, newest(folder / "run/checkpoints")).run()
        assert [path.name for path in checkpoints(folder / "run/checkpoints")] == ["step-00000003.pt"]


def full_disk(_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_all_processes_end_together(options, tmp_path, place):
    spawn(endings, 2, options(steps=50, checkpoint_every=50, device=place, sample_every=2), tmp_path)


def torchrun(*arguments):
    (port,) = free_ports(1)
    launch = ["--nproc-per-node", "2", "--master-port", str(port), "-m", "cs336_systems.training"]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *launch, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_torchrun_trains_and_resumes(flags, tmp_path, place):
    out = tmp_path / "run"
    process = torchrun(*flags(out=out, steps=4, device=place, parallel="context", sample_every=4))
    printed, errors = process.communicate(timeout=300)
    assert (process.returncode, printed) == (0, ""), errors
    assert f"from step 0; processes: 2, device: {place}" in errors
    assert errors.count("done; the model is in") == 1
    assert place != "cpu" or "Warning" not in errors

    (out / "checkpoints/step-00000004.pt").write_bytes(b"damaged")
    process = torchrun("--resume", out, "--parallel", "fsdp", "--context-size", "0", "--steps", "100000")
    with process:
        begun = ""
        for line in process.stderr:
            begun += line
            if line.startswith("[9/"):
                break
        process.send_signal(signal.SIGTERM)
        errors = process.stderr.read()
    assert begun.count("step-00000004.pt in") == begun.count("is damaged; using step-00000002.pt") == 1
    assert f"in {out}, from step 2;" in begun
    step = int(newest(out / "checkpoints").stem.removeprefix("step-"))
    assert f"SIGTERM at step {step}; --resume {out} continues" in errors
    assert [row["step"] for row in rows_of(out, "train")] == list(range(1, step + 1))
