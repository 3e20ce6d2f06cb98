"""The sharded optimizer: its updates are those of the optimizer itself, of whose state each process has a part."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from cs336_systems.course import ShardedOptimizer

from ..parallel.processes import layout_of, spawn
from .models import batches, loss_of, made, same_everywhere

OPTIONS = {"lr": 0.1, "weight_decay": 0.5}


def groups_of(model):
    """Matrices and the others, with options of their own."""
    matrices = [x for x in model.parameters() if x.ndim >= 2]
    others = [x for x in model.parameters() if x.ndim < 2]
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0, "lr": 0.3}]


def pair(layout, arguments, cls=torch.optim.AdamW, tied=False, **options):
    """The same model with the optimizer itself, and with a sharded one."""
    models = [made(0, layout.device, tied=tied) for _ in range(2)]
    alone = cls(arguments(models[0]), **options)
    return (models[0], alone), (models[1], ShardedOptimizer(arguments(models[1]), cls, **options))


def train(pairs, steps, after=lambda optimizer: None):
    """All processes have the same gradients, so there is nothing to average."""
    for tokens in steps:
        for model, optimizer in pairs:
            optimizer.zero_grad()
            loss_of(model, tokens[0], branch=True).backward()
            optimizer.step()
            after(optimizer)


def check_same(pairs, what):
    (one, _), (mine, _) = pairs
    for (name, parameter), other in zip(mine.named_parameters(), one.parameters(), strict=True):
        assert torch.equal(parameter, other), f"{what}: {name}"
        same_everywhere(name, parameter.detach())


def check_training(layout):
    everything = lambda model: model.parameters()  # noqa: E731
    named = lambda model: model.named_parameters()  # noqa: E731
    cases = {
        "parameters": (everything, torch.optim.AdamW),
        "groups": (groups_of, torch.optim.AdamW),
        "names": (named, torch.optim.AdamW),
        "momentum": (everything, lambda params, **options: torch.optim.SGD(params, momentum=0.9, **options)),
    }
    for what, (arguments, cls) in cases.items():
        for tied in (False, True):
            pairs = pair(layout, arguments, cls, tied, **OPTIONS)
            train(pairs, batches(4, layout.device))
            check_same(pairs, what)


def check_schedulers(layout):
    """They change the groups of the outer optimizer: rates, and with OneCycleLR AdamW's betas too, a default."""
    makers = (
        lambda optimizer: CosineAnnealingLR(optimizer, 5),
        lambda optimizer: OneCycleLR(optimizer, 0.2, total_steps=6),
    )
    for make in makers:
        pairs = pair(layout, groups_of, **OPTIONS)
        schedulers = {id(optimizer): make(optimizer) for _, optimizer in pairs}
        train(pairs, batches(5, layout.device), lambda optimizer, each=schedulers: each[id(optimizer)].step())
        check_same(pairs, "schedulers")
        rates = [[group["lr"] for group in optimizer.param_groups] for _, optimizer in pairs]
        assert rates[0] == rates[1]


def check_memory(layout):
    """The state of all processes together is that of the optimizer itself, and each has about half."""
    (model, alone), (_, sharded) = pairs = pair(layout, lambda model: model.parameters(), **OPTIONS)
    train(pairs, batches(1, layout.device))

    def elements(optimizer):
        return sum(x.numel() for state in optimizer.state.values() for x in state.values() if x.ndim)

    assert sharded.state is sharded.local.state
    each = torch.tensor(elements(sharded), device=layout.device)
    total = layout.all_reduce(each)
    assert total == elements(alone)
    largest = max(x.numel() for x in model.parameters())
    assert abs(2 * each - total) <= 2 * largest
    assert {rank for x, rank in sharded.owner.items()} == {0, 1}


def check_balance(layout):
    """The largest first, each to the process that has the fewest elements; frozen parameters need no state."""
    sizes = (1, 9, 4, 5, 3)
    frozen = nn.Parameter(torch.ones(100, device=layout.device), requires_grad=False)
    parameters = [nn.Parameter(torch.ones(n, device=layout.device)) for n in sizes]
    optimizer = ShardedOptimizer([*parameters, frozen], torch.optim.SGD, lr=0.1)
    assert [optimizer.owner[x] for x in parameters] == [1, 0, 1, 1, 0]
    added = nn.Parameter(torch.ones(2, device=layout.device))
    optimizer.add_param_group({"params": added, "lr": 1.0})
    assert optimizer.owner[added] == 1
    for parameter in (*parameters, added):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(torch.equal(x, torch.full_like(x, 0.9)) for x in parameters)
    assert added.tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        optimizer.add_param_group({"params": [added]})


def check_more_processes_than_parameters(layout):
    parameter = nn.Parameter(torch.ones(2, device=layout.device))
    optimizer = ShardedOptimizer([parameter], torch.optim.AdamW, lr=0.5, weight_decay=0.0)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert parameter.tolist() == pytest.approx([0.5, 0.5])
    assert len(optimizer.state) == (1 if layout.rank == 0 else 0)


def check_closure(layout):
    """It is called once, before any parameter changes, with gradients enabled."""
    (one, alone), (mine, sharded) = pairs = pair(layout, lambda model: model.parameters(), **OPTIONS)
    tokens, calls = batches(1, layout.device)[0, 0], []

    def closure(model):
        calls.append(torch.is_grad_enabled())
        loss = loss_of(model, tokens)
        loss.backward()
        return loss

    expected = alone.step(lambda: closure(one))
    assert torch.equal(sharded.step(lambda: closure(mine)), expected)
    assert calls == [True, True]
    check_same(pairs, "closure")


def check_state_dicts(layout):
    """A process's own, and the optimizer's own, continue training; another process's is refused."""
    steps = batches(4, layout.device)
    pairs = pair(layout, groups_of, **OPTIONS)
    (one, alone), (_, sharded) = pairs
    train(pairs, steps[:2])
    saved, of_all = deepcopy(sharded.state_dict()), deepcopy(alone.state_dict())
    assert len(saved["state"]) == len(sharded.state) < len(alone.state)
    for state_dict in (saved, of_all):
        resumed = made(1, layout.device)
        resumed.load_state_dict(one.state_dict())
        optimizer = ShardedOptimizer(groups_of(resumed), torch.optim.AdamW, lr=7.0)
        optimizer.load_state_dict(deepcopy(state_dict))  # loading shares tensors
        assert optimizer.local is not None
        assert optimizer.state is optimizer.local.state
        assert all(optimizer.owner[x] == layout.rank for x in optimizer.state)
        reference = made(1, layout.device)
        reference.load_state_dict(one.state_dict())
        other = torch.optim.AdamW(groups_of(reference), lr=7.0)
        other.load_state_dict(deepcopy(of_all))
        both = (reference, other), (resumed, optimizer)
        train(both, steps[2:])
        check_same(both, "resumed")
    with pytest.raises(ValueError, match=rf"state_dict must be of rank {layout.rank} of 2; got that of rank 0 of 3"):
        sharded.load_state_dict(saved | {"shard": [0, 3]})


def all_checks(place):
    with layout_of("ddp", place) as layout:
        check_training(layout)
        check_schedulers(layout)
        check_memory(layout)
        check_balance(layout)
        check_more_processes_than_parameters(layout)
        check_closure(layout)
        check_state_dicts(layout)


def test_two_processes_update_as_one(place):
    spawn(all_checks, 2, place)


def test_a_group_of_one(group_of_one):
    pairs = pair(group_of_one, groups_of, **OPTIONS)
    train(pairs, batches(2, "cpu"))
    check_same(pairs, "one process")
    assert pairs[1][1].state_dict()["state"].keys() == pairs[0][1].state_dict()["state"].keys()
