"""Averaged gradients: training is that of one process in every mode, with the collectives that the mode should have."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.course import MODES, DistributedDataParallel

from ..parallel.processes import layout_of, spawn
from .models import CLOSE, adamw, batches, branches, loss_of, made, same_everywhere

CASES = [(mode, None) for mode in MODES] + [("bucketed", size / 2**20) for size in (1, 400, 600)]
"""Each mode, and buckets of bytes: the embedding has 528, the layers 336."""


@contextlib.contextmanager
def counted():
    """The number of elements of each all-reduce within the block, in order."""
    sizes, all_reduce = [], dist.all_reduce

    def counting(tensor, *arguments, **options):
        sizes.append(tensor.numel())
        return all_reduce(tensor, *arguments, **options)

    dist.all_reduce = counting
    try:
        yield sizes
    finally:
        dist.all_reduce = all_reduce


def check_training(layout, mode, bucket_mb, tied):
    """Weights after each step are those of one process, and gradients are None where its are."""
    alone = made(0, layout.device, tied=tied)
    parallel = DistributedDataParallel(made(layout.rank, layout.device, tied=tied), mode=mode, bucket_mb=bucket_mb)
    steps = [adamw(alone), adamw(parallel)]
    for number, tokens in enumerate(batches(4, layout.device)):
        for rank in range(2):
            (loss_of(alone, tokens[rank], branches(number, rank)) / 2).backward()
        loss_of(parallel, tokens[layout.rank], branches(number, layout.rank)).backward()
        parallel.finish_gradient_synchronization()
        for (name, mine), one in zip(parallel.module.named_parameters(), alone.parameters(), strict=True):
            assert (mine.grad is None) == (one.grad is None), f"{mode}, step {number}: the gradient of {name}"
        for optimizer, scheduler in steps:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        for (name, mine), one in zip(parallel.module.named_parameters(), alone.parameters(), strict=True):
            same_everywhere(name, mine.detach())
            message = f"{mode} {bucket_mb}, tied {tied}, step {number}: {name}"
            torch.testing.assert_close(mine, one, msg=message, **CLOSE)


def check_accumulation(layout, mode):
    """Gradients of three micro-batches add up, and those within no_sync are not sent."""
    alone = made(0, layout.device)
    parallel = DistributedDataParallel(made(0, layout.device), mode=mode)
    parts = batches(3, layout.device)
    for tokens in parts:
        for rank in range(2):
            (loss_of(alone, tokens[rank], True) / 2).backward()
    with counted() as sizes:
        with parallel.no_sync():
            for tokens in parts[:2]:
                loss_of(parallel, tokens[layout.rank], True).backward()
        assert sizes == []
        loss_of(parallel, parts[2][layout.rank], True).backward()
        parallel.finish_gradient_synchronization()
    for mine, one in zip(parallel.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, one.grad, **CLOSE)


def check_collectives(layout):
    """How many all-reduces start within the backward pass, and how many after it; each has a number per parameter."""
    sizes = [8, 12, 20]

    def found(mode, bucket_mb=None, dtypes=(torch.float32,) * 3):
        model = nn.ParameterList([torch.ones(n, dtype=t) for n, t in zip(sizes, dtypes, strict=True)])
        parallel = DistributedDataParallel(model.to(layout.device), mode=mode, bucket_mb=bucket_mb)
        with counted() as reduced:
            sum((x * (layout.rank + 1)).sum().float() for x in model).backward()
            within = [*reduced]
            parallel.finish_gradient_synchronization()
        assert all((x.grad == 1.5).all() and x.grad.dtype == x.dtype for x in model)
        return within, reduced[len(within) :]

    assert found("naive") == ([], [21, 13, 9])
    assert found("flat") == ([], [43])
    assert found("overlapped") == ([21, 13, 9], [])
    assert found("bucketed") == ([43], [])
    assert found("bucketed", 128 / 2**20) == ([34, 9], [])
    assert found("bucketed", 127 / 2**20) == ([21, 22], [])
    mixed = (torch.bfloat16, torch.float32, torch.bfloat16)
    assert found("flat", dtypes=mixed) == ([], [30, 13])
    assert found("bucketed", dtypes=mixed) == ([30, 13], [])


def check_order(layout, mode):
    """If gradients become ready in another order on each process, each is still averaged with its own."""
    model = nn.ParameterList([torch.full((3,), 2.0), torch.full((3,), 5.0)]).to(layout.device)
    parallel = DistributedDataParallel(model, mode=mode)
    order = []
    for number, parameter in enumerate(model):
        parameter.register_post_accumulate_grad_hook(lambda _, number=number: order.append(number))
    first, last = layout.rank, 1 - layout.rank
    (torch.ones(3, device=layout.device) * model[first] * model[last]).sum().backward()
    assert order == [last, first]
    parallel.finish_gradient_synchronization()
    assert model[0].grad.tolist() == [5.0] * 3
    assert model[1].grad.tolist() == [2.0] * 3


def check_buffers(layout):
    """All begin with those of rank 0. Those that are saved get its values again in training, and only then."""
    model = made(layout.rank, layout.device)
    parallel = DistributedDataParallel(model)
    assert torch.equal(model.table, made(0, layout.device).table)
    tokens = batches(1, layout.device)[0, 0]
    for training, synced in ((True, True), (False, False)):
        model.seen.fill_(layout.rank + 7)
        model.table.fill_(layout.rank)
        parallel.train(training)(tokens)
        assert model.seen == (7 if synced else layout.rank + 7)
        assert (model.table == layout.rank).all()


def check_refusals(layout):
    parallel = DistributedDataParallel(made(0, layout.device))
    tokens = batches(1, layout.device)[0, layout.rank]
    loss_of(parallel, tokens, True).backward()
    with pytest.raises(RuntimeError, match=r"Accumulate gradients within no_sync\(\)"):
        loss_of(parallel, tokens, True).backward()
    late = DistributedDataParallel(made(0, layout.device), mode="flat")
    late.module.frozen.requires_grad_()
    loss_of(late, tokens).backward()
    with pytest.raises(ValueError, match="requires_grad of parameters must be set before they are wrapped"):
        late.finish_gradient_synchronization()


def all_checks(place):
    with layout_of("ddp", place) as layout:
        for mode, bucket_mb in CASES:
            check_training(layout, mode, bucket_mb, tied=False)
        for mode in MODES:
            check_training(layout, mode, None, tied=True)
            check_accumulation(layout, mode)
            check_order(layout, mode)
        check_collectives(layout)
        check_buffers(layout)
        check_refusals(layout)


def test_two_processes_train_as_one(place):
    spawn(all_checks, 2, place)


def test_a_group_of_one(group_of_one):
    model = made(0, "cpu")
    for mode in MODES:
        parallel = DistributedDataParallel(made(0, "cpu"), mode=mode)
        tokens = batches(1, "cpu")[0, 0]
        loss_of(parallel, tokens).backward()
        parallel.finish_gradient_synchronization()
        model.zero_grad()
        loss_of(model, tokens).backward()
        for mine, one in zip(parallel.parameters(), model.parameters(), strict=True):
            assert (mine.grad is None) == (one.grad is None)
            assert mine.grad is None or torch.equal(mine.grad, one.grad)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "mode must be one of 'naive', 'flat', 'overlapped', 'bucketed'; got 'fast'"),
        ({"mode": "naive", "bucket_mb": 25}, "bucket_mb must be None with mode 'naive'; got 25"),
        ({"mode": "bucketed", "bucket_mb": 0}, "bucket_mb must be positive; got 0"),
        ({"mode": "bucketed", "bucket_mb": float("nan")}, "bucket_mb must be positive; got nan"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        DistributedDataParallel(nn.Linear(2, 2), **options)
