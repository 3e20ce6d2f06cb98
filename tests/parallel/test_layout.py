"""The layout: ranks in two dimensions, and one sentence for what cannot be started."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.parallel import Layout, start
from cs336_systems.parallel.layout import check

CPU = torch.device("cpu")


@pytest.fixture
def torchrun(monkeypatch):
    """Sets the variables that torchrun sets, or removes them: ``torchrun(4)``, ``torchrun(None)``."""

    def set_variables(size):
        for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": size}.items():
            monkeypatch.delenv(name, raising=False)
            if size is not None:
                monkeypatch.setenv(name, str(value))

    return set_variables


def test_processes_that_share_a_sequence_have_consecutive_ranks():
    layouts = [Layout(CPU, "fsdp+context", rank, 8, 2) for rank in range(8)]
    assert [layout.data_rank for layout in layouts] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [layout.context_rank for layout in layouts] == [0, 1] * 4
    assert {layout.data_size for layout in layouts} == {4}
    assert [layout.is_main for layout in layouts] == [True] + [False] * 7


def test_a_single_process_has_no_process_group(torchrun):
    torchrun(None)
    with start("none", CPU) as layout:
        assert layout == Layout(CPU)
        assert not layout.is_distributed
        assert layout.all_reduce_max(3) == 3
        assert layout.all_gather("x") == ["x"]
        assert layout.all_reduce(torch.tensor(2.0)) == 2
        assert layout.raise_together(lambda: 5) == 5
        with pytest.raises(ValueError, match="mode must be one with a process group; got 'none'"):
            _ = layout.context_group
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("mode", "context_size", "expected"),
    [("ddp", None, 1), ("fsdp", None, 1), ("context", None, 4), ("context", 2, 2), ("fsdp+context", None, 4)],
)
def test_how_many_processes_share_a_sequence(torchrun, mode, context_size, expected):
    torchrun(4)
    assert check(mode, CPU, context_size) == expected


@pytest.mark.parametrize(
    ("size", "mode", "device", "context_size", "message"),
    [
        (None, "ddp", "cpu", None, "parallel 'ddp' needs torchrun: torchrun --nproc-per-node N"),
        (None, "none", "cpu", 2, "context_size must be None with parallel 'none'; got 2"),
        (4, "none", "cpu", None, "parallel must be one of 'ddp', 'fsdp', .* under torchrun; got 'none'"),
        (4, "tensor", "cpu", None, "parallel must be one of 'none', 'ddp', .*; got 'tensor'"),
        (4, "fsdp", "cpu", 2, "context_size must be None with parallel 'fsdp'; got 2"),
        (4, "context", "cpu", 3, "context_size must divide the number of processes, 4; got 3"),
        (4, "context", "cpu", 0, "context_size must divide the number of processes, 4; got 0"),
        (4, "ddp", "mps", None, "device must be 'cuda' or 'cpu' with parallel 'ddp'; got 'mps'"),
        (4, "ddp", "cuda:1", None, "device must be 'cuda' or 'cpu' with parallel 'ddp'; got 'cuda:1'"),
    ],
)
def test_what_cannot_be_started(torchrun, size, mode, device, context_size, message):
    torchrun(size)
    with pytest.raises(ValueError, match=message), start(mode, torch.device(device), context_size):
        pass


def test_more_processes_than_gpus(torchrun, monkeypatch):
    torchrun(4)
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="--nproc-per-node must be at most the 2 GPUs; got local rank 2"):
        check("ddp", torch.device("cuda"), None)
