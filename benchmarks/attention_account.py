"""The analytic memory account of attention beside what was measured, for the sweeps of the course."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.attention_presets import DTYPES
from cs336_systems.profiling.attention_memory import AttentionSizes, memory_account
from cs336_systems.profiling.memory import MIB
from cs336_systems.profiling.report import ABSENT, format_number, markdown_table
from cs336_systems.profiling.sweep import Row, Status

PRESETS = ("course", "course-causal")
"""Sweeps in which all implementations have the same sizes, and no grouped heads."""


def account_of(rows: Sequence[Row]) -> list[str]:
    """Markdown for the rows of one dtype and mask: what formulas say, and what was held; nothing of other sweeps.

    A measured figure has in brackets how many quadratic tensors it is, beyond the output.
    """
    rows = [row for row in rows if row["preset"] in PRESETS and row["kv_heads"] == row["heads"]]
    if not rows:
        return []
    cells = {(row["length"], row["head_dim"]): sizes_of(row) for row in rows}
    ordered = sorted(cells)
    shares = [memory_account(cells[cell]) for cell in ordered]
    formulas = "; ".join(f"{share.name} {share.formula}" for share in shares[0])
    parts = [
        "### Memory account, MiB",
        f"With batch B, H heads, length N, head dimension d and s bytes an element: {formulas}. "
        "Held is what is kept for the backward with 3, 2, 1 and 0 quadratic tensors: scores, masked scores and "
        "probabilities, two of them, the probabilities alone, or a log-sum-exp for each query.",
        markdown_table(
            ["length", "d", *(share.name for share in shares[0])],
            [
                [str(length), str(dim), *(format_number(share.bytes / MIB) for share in account)]
                for (length, dim), account in zip(ordered, shares, strict=True)
            ],
        ),
    ]
    measured = {
        (row["implementation"], row["length"], row["head_dim"]): row for row in rows if row["pass"] != "forward"
    }
    names = list(dict.fromkeys(name for name, _, _ in measured if _any_held(measured, name)))
    if names:
        parts += [
            "### Held for the backward, measured, MiB (quadratic tensors)",
            markdown_table(
                ["length", "d", *names],
                [
                    [str(length), str(dim), *(_cell(measured.get((name, length, dim))) for name in names)]
                    for length, dim in ordered
                ],
            ),
        ]
    return parts


def sizes_of(row: Row) -> AttentionSizes:
    """The sizes of the problem that a row is of."""
    width = DTYPES[row["dtype"]].itemsize
    return AttentionSizes(row["batch"], max(1, row["heads"]), row["length"], row["head_dim"], width)


def _any_held(measured: dict[tuple[str, int, int], Row], name: str) -> bool:
    rows: Iterable[Row] = (row for key, row in measured.items() if key[0] == name)
    return any(row["held_mib"] is not None for row in rows)


def _cell(row: Row | None) -> str:
    if row is None:
        return ABSENT
    if row["held_mib"] is None:
        return ABSENT if row["status"] == Status.OK.value else str(row["status"])
    kept = sizes_of(row).quadratic_kept(row["held_mib"] * MIB)
    return f"{format_number(row['held_mib'])} ({kept:.1f})"
