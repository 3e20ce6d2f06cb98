"""What tests of the model share: a small one."""

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


@pytest.fixture(scope="session")
def tiny():
    """Makes a config of a few thousand parameters, with changes: ``tiny(window=4)``."""
    return lambda **changes: TransformerConfig(**SIZES | changes)


@pytest.fixture
def tokens(device):
    """(3, 12) tokens, and what follows each."""
    drawn = torch.randint(SIZES["vocab_size"], (3, 13), device=device)
    return drawn[:, :-1], drawn[:, 1:]
