"""Sharded weights: training is that of one process, and whole weights exist only while their layers need them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from cs336_systems.course import FullyShardedDataParallel, is_linear_or_embedding

from ..parallel.processes import layout_of, spawn
from .models import CLOSE, adamw, batches, branches, loss_of, made, same_everywhere

CASES = [{"tied": tied, "checkpointed": checkpointed} for tied in (False, True) for checkpointed in (False, True)]


def close(mine, one, what):
    torch.testing.assert_close(mine, one, msg=lambda text: f"{what}: {text}", **CLOSE)


def check_training(layout, clip, **how):
    """Weights after each step are those of one process, here and in the state dict of whole weights."""
    alone = made(0, layout.device, **how | {"checkpointed": False})
    parallel = FullyShardedDataParallel(made(layout.rank, layout.device, **how))
    steps = [adamw(alone), adamw(parallel)]
    for number, tokens in enumerate(batches(4, layout.device)):
        for rank in range(2):
            (loss_of(alone, tokens[rank], branches(number, rank)) / 2).backward()
        loss_of(parallel, tokens[layout.rank], branches(number, layout.rank)).backward()
        parallel.finish_gradient_synchronization()
        if clip:
            norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
            assert norm > 0.1
            close(parallel.clip_grad_norm_(0.1), norm, "norm")
        for optimizer, scheduler in steps:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        state = parallel.full_state_dict()
        assert state.keys() == alone.state_dict().keys()
        for name, one in alone.state_dict().items():
            close(state[name], one, f"{how}, clip {clip}, step {number}: {name}")
            same_everywhere(name, state[name])
    assert all(x.is_leaf and not x.requires_grad for x in state.values())


def check_shards(layout):
    """Each process has its rows of the sharded weights, and AdamW the state of those alone."""
    model = made(0, layout.device)
    whole = {name: x.detach().clone() for name, x in model.named_parameters()}
    parallel = FullyShardedDataParallel(model)
    optimizer, _ = adamw(parallel)
    loss_of(parallel, batches(1, layout.device)[0, 0]).backward()
    parallel.finish_gradient_synchronization()
    optimizer.step()
    sharded = {"embedding.weight": (6, 5), "up.weight": (4, 3), "down.weight": (3, 3), "head.weight": (6, 5)}
    for name, parameter in model.named_parameters():
        rows = sharded[name][layout.rank] if name in sharded else len(whole[name])
        assert parameter.shape == (rows, *whole[name].shape[1:]), name
        assert parameter.untyped_storage().nbytes() == parameter.nbytes, name
        if name not in ("branch", "unused", "frozen"):
            assert parameter.grad.shape == parameter.shape == optimizer.state[parameter]["exp_avg"].shape, name
    assert [parameter.grad for name, parameter in model.named_parameters() if name in ("branch", "unused")] == [
        None
    ] * 2


class Chain(nn.Module):
    """Layers of different sizes."""

    def __init__(self, layers=5):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4 + i, 5 + i) for i in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def check_memory(layout):
    """Two whole weights at most, the layer's own and the next one's, once a forward pass has shown the order."""
    model = Chain().to(layout.device)
    parallel = FullyShardedDataParallel(model)
    gathered = lambda: [index for index, weight in enumerate(parallel.weights) if weight.gathered_bytes]  # noqa: E731
    seen: dict[str, list[list[int]]] = {"forward": [], "backward": []}
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: seen["forward"].append(gathered()))
    for weight in parallel.weights:
        # Hooks of a tensor's gradient run before that which frees it.
        weight.full.register_hook(lambda _: seen["backward"].append(gathered()))
    for number in range(3):
        out = parallel(torch.randn(2, 4, device=layout.device))
        assert gathered() == []
        ahead = [[0, 1], [1, 2], [2, 3], [3, 4], [4]]
        assert seen["forward"] == (ahead if number else [[0], [1], [2], [3], [4]])
        assert sum(weight.full.untyped_storage().nbytes() for weight in parallel.weights) == 0
        out.sum().backward()
        assert gathered() == []
        assert seen["backward"] == [[3, 4], [2, 3], [1, 2], [0, 1], [0]]
        parallel.finish_gradient_synchronization()
        seen["forward"].clear()
        seen["backward"].clear()
    with torch.no_grad():
        parallel(torch.randn(2, 4, device=layout.device))
    assert gathered() == []


def check_recomputed(layout):
    """Recomputed layers gather their weights again, are left as they were, and do not count in the order of calls."""
    model = Chain(4).to(layout.device)
    parallel = FullyShardedDataParallel(model)
    first, last = (nn.Sequential(*model.layers[i : i + 2]) for i in (0, 2))
    function = lambda x: checkpoint(last, checkpoint(first, x, use_reentrant=False), use_reentrant=False)  # noqa: E731
    parallel.module = _Called(function, model)
    seen = []
    gathered = lambda *_: seen.append([bool(each.gathered_bytes) for each in parallel.weights])  # noqa: E731
    for layer in model.layers:
        layer.register_forward_pre_hook(gathered)
    x = torch.ones(1, 4, device=layout.device)
    for number in range(3):
        parallel(x).sum().backward()
        parallel.finish_gradient_synchronization()
        order = [[i <= j <= i + (number > 0) for j in range(4)] for i in range(4)]
        assert seen[:4] == order, number
        assert not any("weight" in vars(layer) for layer in model.layers)
        seen.clear()


def check_accumulation(layout):
    """Gradients of several backward passes add up, and so do those of two steps without zero_grad."""
    alone, parallel = made(0, layout.device), FullyShardedDataParallel(made(0, layout.device))
    for number, tokens in enumerate(batches(3, layout.device)):
        for rank in range(2):
            (loss_of(alone, tokens[rank], True) / 2).backward()
        loss_of(parallel, tokens[layout.rank], True).backward()
        if number:
            parallel.finish_gradient_synchronization()
    size = layout.size
    for (name, mine), one in zip(parallel.module.named_parameters(), alone.parameters(), strict=True):
        if one.grad is not None and mine.shape != one.shape:
            each = -(-len(one) // size)
            close(mine.grad, one.grad[layout.rank * each :][:each], name)
        elif one.grad is not None:
            close(mine.grad, one.grad, name)


def check_compute_dtype(layout):
    """Layers compute in bfloat16; shards, their gradients and the optimizer's state stay in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))
    model = model.to(layout.device)
    weights = {name: x.detach().clone() for name, x in model.named_parameters()}
    parallel = FullyShardedDataParallel(model, torch.bfloat16)
    optimizer, _ = adamw(parallel)
    seen = []
    for layer in (model[0], model[1], model[3]):
        layer.register_forward_hook(lambda layer, inputs, out: seen.append((inputs[0].dtype, out.dtype)))
    model[2].register_forward_pre_hook(lambda layer, inputs: (inputs[0].float(),))
    tokens = torch.arange(8, device=layout.device)
    out = parallel(tokens)
    assert seen == [(torch.int64, torch.bfloat16), *[(torch.bfloat16, torch.bfloat16)] * 2]
    with torch.autocast(layout.device.type, torch.bfloat16):
        x = F.linear(weights["0.weight"][tokens], weights["1.weight"], weights["1.bias"])
        expected = F.linear(F.layer_norm(x.float(), (7,)), weights["3.weight"])
    torch.testing.assert_close(out.float(), expected.float(), rtol=2e-2, atol=2e-2)
    # Each process's gradient has 8 significant bits; their mean has more.
    (out.float() * (1 + layout.rank * 2**-9)).sum().backward()
    parallel.finish_gradient_synchronization()
    optimizer.step()
    for name, parameter in model.named_parameters():
        tensors = (parameter, parameter.grad, optimizer.state[parameter]["exp_avg"])
        assert [x.dtype for x in tensors if x is not None] == [torch.float32] * 3, name
    for name, values in parallel.full_state_dict().items():
        assert not torch.equal(values, values.bfloat16()), f"{name} was rounded"
        assert (values - weights[name]).abs().max() < 0.2, name


def check_sums(layout):
    """Gradients are averaged in float32: the mean of 1 and 1 + 2⁻⁷ is no bfloat16."""
    layer = nn.Linear(1, 4, bias=False).to(layout.device)
    parallel = FullyShardedDataParallel(layer, torch.bfloat16)
    x = torch.full((1, 1), 1 + layout.rank * 2**-7, device=layout.device)
    parallel(x).sum().backward()
    parallel.finish_gradient_synchronization()
    assert layer.weight.grad is not None
    assert layer.weight.grad.flatten().tolist() == [1 + 2**-8] * 2


def check_few_rows(layout):
    """A process may have no row at all."""
    alone = nn.Linear(3, 1).to(layout.device)
    nn.init.ones_(alone.weight)
    nn.init.ones_(alone.bias)
    layer = nn.Linear(3, 1).to(layout.device)
    layer.load_state_dict(alone.state_dict())
    parallel = FullyShardedDataParallel(layer)
    optimizer, _ = adamw(parallel)
    parallel(torch.ones(1, 3, device=layout.device)).sum().backward()
    parallel.finish_gradient_synchronization()
    assert parallel.clip_grad_norm_(1.0) == 2.0
    optimizer.step()
    assert len(layer.weight) == 1 - layout.rank
    assert parallel.full_state_dict()["weight"].shape == (1, 3)
    assert parallel.full_state_dict()["weight"].max() < 1


def check_reused(layout):
    """A layer that is called twice, and one that is frozen."""
    torch.manual_seed(layout.rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double().to(layout.device)
    model[1].requires_grad_(False)
    parallel = FullyShardedDataParallel(model)
    weights = {name: x.clone().requires_grad_() for name, x in parallel.full_state_dict().items()}
    function = lambda x: model(model(x)).sum()  # noqa: E731
    parallel.module = _Called(function, model)
    x = torch.ones(1, 3, dtype=torch.float64, device=layout.device)
    out = parallel(x)
    one = x
    for index in (0, 1, 0, 1):
        one = F.linear(one, weights[f"{index}.weight"], weights[f"{index}.bias"])
    close(out, one.sum(), "out")
    out.backward()
    one.sum().backward()
    parallel.finish_gradient_synchronization()
    rows = slice(2 * layout.rank, 2 * layout.rank + 2)
    close(model[0].weight.grad, weights["0.weight"].grad[rows], "a layer called twice")
    assert model[1].weight.grad is None
    assert not any(weight.gathered_bytes for weight in parallel.weights)


class _Called(nn.Module):
    def __init__(self, function, model):
        super().__init__()
        self.function, self.model = function, model

    def forward(self, x):
        return self.function(x)


class Head(nn.Module):
    """A layer that shares the weight of another, and has another name than those that are sharded."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight


def check_choice(layout):
    """Which layers are sharded, and a tied weight of which only one layer would be."""
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]).to(layout.device)
    parallel = FullyShardedDataParallel(model, shard=lambda layer: layer is model[1])
    assert (model[0].weight.shape, model[1].weight.shape) == ((4, 4), (2, 4))
    assert len(parallel.weights) == 1
    embedding = nn.Embedding(4, 2).to(layout.device)
    tied = nn.ModuleDict({"embedding": embedding, "out": Head(embedding.weight)})
    with pytest.raises(ValueError, match=r"shard must choose every layer of a tied weight; got none for out\.weight"):
        FullyShardedDataParallel(tied)


def all_checks(place):
    with layout_of("ddp", place) as layout:
        for how in CASES:
            check_training(layout, clip=True, **how)
        check_training(layout, clip=False)
        for check in (check_shards, check_memory, check_accumulation, check_compute_dtype, check_sums):
            check(layout)
        for check in (check_few_rows, check_reused, check_choice, check_recomputed):
            check(layout)


def test_two_processes_train_as_one(place):
    spawn(all_checks, 2, place)


def test_a_group_of_one(group_of_one):
    alone, parallel = made(0, "cpu"), FullyShardedDataParallel(made(0, "cpu"))
    tokens = batches(1, "cpu")[0, 0]
    for model in (alone, parallel):
        loss_of(model, tokens).backward()
    parallel.finish_gradient_synchronization()
    for mine, one in zip(parallel.parameters(), alone.parameters(), strict=True):
        assert (mine.grad is None) == (one.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, one.grad)


def test_what_is_sharded():
    class Linear(nn.Module):
        def __init__(self, *shape):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(shape))

    yes = [nn.Linear(2, 2), nn.Embedding(2, 2), Linear(2, 2), type("Scaled", (nn.Linear,), {})(2, 2)]
    assert all(map(is_linear_or_embedding, yes))
    assert not any(map(is_linear_or_embedding, [nn.LayerNorm(2), nn.Conv1d(2, 2, 1), Linear(2), nn.Bilinear(2, 2, 2)]))
