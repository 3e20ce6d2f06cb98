"""Checkpoints: what comes back is what was written, damaged files do not count, and no failure loses a good one."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import pickle
import random
from unittest.mock import Mock

import pytest
import torch

from cs336_systems.parallel import Layout
from cs336_systems.training.checkpoint import checkpoints, load, newest, save
from cs336_systems.training.optimizer import adamw
from cs336_systems.transformer import Transformer, TransformerConfig

SIZES = {"vocab_size": 16, "context_length": 8, "d_model": 8, "d_ff": 12, "num_layers": 2, "num_heads": 2}
ALONE = Layout(torch.device("cpu"))


def made(seed=0, **changes):
    torch.manual_seed(seed)
    model = Transformer(TransformerConfig(**SIZES | changes))
    optimizer = adamw(model, 0.1, (0.9, 0.95), weight_decay=0.1)
    tokens = torch.randint(16, (2, 8))
    for _ in range(2):
        model.loss(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.fixture
def write(tmp_path):
    """Writes checkpoints of steps: ``write(1, 2, keep=1)``; returns their files."""

    def make(*steps, keep=9, **changes):
        model, optimizer = made(**changes)
        for step in steps:
            save(tmp_path, model, optimizer, step, keep=keep, layout=ALONE)
        return [tmp_path / f"step-{step:08d}.pt" for step in steps]

    return make


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_everything_comes_back(write, tie_embeddings):
    (path,) = write(7, tie_embeddings=tie_embeddings)
    content = path.read_bytes()
    (model, optimizer), (other, its_optimizer) = (made(seed, tie_embeddings=tie_embeddings) for seed in (0, 1))
    alone, _ = made(seed=2, tie_embeddings=tie_embeddings)
    assert load(path, alone) == load(path, other, its_optimizer) == 7
    for each in (alone, other):
        torch.testing.assert_close(each.state_dict(), model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(its_optimizer.state_dict(), optimizer.state_dict(), rtol=0, atol=0)
    for changes in ({"d_model": 16}, {"num_layers": 3}):
        with pytest.raises(ValueError, match="must be a checkpoint of this model"):
            load(path, *made(**changes))
    # The optimizer's state is mapped from the file: an update must not write to it.
    other.loss(torch.ones(1, 8, dtype=torch.int64), torch.ones(1, 8, dtype=torch.int64)).backward()
    its_optimizer.step()
    assert path.read_bytes() == content


def test_the_newest_are_kept(write, tmp_path):
    write(1, 2, 10, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002.pt", "step-00000010.pt"]
    assert newest(tmp_path) == tmp_path / "step-00000010.pt"
    # A run that resumed from step 2 because the file of step 10 is damaged.
    write(3, keep=1)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000003.pt", "step-00000010.pt"]


@pytest.mark.parametrize("damage", ["bit", "shorter", "empty", "header"])
def test_a_damaged_file_gives_way_to_the_one_before(write, tmp_path, damage):
    older, path = write(1, 2)
    content = path.read_bytes()
    if damage == "bit":
        flip(path, content.index(made()[0].ln_final.weight.detach().numpy().tobytes()) + 5)
    elif damage == "header":
        flip(path, content.rindex(b"PK\x01\x02") + 8)  # zip's flag of encryption
    else:
        path.write_bytes(content[:-1] if damage == "shorter" else b"")
    with pytest.warns(UserWarning, match=r"step-00000002\.pt in .* is damaged; using step-00000001\.pt"):
        assert newest(tmp_path) == older
    older.unlink()
    with pytest.raises(ValueError, match=r"must have a checkpoint; got step-00000002\.pt, damaged"):
        newest(tmp_path)
    with pytest.raises(ValueError, match="must have a checkpoint; got none"):
        newest(tmp_path / "none")


def test_a_flipped_bit_is_detected_or_harmless(write, tmp_path):
    (path,) = write(1)
    content, model, expected = path.read_bytes(), made(seed=1)[0], made()[0].state_dict()
    for position in random.Random(0).sample(range(len(content)), 60):
        flip(path, position)
        with contextlib.suppress(ValueError):
            load(newest(tmp_path), model)
            torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)
        path.write_bytes(content)


@pytest.mark.parametrize(("owner", "name"), [(torch, "save"), (os, "fsync"), (pathlib.Path, "replace")])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_a_failure_before_the_end_leaves_the_one_before(write, tmp_path, monkeypatch, owner, name, error):
    (path,) = write(1)
    content = path.read_bytes()
    (tmp_path / ".step-00000002.pt.1.part").touch()  # of a process that was killed
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, Mock(side_effect=error))
        with pytest.raises(type(error)):
            write(2, keep=1)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == content


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot open folders")
def test_the_content_is_on_disk_before_the_name_and_the_name_before_it_returns(write, tmp_path, monkeypatch):
    events = []
    sync, replace = os.fsync, pathlib.Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: (events.append(os.fstat(file).st_ino), sync(file)))
    monkeypatch.setattr(pathlib.Path, "replace", lambda *paths: (events.append("replace"), replace(*paths))[1])
    (path,) = write(2)
    assert events == [path.stat().st_ino, "replace", tmp_path.stat().st_ino]


class Harmful:
    """Unpickled, it makes a folder."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_a_crafted_file_runs_no_code(tmp_path):
    marker, path = tmp_path / "harm", tmp_path / "step-00000001.pt"
    torch.save({"step": 1, "model": Harmful(marker), "optimizer": {}}, path)
    for content in (path.read_bytes(), pickle.dumps(Harmful(marker))):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="must be a checkpoint of this model"):
            load(path, *made())
    assert not marker.exists()
