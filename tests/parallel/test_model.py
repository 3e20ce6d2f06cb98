"""A model that several processes train: its loss and gradients are those of one process, in every mode."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.tensor import DTensor

from cs336_systems.parallel import ContextAttention, Layout, ParallelModel
from cs336_systems.training.optimizer import global_norm, update
from cs336_systems.transformer import Transformer, TransformerConfig, generate

from .processes import layout_of, spawn

SIZES = {
    "vocab_size": 40,
    "context_length": 22,  # neither 4 chunks nor 8
    "d_model": 32,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
}
CASES = [
    ({}, {}, {}),
    ({"tie_embeddings": True, "window": 5}, {"checkpoint_every": 1}, {"reshard": False}),
    ({"attn": "naive"}, {"checkpoint_every": 2}, {"compile": True}),
]
"""Changes of the model's config, keywords of the model, and keywords of `ParallelModel`."""
SEQUENCES, PARTS = 8, 2
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
"""For float32 that is summed in another order, and on a GPU multiplied in other tiles."""


def batch():
    """Tokens and targets; those of one sequence, and most of another, do not count."""
    tokens = torch.randint(40, (SEQUENCES, 23), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    targets[0, 4:] = targets[5] = -100
    return tokens[:, :-1], targets


def both(layout, changes=None, settings=None, **ways):
    """The model of one process, and of several, with the same initial values."""
    config = TransformerConfig(**SIZES | (changes or {}))

    def make(device):
        return Transformer(config, device=device, **settings or {})

    torch.manual_seed(3)
    alone = make(layout.device)
    torch.manual_seed(3)
    return alone, ParallelModel(make, layout, **ways)


def sharded(layout):
    return layout.mode in ("fsdp", "fsdp+context")


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def step(parallel, chunk=None):
    """The loss of a step in micro-batches; the gradients stay in the parameters."""
    layout, (tokens, targets) = parallel.layout, batch()
    each = SEQUENCES // layout.data_size // PARTS
    total = torch.zeros((), device=layout.device)
    for part in range(PARTS):
        first = (part * layout.data_size + layout.data_rank) * each
        mine = slice(first, first + each)
        with parallel.micro_batch(last=part == PARTS - 1):
            loss = parallel.loss(tokens[mine], targets[mine], count=int((targets != -100).sum()), chunk=chunk)
            loss.backward()
        total += loss.detach()
    return layout.all_reduce(total) / layout.size


def check_gradients(layout, changes, settings, ways):
    what = f"{layout.mode} of {layout.context_size}, {changes}, {settings}, {ways}"

    def message(text, name=""):
        return f"{what}, {name}: {text}"

    alone, parallel = both(layout, changes, settings, **ways)
    # Initialised block by block, with the same values.
    for (name, parameter), other in zip(parallel.model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(whole(parameter.detach()), other), message("another initial value", name)
        assert isinstance(parameter, DTensor) == sharded(layout)
    tokens, targets = (half.to(layout.device) for half in batch())
    expected = alone(tokens, targets=targets)
    expected.backward()
    loss = step(parallel, chunk=7 if "tie_embeddings" in changes else None)
    torch.testing.assert_close(loss, expected.detach(), msg=message, **CLOSE)
    for (name, parameter), other in zip(parallel.model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(
            whole(parameter.grad), other.grad, msg=functools.partial(message, name=name), **CLOSE
        )
    norm, limit = global_norm([parameter.grad for parameter in alone.parameters()]), 0.01
    assert norm > limit
    before = [whole(parameter.detach()).clone() for parameter in parallel.model.parameters()]
    found = update(torch.optim.SGD(parallel.model.parameters(), lr=1.0), parallel.model, limit)
    assert not isinstance(found, DTensor)
    torch.testing.assert_close(found, norm, msg=message, **CLOSE)
    after = [whole(parameter.detach()) for parameter in parallel.model.parameters()]
    moved = global_norm([new - old for new, old in zip(after, before, strict=True)])
    torch.testing.assert_close(moved, torch.full_like(norm, limit), rtol=1e-2, atol=0)


def check_evaluation(layout):
    """Generated tokens are those of one process, and gathered parameters are freed."""
    alone, parallel = both(layout, reshard=False)
    with parallel.evaluating(whole=True):
        tokens = generate(parallel.model, [[1, 2], [3]], 5, temperature=0)
    assert tokens == generate(alone, [[1, 2], [3]], 5, temperature=0)
    attend = parallel.model.get_submodule("layers.0.attn").attend
    assert isinstance(attend, ContextAttention) == (layout.context_size > 1)
    assert all(isinstance(parameter, DTensor) for parameter in parallel.model.parameters()) == sharded(layout)
    if layout.context_size > 1:
        with pytest.raises(TypeError, match=r"attend must be an Attention, .*; got ContextAttention"), torch.no_grad():
            generate(parallel.model, [[1, 2]], 2)


def check_bfloat16(layout):
    """Blocks are gathered in bfloat16; the residual stream stays in float32."""
    (tokens, targets), (alone, parallel) = batch(), both(layout, autocast=True)
    seen = set()
    block = parallel.model.get_submodule("layers.1")
    block.register_forward_hook(lambda module, inputs, out: seen.add((inputs[0].dtype, out.dtype)))
    with torch.autocast(layout.device.type, torch.bfloat16):
        expected = alone(tokens.to(layout.device), targets=targets.to(layout.device))
        loss = step(parallel)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=2e-3, atol=0)
    assert seen == {(torch.float32, torch.float32)}
    for (name, parameter), other in zip(parallel.model.named_parameters(), alone.parameters(), strict=True):
        mine, of_one = whole(parameter.grad), whole(other.grad)
        assert mine.dtype == torch.float32
        error = (mine - of_one).norm() / of_one.norm()
        assert error < 3e-2, f"{layout.mode}, {name}: {error}"


def gradients(place, *modes):
    """Each mode with its context size and its cases."""
    # Code generation would take most of the time, and is not tested here.
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    for mode, context_size, *cases in modes:
        with layout_of(mode, place, context_size) as layout:
            for case in cases:
                check_gradients(layout, *case)


def all_modes(place, *modes):
    gradients(place, *modes)
    for mode, context_size, *_ in modes:
        with layout_of(mode, place, context_size) as layout:
            check_evaluation(layout)
            check_bfloat16(layout)


def test_two_processes_have_the_gradients_of_one(place):
    plain, options, compiled = CASES
    shared = ("context", None, options), ("fsdp+context", None, plain, compiled)
    spawn(all_modes, 2, place, ("ddp", None, plain, compiled), ("fsdp", None, options), *shared)


@pytest.mark.slow
def test_two_processes_in_every_other_case(place):
    """Above and here, every case in every mode."""
    plain, options, compiled = CASES
    more = ("fsdp", None, plain, compiled), ("context", None, plain, compiled)
    spawn(gradients, 2, place, ("ddp", None, options), *more, ("fsdp+context", None, options))


@pytest.mark.slow
@pytest.mark.parametrize(("count", "context_size"), [(4, 2), (1, None)])
def test_two_dimensions_and_a_group_of_one(count, context_size):
    spawn(all_modes, count, "cpu", *((mode, context_size, *CASES[:2]) for mode in ("fsdp+context", "context")))


def test_a_single_process():
    layout = Layout(torch.device("cpu"))
    check_gradients(layout, *CASES[0])
    check_evaluation(layout)
    check_bfloat16(layout)


def test_no_target_at_all_is_no_loss():
    model, (tokens, targets) = Transformer(TransformerConfig(**SIZES)), batch()
    loss = model(tokens[5:6], targets=targets[5:6], count=3)
    loss.backward()
    assert loss == 0
    assert all(parameter.grad is not None and parameter.grad.eq(0).all() for parameter in model.parameters())
