"""What a checkpoint may hold: what was written, to the byte, and nothing that runs."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import re

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as read_states

from cs336_systems.training import checkpoint as module
from cs336_systems.training.checkpoint import Progress, checkpoints, is_whole, latest, load, save
from cs336_systems.training.generators import read_random_states, write_random_states
from cs336_systems.training.integrity import NotWholeError, entry_of, rendered, verify

from .test_checkpoint import made, newest

FILES = ("state.json", "tensors.json", "tensors-0.bin", "random-0.json")


@pytest.fixture
def write(tmp_path):
    """Writes checkpoints of the steps: ``write(1, 2)``."""
    model, optimizer = made()
    return lambda *steps, keep=9: [
        save(tmp_path, model, optimizer, Progress(step, "text"), keep=keep) for step in steps
    ]


def flip(path, position, bit=0):
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def forge(checkpoint, **contents):
    """Change files, and note their checksums, as who wants to do harm would."""
    state = json.loads((checkpoint / "state.json").read_text())
    del state["checksum"]
    for name, content in contents.items():
        (checkpoint / name).write_bytes(content)
        state["files"][name] = entry_of(checkpoint / name)
    (checkpoint / "state.json").write_text(rendered(state))


def test_a_checkpoint_has_these_files(write):
    (path,) = write(1)
    assert {file.name for file in path.iterdir()} == set(FILES)
    assert set(verify(path).files) == set(FILES) - {"state.json"}


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_is_noticed_anywhere(write, name):
    (path,) = write(1)
    size = (path / name).stat().st_size
    places = range(size) if name == "state.json" else {0, size - 1, *random.Random(name).sample(range(size), 60)}
    for place in places:
        bit = place % 8
        flip(path / name, place, bit)
        with pytest.raises(NotWholeError, match=f"step-00000001: .*({name}|format)"):
            verify(path)
        flip(path / name, place, bit)
    assert is_whole(path)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_one_gives_way_to_the_one_before(write, tmp_path, name):
    older, middle, damaged = write(1, 2, 3)
    (middle / "tensors-0.bin").unlink()
    flip(damaged / name, 300)
    with pytest.warns(UserWarning, match="step-00000001 is the newest") as warned:
        found = newest(tmp_path)
    assert found.path == older
    assert found.progress == Progress(1, "text")
    assert len(warned) == 1
    for part in (f"step-00000003: .*{name}", r"step-00000002: .*tensors-0\.bin"):
        assert re.search(part, str(warned[0].message))
    load(found, *made(seed=1))


def test_no_whole_one(write, tmp_path):
    (path,) = write(1)
    flip(path / "tensors-0.bin", 5)
    with pytest.raises(
        NotWholeError, match=r"must have a whole checkpoint; got step-00000001: .*tensors-0\.bin differ"
    ):
        latest(tmp_path)


def test_damaged_ones_of_later_steps_do_not_count(write, tmp_path):
    _, two, three = write(1, 2, 3)
    for path in (two, three):
        flip(path / "tensors-0.bin", 7)
    with pytest.warns(UserWarning, match="step-00000001 is the newest"):
        assert newest(tmp_path).progress.step == 1
    write(2, keep=1)
    assert is_whole(two)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]
    write(3, keep=1)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000003"]
    assert is_whole(three)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "null",
        "3",
        '{"files": {}}',
        "\x00" * 400,
        "[" * 100_000,
        '{"format": 2}',
        '{"format": NaN}',
        "9" * 5000,
    ],
)
def test_states_that_are_none(write, content):
    (path,) = write(1)
    (path / "state.json").write_text(content)
    with pytest.raises(NotWholeError, match="step-00000001: "):
        verify(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "1"},
        {"step": True},
        {"data": None},
        {"files": ["tensors-0.bin"]},
        {"files": {"tensors-0.bin": 3}},
        {"files": {"../outside": [0, ""]}},
        {"files": {"..": [0, ""]}},
        {"files": {"a\0b": [0, ""]}},
        {"files": {"\ud800": [0, ""]}},
        {"more": 1},
    ],
)
def test_states_with_a_checksum_and_other_fields(write, tmp_path, changes):
    (path,) = write(1)
    (tmp_path / "outside").touch()
    state = json.loads((path / "state.json").read_text())
    del state["checksum"]
    (path / "state.json").write_text(rendered(state | changes))
    with pytest.raises(NotWholeError, match="step-00000001: "):
        verify(path)


class Harmful:
    """Unpickled, it makes a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def harmful(tmp_path):
    """The content of a file that does harm where it is unpickled, and what shows that it was."""
    marker = tmp_path / "harm was done"
    content = pickle.dumps(Harmful(marker))
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(content[:-1] + b"?")
    assert marker.exists()
    marker.rmdir()
    return content, marker


@pytest.mark.parametrize("name", [*FILES, ".metadata", "__0.metadata", "__0_0.distcp", "random-0.pt"])
@pytest.mark.parametrize("zipped", [False, True], ids=["pickle", "torch"])
def test_crafted_files_run_nothing(write, tmp_path, harmful, name, zipped):
    (path,) = write(1)
    content, marker = harmful
    if zipped:
        torch.save(Harmful(marker), tmp_path / "zipped")
        content = (tmp_path / "zipped").read_bytes()
    if name == "state.json":
        (path / name).write_bytes(content)
    else:
        forge(path, **{name: content})
    # Files of other names are not looked at.
    with pytest.raises(ValueError, match=r"\.json|must be") if name in FILES else contextlib.nullcontext():
        load(newest(tmp_path), *made(seed=1))
    assert not marker.exists()


def test_generators_whose_file_has_no_checksum_are_left_alone(write):
    (path,) = write(1)
    state = json.loads((path / "state.json").read_text())
    del state["checksum"], state["files"]["random-0.json"]
    (path / "state.json").write_text(rendered(state))
    model, optimizer = made(seed=1)
    before = torch.get_rng_state()
    load(verify(path), model, optimizer)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_file_that_becomes_shorter_while_it_is_read(write, monkeypatch):
    (path,) = write(1)
    checkpoint = verify(path)

    def shortened(*arguments, **keywords):
        os.truncate(path / "tensors-0.bin", 1000)
        read_states(*arguments, **keywords)

    monkeypatch.setattr(module, "read_states", shortened)
    with pytest.raises(ValueError, match="ends before it should"):
        load(checkpoint, *made(seed=1))


def test_nothing_is_unpickled(write, tmp_path, monkeypatch):
    write(1)

    def refuse(*_, **__):
        raise AssertionError("something is unpickled")

    for owner, name in ((torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(owner, name, refuse)
    load(newest(tmp_path), *made(seed=1))


def test_the_format_before_is_refused(tmp_path, harmful):
    content, marker = harmful
    path = tmp_path / "step-00000005"
    path.mkdir()
    for name in (".metadata", "__0_0.distcp", "random-0.pt"):
        (path / name).write_bytes(content)
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    (path / "state.json").write_text(json.dumps({"step": 5, "data": "text", "files": sizes}, indent=1) + "\n")
    with pytest.raises(NotWholeError, match="step-00000005: its format must be 2; got 1, of another version"):
        latest(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float3"},
        {"dtype": "load"},
        {"shape": "x"},
        {"shape": [-1]},
        {"chunks": None},
        {"chunks": [{"offsets": [0], "sizes": [8], "file": "../tensors-0.bin", "start": 0}]},
        {"chunks": [{"offsets": [0], "sizes": [8], "file": "state.json", "start": 0}]},
        {"chunks": [{"offsets": [0], "sizes": [8], "file": "tensors-0.bin", "start": -4}]},
        {"chunks": [{"offsets": [0], "sizes": [8], "file": "tensors-0.bin", "start": 10**9}]},
        {"chunks": [{"offsets": [0], "sizes": [2**62], "file": "tensors-0.bin", "start": 0}]},
        {"chunks": [{"offsets": [0.5], "sizes": [8], "file": "tensors-0.bin", "start": 0}]},
        {"chunks": [{"offsets": [0], "sizes": [2**70], "file": ["tensors-0.bin"], "start": 0}]},
    ],
)
def test_indexes_that_do_not_describe_the_tensors(write, changes):
    (path,) = write(1)
    index = json.loads((path / "tensors.json").read_text())
    index["model.ln_final.weight"] |= changes
    forge(path, **{"tensors.json": json.dumps(index).encode()})
    with pytest.raises(ValueError, match=r"tensors\.json must describe the tensors of a checkpoint"):
        load(verify(path), *made(seed=1))


@pytest.mark.parametrize(
    "changes",
    [
        {"python": [3, [1, 2], None]},
        {"numpy": ["MT19937", [-1], 0, 0, 0.0]},
        {"torch": "zz"},
        {"torch": "00"},
        {"cuda": 3},
    ],
)
def test_generators_that_are_none(tmp_path, changes):
    path = tmp_path / "random-0.json"
    write_random_states(path)
    states = json.loads(path.read_text())
    path.write_text(json.dumps(states | changes))
    with pytest.raises(ValueError, match=r"random-0\.json must hold the states of random generators"):
        read_random_states(path)
    path.write_text(json.dumps(states))
    read_random_states(path)
