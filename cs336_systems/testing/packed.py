"""Packed sequences: their inputs, and the budget of what is computed of them, from each sequence by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .budget import Finding, compare
from .evaluation import Results
from .features import Features
from .inputs import Inputs
from .oracle import naive_results, oracle
from .terms import roundings, terms

Lengths = Sequence[tuple[int, int]]
"""How many queries and keys each sequence has."""


def starts_of(lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """``cu_seqlens`` of sequences of these lengths: int32, one more than there are."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def make_packed(
    lengths: Lengths,
    *,
    heads: tuple[int, int] = (2, 1),
    d: int = 8,
    dv: int | None = None,
    beyond: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Inputs:
    """Random q (all_q, q_heads, d), k, v, dout, and dlse (q_heads, all_q); ``beyond`` rows belong to no sequence."""
    q_rows, k_rows = (sum(column) + beyond for column in zip(*lengths, strict=True))
    dv = d if dv is None else dv
    shapes = (q_rows, heads[0], d), (k_rows, heads[1], d), (k_rows, heads[1], dv), (q_rows, heads[0], dv)
    q, k, v, dout = (torch.randn(shape, dtype=dtype, device=device) for shape in shapes)
    wide = torch.promote_types(dtype, torch.float32)
    return Inputs(q, k, v, dout, torch.randn(heads[0], q_rows, dtype=wide, device=device))


def assert_packed_within_budget(
    actual: Results, inputs: Inputs, lengths: Lengths, *, causal: bool | str = False, features: Features | None = None
) -> None:
    """Hold what an implementation made of packed ``inputs`` to the budget of `assert_within_budget`.

    The oracle, naive and the terms are those of each sequence called by itself. Features are of all sequences: tensors
    of two axes (sequences or 1, heads), or of four, rows and columns being those of the longest.

    Raises:
        AssertionError: it is beyond it; the message lists every result.
    """
    made = [_of_all(make, power, actual, inputs, lengths, causal, features or {}) for make, power in MAKERS]
    findings: list[Finding] = compare(actual, *made)
    if not all(finding.holds for finding in findings):
        raise AssertionError("\n".join(["the error is beyond the budget", *map(str, findings)]))


MAKERS = ((oracle, 1), (naive_results, 1), (terms, 2), (roundings, 2))
"""What the budget compares, and the power in which the contributions of sequences add up."""


def _of_all(
    make: Any, power: int, like: Results, inputs: Inputs, lengths: Lengths, causal: bool | str, features: Features
) -> Results:
    """What ``make`` gives for each sequence, put together as results of packed sequences."""
    wide = {name: torch.zeros_like(x, dtype=torch.float64) for name, x in like.items()}
    if power == 1:
        # Rows of no sequence see nothing.
        blind = features.get("sinks", torch.full((like["lse"].shape[0],), -math.inf))
        wide["lse"] += blind.detach().to(wide["lse"])[:, None]
    first_q = first_k = 0
    for number, (q_len, k_len) in enumerate(lengths):
        rows, columns = slice(first_q, first_q + q_len), slice(first_k, first_k + k_len)
        first_q, first_k = rows.stop, columns.stop
        spans = (rows, columns, columns, rows)
        q, k, v, dout = (x[span].transpose(0, 1)[None] for x, span in zip(inputs[:4], spans, strict=True))
        own = Inputs(q, k, v, dout, inputs.dlse[None, :, rows])
        parts = {name: _part(x, number, q_len, k_len) for name, x in features.items()}
        given = {name: x[parts[name]] if parts[name] else x for name, x in features.items()}
        for name in given:
            if parts[name]:
                given[name] = given[name].detach().requires_grad_(features[name].requires_grad)
        results = make(own, causal=causal, features=given)
        for name, x in results.items():
            if name == "lse":
                wide[name][:, rows] = x.reshape(wide[name][:, rows].shape)
            elif name in ("out", "dq", "dk", "dv"):
                span = columns if name in ("dk", "dv") else rows
                wide[name][span] = x.reshape(wide[name].shape[1], *x.shape[-2:]).transpose(0, 1)
            else:
                place = parts.get(name.removeprefix("d"), ())
                wide[name][place] += x.reshape(wide[name][place].shape) ** power
    if "dsinks" in wide and make is not roundings:
        # The log-sum-exp of rows of no sequence is their sink.
        wide["dsinks"] += (inputs.dlse[:, first_q:].double() ** power).sum(-1)
    of_all = ("out", "lse", "dq", "dk", "dv")
    whole = {name: x.sqrt() if power == 2 and name not in of_all else x for name, x in wide.items()}
    return whole if make is not naive_results else {name: x.to(like[name].dtype) for name, x in whole.items()}


def _part(tensor: Any, number: int, q_len: int, k_len: int) -> tuple[Any, ...]:
    """The index of what a feature has for a sequence; () for what is no tensor."""
    if not isinstance(tensor, Tensor) or tensor.ndim < 2:
        return ()
    spans = (slice(number, number + 1), slice(None), slice(0, q_len), slice(0, k_len))[: tensor.ndim]
    return tuple(span if size > 1 else slice(None) for span, size in zip(spans, tensor.shape, strict=True))
