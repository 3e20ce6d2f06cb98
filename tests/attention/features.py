"""Features of calls, of any sizes that they have to fit."""

from __future__ import annotations

import operator
from functools import reduce

import torch

from cs336_systems.attention.rules import score_rule
from cs336_systems.attention.variants import block_local, causal, dilated, document, prefix, relative_bias
from cs336_systems.kernels.language import at, tanh, tl


@score_rule(steepest=2.0)
def bent(score, batch, head, row, column, rates, offsets):
    return score + tanh(score) * at(rates, (head, row)) + at(offsets, (batch, column))


@bent.derivative
def _(score, batch, head, row, column, rates, offsets):
    bend = tanh(score)
    return 1.0 + (1.0 - bend * bend) * at(rates, (head, row))


@bent.gradient("rates", axes="head row")
def _(score, batch, head, row, column, rates, offsets):
    return tanh(score)


bent.adds("offsets", axes="batch column")


@score_rule(steepest=1.5)
def stretched(score, batch, head, row, column, factors):
    return score * at(factors, (batch, head, row, column))


@stretched.derivative
def _(score, batch, head, row, column, factors):
    return at(factors, (batch, head, row, column))


@stretched.gradient("factors", axes="batch head row column")
def _(score, batch, head, row, column, factors):
    return score


@score_rule
def clipped(score, batch, head, row, column, table, reach):
    """Reads the table at the distance, up to a reach; it does not say how scores depend on the table."""
    return score + at(table, (head, tl.minimum(tl.maximum(column - row, -reach), reach) + reach))


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
