"""Features of calls, of any sizes that they have to fit."""

from __future__ import annotations

import operator
from functools import reduce

import torch

from cs336_systems.attention.variants import (
    block_local,
    causal,
    dilated,
    document,
    prefix,
    prefix_tree,
    relative_bias,
    tree_layout,
)
from cs336_systems.attention.variants.recorded import FLOATS, recorded_scores

bent = recorded_scores(
    lambda score, b, h, q_idx, kv_idx, rates, offsets: (
        score + torch.tanh(score) * rates[h, q_idx].clamp(-1, 1) + offsets[b, kv_idx]
    ),
    (FLOATS, 2),
    (FLOATS, 2),
)
stretched = recorded_scores(
    lambda score, b, h, q_idx, kv_idx, factors: score * factors[b, h, q_idx, kv_idx].clamp(-1.5, 1.5), (FLOATS, 4)
)
"""Both bound their derivatives, which float32 gradients are scaled by."""


def random_tree(most):
    """Lengths and parents of random nodes in depth-first order, of up to ``most`` tokens; some have none."""
    lengths, parents, path = [], [], []
    while sum(lengths) < most and torch.rand(()) < 0.95:
        del path[int(torch.randint(len(path) + 1, ())) :]
        parents.append(path[-1] if path else -1)
        path.append(len(lengths))
        lengths.append(min(int(torch.randint(10, ())), most - sum(lengths)))
    return lengths, parents


class Maker:
    """Features of a call with these sizes, in the order of `sizes_of`.

    ``axes`` say which are not of size 1: b(atch), h(ead), q(uery) and k(ey).
    """

    def __init__(self, sizes, dtype, device):
        self.on = {"dtype": dtype, "device": device}
        self.device = device
        self.batch, self.heads, self.q_len, self.k_len = sizes

    def shape(self, axes):
        sizes = {"b": self.batch, "h": self.heads, "q": self.q_len, "k": self.k_len}
        return tuple(size if name in axes else 1 for name, size in sizes.items())

    def parameter(self, *shape):
        return torch.randn(shape, **self.on).requires_grad_()

    def window(self, before, after):
        return {"window": (before, after)}

    def softcap(self, cap):
        return {"softcap": cap}

    def dropout(self, dropout_p, seed):
        return {"dropout_p": dropout_p, "seed": seed}

    def bias(self, axes):
        return {"bias": self.parameter(*self.shape(axes))}

    def slopes(self, of_each_entry=False):
        return {"alibi_slopes": torch.rand(*[self.batch] * of_each_entry, self.heads, **self.on).requires_grad_()}

    def mask(self, axes):
        return {"mask": torch.rand(self.shape(axes), device=self.device) < 0.7}

    def sinks(self):
        return {"sinks": self.parameter(self.heads)}

    def tensors(self, *names):
        """Features that are tensors, by the names of arguments."""
        made = self.bias("hqk") | self.slopes() | self.sinks() | self.mask("bk")
        return {name: made[name] for name in names}

    def documents(self):
        ids = [torch.randint(0, 3, (self.batch, length), device=self.device) for length in (self.q_len, self.k_len)]
        return {"mask": document(*[x.sort(-1).values for x in ids]) & ~dilated(3)}

    def prefixes(self):
        lengths = torch.randint(0, self.k_len + 1, (self.batch,), device=self.device)
        return {"mask": prefix(lengths) | causal(self.k_len - self.q_len) | block_local(7)}

    def trees(self):
        """Of random nodes, in entries that differ; what is left of a row is padding."""
        drawn = [random_tree(self.k_len) for _ in range(self.batch)]
        layout = tree_layout(*zip(*drawn, strict=True), length=self.k_len, device=self.device)
        return {"mask": prefix_tree(layout.ends)}

    def rules(self):
        rates, factors = (torch.rand(*shape, **self.on) for shape in ((self.heads, self.q_len), self.shape("hk")))
        offsets = self.parameter(self.batch, self.k_len)
        scores = bent(rates.requires_grad_(), offsets) + stretched((0.5 + factors).requires_grad_())
        return {"scores": scores}

    def distances(self, axes, before=0, after=0):
        """A table of all distances, if "d" is among the axes, and of some more ``before`` and ``after`` them."""
        length = self.q_len + self.k_len - 1 + before + after if "d" in axes else 1
        origin = self.q_len - 1 + before if "d" in axes else None
        return {"scores": relative_bias(self.parameter(*self.shape(axes)[:2], length), origin)}


def together(*features):
    """All of these, the changes of scores one after another."""
    made = {}
    for each in features:
        scores = [one["scores"] for one in (made, each) if "scores" in one]
        made |= each
        if scores:
            made["scores"] = reduce(operator.add, scores)
    return made
