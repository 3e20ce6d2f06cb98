"""The layout: who has what, and what is refused in a sentence."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.parallel import Layout, start
from cs336_systems.parallel.layout import check

CPU = torch.device("cpu")


@pytest.fixture
def torchrun(monkeypatch):
    """The variables that torchrun sets: ``torchrun(4)``."""

    def set_variables(size):
        for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": size}.items():
            monkeypatch.setenv(name, str(value))

    return set_variables


@pytest.fixture(autouse=True)
def _without_torchrun(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_sharers_of_a_sequence_are_neighbours():
    layouts = [Layout(CPU, "fsdp+context", rank, 8, 2) for rank in range(8)]
    assert [layout.data_rank for layout in layouts] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [layout.context_rank for layout in layouts] == [0, 1] * 4
    assert {(layout.data_size, layout.shards) for layout in layouts} == {(4, 8)}
    assert [layout.is_main for layout in layouts] == [True] + [False] * 7
    assert Layout(CPU, "context", 0, 8, 8).shards == 1


def test_a_process_alone_has_no_group():
    with start("none", CPU) as layout, layout.main_first():
        assert layout == Layout(CPU)
        assert layout.is_alone
        assert layout.highest(3) == 3
        assert layout.gathered("x") == ["x"]
        assert layout.total(torch.tensor(2.0)) == 2
        with pytest.raises(ValueError, match="mode must be one with a group of processes; got 'none'"):
            _ = layout.context_group
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("mode", "context_size", "expected"),
    [("ddp", None, 1), ("fsdp", None, 1), ("context", None, 4), ("context", 2, 2), ("fsdp+context", None, 4)],
)
def test_how_many_share_a_sequence(torchrun, mode, context_size, expected):
    torchrun(4)
    assert check(mode, CPU, context_size) == expected


@pytest.mark.parametrize(
    ("size", "mode", "device", "context_size", "message"),
    [
        (None, "ddp", "cpu", None, "parallel 'ddp' needs torchrun: torchrun --nproc-per-node N"),
        (None, "none", "cpu", 2, "context_size must be None with parallel 'none', where sequences are whole; got 2"),
        (4, "none", "cpu", None, "parallel must be one of 'ddp', 'fsdp', .* under torchrun; got 'none'"),
        (4, "tensor", "cpu", None, "parallel must be one of 'none', 'ddp', .*; got 'tensor'"),
        (4, "fsdp", "cpu", 2, "context_size must be None with parallel 'fsdp'"),
        (4, "context", "cpu", 3, "context_size must divide the number of processes, 4; got 3"),
        (4, "context", "cpu", 0, "context_size must divide the number of processes, 4; got 0"),
        (4, "ddp", "mps", None, "device must be cuda or cpu with parallel 'ddp'; got 'mps'"),
        (4, "ddp", "cuda:1", None, "device must have no number with parallel 'ddp', torchrun gives each; got 'cuda:1'"),
    ],
)
def test_what_is_refused(torchrun, size, mode, device, context_size, message):
    if size is not None:
        torchrun(size)
    with pytest.raises(ValueError, match=message), start(mode, torch.device(device), context_size):
        pass


def test_more_processes_than_gpus(torchrun, monkeypatch):
    torchrun(4)
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="--nproc-per-node must be at most the 2 GPUs of this machine; got process 2"):
        check("ddp", torch.device("cuda"), None)
