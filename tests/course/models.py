"""A model with what is hard for data parallelism, and its training by one process and by several."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

TOKENS, WIDTH = 11, 6
"""Two processes can divide neither the tokens nor the 7 rows of a layer evenly."""
CLOSE = {"rtol": 1e-9, "atol": 1e-12}
"""For float64 that is added up in another order."""


class Net(nn.Module):
    """Layers with and without biases, a norm, a table that may be tied, and parameters that get no gradient.

    Args:
        tied: whether the head's weight is the embedding's.
        checkpointed: whether the inner layers are computed again in the backward pass.
    """

    def __init__(self, tied=False, checkpointed=False):
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH, bias=False)
        self.branch = nn.Parameter(torch.randn(WIDTH))  # used by forward with branch=True
        self.unused = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("table", torch.randn(WIDTH), persistent=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.double()

    def inner(self, x):
        return self.down(F.gelu(self.up(x)))

    def forward(self, tokens, branch=False):
        x = self.embedding(tokens)
        x = self.norm(x + self.frozen)
        x = x + (checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x))
        return self.head(x * self.branch if branch else x + self.table)


def made(seed, device, **how):
    torch.manual_seed(seed)
    return Net(**how).to(device)


def batches(count, device):
    """For each step the tokens of the two processes."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(TOKENS, (count, 2, 4), generator=generator).to(device)


def adamw(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def loss_of(model, tokens, branch=False):
    return F.cross_entropy(model(tokens[:-1], branch), tokens[1:])


def branches(step, rank):
    """Whether a process uses the branch: neither does in the first step, then one, then both."""
    return rank < step


def same_everywhere(name, values):
    """Raise an error that names the values if they are not the same on all processes."""
    each = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(each, values.contiguous())
    assert all(torch.equal(one, each[0]) for one in each), f"{name} differs between processes"
