"""The cells of the precision benchmark, and what is measured of each, in a process of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.flags import DTYPES
from benchmarks.suite import columns_here, columns_of_failure
from cs336_systems.attention import attention
from cs336_systems.profiling.precision import ACCUMULATIONS, ADDEND, ADDITIONS, Reference, ToyModel, dtypes_of
from cs336_systems.profiling.sweep import OK, Row, outcome_of
from cs336_systems.testing import TF32_EPS, Finding, Shapes, make_inputs

ACCUMULATION, AUTOCAST, ATTENTION = "accumulation", "autocast", "attention"
KINDS = (ACCUMULATION, AUTOCAST, ATTENTION)
RESULTS = ("out", "lse", "dq", "dk", "dv")
WITHOUT_LSE = ("sdpa",)
"""Implementations that return the output alone."""
WITH_NARROW_SCORES = ("naive", "compiled")
"""Their scores, and so their log-sum-exp, are as exact as q and k, where the budget holds it to float32."""

# The oracle, the size of its terms and naive's graph, in float64 or less.
_QUADRATIC_MATRICES = 16
_ROWS, _IN, _OUT = 32, 16, 8


@dataclass(frozen=True)
class Cell:
    """What is measured together: the sums, a dtype of autocast, or one problem of attention for all implementations."""

    kind: str
    dtype: str = ""
    mask: str = ""
    length: int = 0
    head_dim: int = 0

    @property
    def key(self) -> str:
        """The cell in words, which no other has."""
        problem = f" {self.mask} d {self.head_dim} length {self.length}" if self.kind == ATTENTION else ""
        return f"{self.kind} {self.dtype}{problem}".strip()


@dataclass(frozen=True)
class Conditions:
    """The same for all cells. ``tf32``: whether products of float32 may use it; the budget is then TF32's, too."""

    device: torch.device
    implementations: tuple[str, ...]
    batch: int
    heads: int
    seed: int
    tf32: bool


def quadratic_bytes(cell: Cell, batch: int, heads: int) -> int:
    """About how many bytes are needed for the float64 result that a problem of attention is compared with."""
    return _QUADRATIC_MATRICES * 8 * batch * max(1, heads) * cell.length**2


def measure_cell(job: tuple[Cell, Conditions]) -> Row | list[Row]:
    """The columns of a cell's rows; what cannot be measured is a status."""
    cell, conditions = job
    device = conditions.device

    def measure() -> Row | list[Row]:
        torch.manual_seed(conditions.seed)
        if cell.kind == ACCUMULATION:
            return accumulations()
        if cell.kind == AUTOCAST:
            return dtypes_of_toy(DTYPES[cell.dtype], device)
        return errors(cell, conditions)

    return columns_here(measure, device=device, tf32=conditions.tf32)


def accumulations() -> list[Row]:
    """A row for each way to add up, on the CPU wherever the rest is measured."""
    return [
        columns_of_failure(OK)
        | {
            "name": way.name,
            "accumulator": _short(way.accumulator),
            "addend": _short(way.addend),
            "cast": way.cast,
            "total": (total := way.total()),
            "total_error": total - ADDEND * ADDITIONS,
        }
        for way in ACCUMULATIONS
    ]


def dtypes_of_toy(autocast: torch.dtype, device: torch.device) -> list[Row]:
    """A row for each tensor of a step of the toy model, under autocast."""
    model = ToyModel(_IN, _OUT).to(device)
    targets = torch.randint(_OUT, (_ROWS,), device=device)

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets)

    seen = dtypes_of(model, torch.randn(_ROWS, _IN, device=device), loss=loss, autocast=autocast)
    return [
        columns_of_failure(OK) | {"what": one.what, "name": one.name, "module": one.module, "found": _short(one.dtype)}
        for one in seen
    ]


def errors(cell: Cell, conditions: Conditions) -> list[Row]:
    """A row for each implementation: its errors, and its budget."""
    heads = conditions.heads or None
    shapes = Shapes.of(conditions.batch, q_len=cell.length, d=cell.head_dim, q_heads=heads)
    generator = torch.Generator(conditions.device).manual_seed(conditions.seed)
    inputs = make_inputs(shapes, dtype=DTYPES[cell.dtype], device=conditions.device, generator=generator)
    causal = cell.mask == "causal"
    # Gradients are those of the output alone, so that they can be compared with torch's, which returns nothing else.
    plain = Reference.of(inputs, causal=causal, return_lse=False)
    with_lse = Reference.of(inputs, causal=causal)
    eps = TF32_EPS if conditions.tf32 else None
    rows = []
    for name in conditions.implementations:
        try:
            found = plain.errors_of(partial(attention, causal=causal, impl=name), eps=eps)
            narrow = name in WITH_NARROW_SCORES and DTYPES[cell.dtype].itemsize == 2
            if name not in WITHOUT_LSE and not narrow:
                both = with_lse.errors_of(partial(attention, causal=causal, impl=name, return_lse=True), eps=eps)
                found += [finding for finding in both if finding.name == "lse"]
        except Exception as error:
            rows.append(columns_of_failure(outcome_of(error, refusals=(ValueError, TypeError))) | {"name": name})
        else:
            rows.append(columns_of_failure(OK) | {"name": name} | columns_of_findings(found))
    return rows


def columns_of_findings(findings: list[Finding]) -> Row:
    """The errors of a call in columns, the largest share of a budget, and whether all are within theirs.

    None stands for what is not finite, which is within no budget.
    """
    row: Row = {}
    for finding in findings:
        column = f"{finding.name}_{finding.measure}"
        row |= {column: _finite(finding.error), f"{column}_budget": _finite(finding.budget)}
        if finding.measure == "norm":
            row[f"{finding.name}_relative"] = _finite(finding.error / finding.size) if finding.size else None
    shares = [_finite(finding.error / finding.budget) for finding in findings]
    known = [share for share in shares if share is not None]
    row["of_budget"] = max(known) if len(known) == len(shares) else None
    row["within_budget"] = all(finding.holds for finding in findings)
    return row


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
