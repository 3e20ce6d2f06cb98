"""What the figures of attention alone say, in sentences made of the rows of results.csv: see `report_findings`."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.report_rows import Line, NotMeasuredError, Rows, fine, grouped, of, pairs, powers_of, spread


def attention_growth(rows: Rows) -> str:
    """What memory that is held for the backward is linear in the length, and what quadratic."""
    found = [row for row in fine(rows, "held_mib", "length", "batch", "implementation") if row.get("pass") != "forward"]
    # Of one sequence, since a sweep may have fewer of the longer ones.
    found = [{**row, "held": str(of(row, "held_mib") / of(row, "batch"))} for row in found]
    series = grouped(found, ["implementation", "pass", "dtype", "mask", "head_dim"])
    powers: dict[str, list[float]] = {}
    for rows_of_it, power in powers_of(series, "length", "held"):
        powers.setdefault(rows_of_it[0]["implementation"], []).append(power)
    quadratic = [f"{name} ({spread(found, 2)})" for name, found in powers.items() if max(found) > 1.5]
    linear = [f"{name} ({spread(found, 2)})" for name, found in powers.items() if max(found) <= 1.5]
    return (
        "The memory that a sequence holds for the backward grows with this power of the length, from the longest two: "
        f"quadratic: {', '.join(quadratic) or 'none'}; linear: {', '.join(linear) or 'none'}."
    )


def attention_fastest(rows: Rows) -> str:
    """Which implementation is the fastest at the longest length, by pass and dtype."""
    timed = fine(rows, "median_ms", "implementation", "pass", "dtype", "length")
    longest = max(int(row["length"]) for row in timed)
    said = []
    for group in grouped([row for row in timed if int(row["length"]) == longest], ["pass", "dtype"]):
        totals: dict[str, list[float]] = {}
        for row in group:
            totals.setdefault(row["implementation"], []).append(of(row, "median_ms"))
        # The sum over head dimensions and masks; who lacks some of them is not compared.
        complete = max(map(len, totals.values()))
        sums = {name: sum(times) for name, times in totals.items() if len(times) == complete}
        said.append(f"{group[0]['pass']}, {group[0]['dtype']}: {min(sums, key=lambda name: sums[name])}")
    return f"At length {longest} the fastest, by the sum over head dimensions and masks: {'; '.join(said)}."


def _by_implementation(found: Sequence[tuple[Line, Line]]) -> str:
    """By implementation, how many times as long the first of each pair of rows takes as the second."""
    ratios: dict[str, list[float]] = {}
    for longer, shorter in found:
        ratios.setdefault(longer["implementation"], []).append(of(longer, "median_ms") / of(shorter, "median_ms"))
    return "; ".join(f"{name} {spread(values)}" for name, values in ratios.items())


def attention_ratio(rows: Rows) -> str:
    """The backward pass of attention over its forward."""
    timed = fine(rows, "median_ms", "implementation", "pass")
    found = pairs(timed, "pass", "forward", "backward", ("implementation", "dtype", "mask", "length", "head_dim"))
    ratios = _by_implementation([(backward, forward) for forward, backward in found])
    return f"The backward pass takes so many times as long as the forward pass: {ratios}."


def attention_half(rows: Rows) -> str:
    """How many times as fast attention is in bfloat16."""
    timed = fine(rows, "median_ms", "dtype", "implementation")
    found = pairs(timed, "dtype", "float32", "bfloat16", ("implementation", "pass", "mask", "length", "head_dim"))
    return f"bfloat16 is so many times as fast as float32: {_by_implementation(found)}."


def beside_torch(rows: Rows) -> str:
    """How many times as fast as torch's fused kernels the flash kernels are, by dtype and pass."""
    found = _of_flash(fine(rows, "speedup_over_reference", "implementation", "pass", "dtype", "length"))
    references = sorted({f"{row['reference']} in {row['dtype']}" for row in found})
    said = _by_length(found, "speedup_over_reference")
    return f"flash is so many times as fast as torch's kernel, which is {', '.join(references)}: {said}."


def beside_naive(rows: Rows) -> str:
    """How many times as fast as naive attention the flash kernels are, by dtype and pass."""
    found = _of_flash(fine(rows, "speedup_over_naive", "implementation", "pass", "dtype", "length"))
    return f"flash is so many times as fast as naive: {_by_length(found, 'speedup_over_naive')}."


def _of_flash(rows: Sequence[Line]) -> list[Line]:
    found = [row for row in rows if row["implementation"] == "flash"]
    if not found:
        raise NotMeasuredError("no row is of flash")
    return found


def _by_length(rows: Sequence[Line], column: str) -> str:
    """By dtype and pass, the spread of a column at the shortest and at the longest length that the rows have."""
    said = []
    for group in grouped(rows, ["dtype", "pass"]):
        lengths = sorted({int(row["length"]) for row in group})
        ends = [
            f"{spread([of(row, column) for row in group if int(row['length']) == length])} at {length}"
            for length in dict.fromkeys((lengths[0], lengths[-1]))
        ]
        said.append(f"{group[0]['dtype']}, {group[0]['pass']}, {' and '.join(ends)}")
    return "; ".join(said)
