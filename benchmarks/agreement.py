"""Whether two runs of the same benchmarks agree: every time within the intervals of both.

    python benchmarks/report.py --preset 2025 --visits 2 --out results/one
    python benchmarks/report.py --preset 2025 --visits 2 --out results/two
    python benchmarks/agreement.py results/one results/two

Compared are the rows of each results.csv that both folders have, at any depth. Two times agree if their 95 % confidence
intervals have a point in common. The exit status is 1 if any two do not, and 2 if there is nothing to compare.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pandas as pd

from benchmarks.lib import flags
from benchmarks.lib.intervals import pooled
from benchmarks.lib.results import CSV
from benchmarks.lib.tables import markdown

_OF_A_ROW = ("case", "provider", "pass", "which", "tree")
_OTHER = " of the second"


def compared(one: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    """The times that both have, side by side, with the column ``agrees``."""
    times = ["median_ms", "low_ms", "high_ms"]
    same = [name for name in _OF_A_ROW if name in one and name in other]
    first, second = (pooled(frame)[[*same, *times]].dropna(subset=times) for frame in (one, other))
    pairs = first.merge(second, on=same, suffixes=("", _OTHER))
    apart = (pairs["low_ms"] > pairs[f"high_ms{_OTHER}"]) | (pairs["high_ms"] < pairs[f"low_ms{_OTHER}"])
    ratio = pairs[f"median_ms{_OTHER}"] / pairs["median_ms"]
    return pairs.assign(ratio=ratio, agrees=~apart)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print how many times agree, and those that do not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("one", "two"):
        parser.add_argument(name, type=flags.folder, help="a folder of results")
    options = parser.parse_args(arguments)
    found = []
    for path in sorted(options.one.rglob(CSV)):
        part = path.relative_to(options.one)
        frames = [
            pd.read_csv(folder / part) if (folder / part).exists() else pd.DataFrame()
            for folder in vars(options).values()
        ]
        if all({"case", "status", "low_ms"} <= {*frame} for frame in frames):
            found.append(compared(*frames).assign(part=str(part.parent)))
    rows = pd.concat(found) if found else pd.DataFrame()
    if rows.empty:
        print("the folders have no times of the same cases", file=sys.stderr)
        return 2
    apart = rows[~rows["agrees"]]
    print(f"{len(rows) - len(apart)} of {len(rows)} times agree")
    if len(apart):
        print(markdown(apart.drop(columns="agrees")))
    return int(len(apart) > 0)


if __name__ == "__main__":
    sys.exit(main())
