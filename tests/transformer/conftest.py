"""A small model, prompts, and comparisons that the tests share."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.transformer import TransformerConfig

SIZES = {
    "vocab_size": 40,
    "context_length": 24,
    "d_model": 32,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "attn": "naive",
}
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [1, 2, 3]]

COMPILE_WARNINGS = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch")
"""torch.compile itself uses deprecated functions."""


@pytest.fixture(scope="session")
def tiny():
    """Makes a config of a few thousand parameters, with changes: ``tiny(window=4)``."""
    return lambda **changes: TransformerConfig(**SIZES | changes)


@pytest.fixture
def tokens(device):
    """(3, 12) tokens, and the token after each."""
    drawn = torch.randint(SIZES["vocab_size"], (3, 13), device=device)
    return drawn[:, :-1], drawn[:, 1:]


def gradients(model, loss):
    """The gradients of a model's parameters by name."""
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, tuple(named.values())), strict=True))


def saved_tensors(function, *known):
    """The tensors that autograd saves during ``function()``, one per storage, apart from those that are known."""
    saved = {}

    def pack(x):
        saved.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = function()
    addresses = {x.untyped_storage().data_ptr() for x in known}
    del result
    return [x for address, x in saved.items() if address not in addresses]


def saved_bytes(function, *known):
    """The size of what autograd saves during ``function()``."""
    return sum(x.untyped_storage().nbytes() for x in saved_tensors(function, *known))


def assert_all_close(actual, expected, **tolerance):
    """Compare dicts of tensors."""
    assert actual.keys() == expected.keys()
    for name, x in actual.items():
        torch.testing.assert_close(x, expected[name], **tolerance, msg=lambda text, name=name: f"{name}: {text}")
