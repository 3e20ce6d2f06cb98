"""Checkpoints: what comes back is what was written, and what was not written to its end does not count."""

from __future__ import annotations

import os
import pathlib
import random
import shutil

import numpy as np
import pytest
import torch

from cs336_systems.training import checkpoint as module
from cs336_systems.training.checkpoint import Progress, checkpoints, is_whole, latest, load, save
from cs336_systems.training.integrity import verify
from cs336_systems.training.optimizer import adamw
from cs336_systems.transformer import Transformer, TransformerConfig

SIZES = {"vocab_size": 16, "context_length": 8, "d_model": 8, "d_ff": 12, "num_layers": 2, "num_heads": 2}


def made(seed=0, **changes):
    torch.manual_seed(seed)
    model = Transformer(TransformerConfig(**SIZES | changes))
    optimizer = adamw(model, learning_rate=0.1, betas=(0.9, 0.95), weight_decay=0.1)
    tokens = torch.randint(16, (2, 8))
    for _ in range(2):
        model.loss(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def written(folder, *steps, keep=9):
    model, optimizer = made()
    return [save(folder, model, optimizer, Progress(step, "text"), keep=keep) for step in steps]


def newest(folder):
    checkpoint = latest(folder)
    assert checkpoint is not None
    return checkpoint


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, dict):
            assert_same(value, other[name])
        elif isinstance(value, torch.Tensor):
            assert torch.equal(value, other[name]), name
        else:
            assert value == other[name], name


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_everything_comes_back(tmp_path, tie_embeddings):
    model, optimizer = made(tie_embeddings=tie_embeddings)
    path = save(tmp_path, model, optimizer, Progress(7, "text"), keep=2)
    drawn = random.random(), np.random.rand(), torch.rand(1).item()
    other, of_other = made(seed=1, tie_embeddings=tie_embeddings)
    load(verify(path), other, of_other)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == drawn
    assert_same(model.state_dict(), other.state_dict())
    assert_same(optimizer.state_dict()["state"], of_other.state_dict()["state"])
    assert verify(path).progress == Progress(7, "text")


def test_a_model_alone_can_be_read(tmp_path):
    (path,) = written(tmp_path, 1)
    model, _ = made(seed=1)
    state = torch.get_rng_state()
    load(verify(path), model)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(model.state_dict(), made()[0].state_dict())


def test_the_newest_are_kept(tmp_path):
    written(tmp_path, 1, 2, 10, 9, keep=2)
    # The one of step 10 is of a later step than the run has, and does not count.
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002", "step-00000009", "step-00000010"]
    assert newest(tmp_path).path == tmp_path / "step-00000010"
    written(tmp_path, 11, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000011"]


def test_no_checkpoint(tmp_path):
    assert latest(tmp_path / "none") is None


@pytest.mark.parametrize("point", ["get_state_dict", "write_states", "write_text", "sync_file"])
def test_a_crash_before_the_rename_leaves_the_one_before(tmp_path, monkeypatch, point):
    written(tmp_path, 1)

    def crash(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, point, crash)
        with pytest.raises(KeyboardInterrupt):
            written(tmp_path, 2)
    assert newest(tmp_path).path == tmp_path / "step-00000001"
    written(tmp_path, 2)
    assert newest(tmp_path).path == tmp_path / "step-00000002"
    assert not list(tmp_path.glob(".*"))


def test_a_crash_at_the_rename_leaves_the_one_before(tmp_path, monkeypatch):
    written(tmp_path, 1)
    rename = pathlib.Path.rename

    def crash(path, target):
        if path.is_dir():
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(pathlib.Path, "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        written(tmp_path, 2)
    assert newest(tmp_path).path == tmp_path / "step-00000001"


@pytest.mark.parametrize("damage", ["shorter", "missing", "no state", "half a state"])
def test_a_damaged_one_is_passed_over_and_written_again(tmp_path, damage):
    _, newer = written(tmp_path, 1, 2)
    shards = next(newer.glob("*.bin"))
    if damage == "shorter":
        shards.write_bytes(shards.read_bytes()[:-1])
    elif damage == "missing":
        shards.unlink()
    elif damage == "no state":
        (newer / "state.json").unlink()
    else:
        (newer / "state.json").write_text('{"step": 2, ')
    assert not is_whole(newer)
    assert checkpoints(tmp_path) == [tmp_path / "step-00000001"]
    with pytest.warns(UserWarning, match="step-00000001 is the newest whole checkpoint .*: step-00000002: "):
        assert newest(tmp_path).path == tmp_path / "step-00000001"
    written(tmp_path, 2)
    assert newest(tmp_path).path == newer


def test_a_whole_one_is_not_written_again(tmp_path):
    (path,) = written(tmp_path, 1)
    before = (path / "state.json").stat().st_mtime_ns
    written(tmp_path, 1)
    assert (path / "state.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("changes", [{"d_model": 16}, {"num_layers": 3}])
def test_another_model(tmp_path, changes):
    (path,) = written(tmp_path, 1)
    with pytest.raises(ValueError, match="must be one of this model"):
        load(verify(path), *made(**changes))


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot open folders")
def test_all_is_on_disk_before_it_has_its_name_and_then_the_name(tmp_path, monkeypatch):
    written(tmp_path, 1)
    events = []
    sync, rename = os.fsync, pathlib.Path.rename
    monkeypatch.setattr(os, "fsync", lambda file: (events.append(os.fstat(file).st_ino), sync(file)))
    monkeypatch.setattr(pathlib.Path, "rename", lambda *paths: (events.append("rename"), rename(*paths))[1])
    (path,) = written(tmp_path, 2)
    before, after = events[: events.index("rename")], events[events.index("rename") :]
    for file in (*path.iterdir(), path):
        assert file.stat().st_ino in before, file
    assert tmp_path.stat().st_ino in after


def test_a_copy_is_as_good(tmp_path):
    (path,) = written(tmp_path / "here", 3)
    shutil.copytree(path, tmp_path / "there/step-00000003")
    model, optimizer = made(seed=1)
    load(newest(tmp_path / "there"), model, optimizer)
    assert_same(model.state_dict(), made()[0].state_dict())
