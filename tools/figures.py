"""Check that each measured figure of README.md and of the pages that are written in docs follows from committed rows.

    python tools/figures.py            # says which figures differ from their rows, and which have none
    python tools/figures.py --list     # also each figure, and what its rows give
    python tools/figures.py --write    # also puts what rows give in the place of figures that differ

docs/figures.toml has, for each text with figures, the SQL that computes them from files of docs/results, and the
numbers that look measured and are not. A figure is a number with a unit, a decimal number, or a number in a table of
such. Code is not searched, and of docs/results only README.md of each machine and the answers of its reports, because
programs write the other pages. Needs Python 3.11.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import sqlite3
import statistics
import sys
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

import tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKED = "rows.tar.xz"

NUMBER = r"(?<![\w.,-])\d+(?:,\d{3})*(?:\.\d+)?"
ALONE = r"(?![\w/]|\.\w)"
UNIT = (
    r"(?:[TGM]FLOP/s|tokens/s|[KMGT]i?B(?:/s)?|ms|[µu]s|ns|s|seconds?|minutes?|MHz|GHz|W|%"
    r"|(?:times|x|×)(?!\s\d))(?![\w/])"  # the sizes of "64 x 16" and the loops of "1000 times 0.01" are not measured
)
WITH_UNIT = rf"{NUMBER}(?:(?:,|,?\s(?:to|and|or|/))\s{NUMBER})*\s?{UNIT}"
DECIMAL = rf"(?<![\w.,-])\d+\.\d+{ALONE}"
FIGURE = re.compile(f"{WITH_UNIT}|{DECIMAL}")
NAMED = r"\b(?:torch|PyTorch|[Tt]riton|cuDNN|ptxas|Python|NumPy|version|capability)"
VERSION = re.compile(rf"{NAMED}(?:\s\d[\w.+]*(?![\w.+]|\s?{UNIT})(?:(?:,|\sto|\sand|\sor)(?=\s\d))?)+")
CODE = re.compile(r"^```.*?^```|`[^`\n]+`|\]\([^)\s]*\)", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"((?:^[^|\n].*\n)*\n?^\|.*\n)\|[-:| ]+\|\n((?:^\|.*(?:\n|\Z))+)", re.MULTILINE)
"""The paragraph above a table with its header, and its lines."""
LATER_CELLS = re.compile(r"^\|[^|\n]*(\|.*)", re.MULTILINE)
IN_TABLE = re.compile(r"(?<![\w/])(?:[TGM]FLOP/s|tokens/s|[MG]i?B(?:/s)?|ms|[µu]s)(?!\w)")
"""A unit above a table: its cells are measured."""


@dataclass(frozen=True)
class Figure:
    """A number on a page, and what its rows give."""

    page: str
    line: int
    start: int
    printed: str
    computed: str

    @property
    def agrees(self) -> bool:
        return self.printed.replace(",", "") == self.computed.replace(",", "")


@dataclass
class Report:
    """What a check found."""

    figures: list[Figure] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def ratio_within_rounds(above: str, below: str) -> float:
    """The median over the rounds of two `round_ms` of the ratio of one to the other."""
    pairs = zip(above.split(";"), below.split(";"), strict=True)
    return statistics.median(float(x) / float(y) for x, y in pairs)


class Rows:
    """The files below `folder` as tables of a database; each is read when a query names it."""

    def __init__(self, folder: Path, views: dict[str, str]) -> None:
        self.folder, self.views = folder, views
        self.database = sqlite3.connect(":memory:")
        self.database.create_function("ratio_within_rounds", 2, ratio_within_rounds)
        self.files: set[str] = set()

    def numbers(self, query: str) -> list[float]:
        """What the query gives, row by row. Raises ValueError for a file or a row that is missing."""
        named: list[str] = []
        for name, view in reversed(self.views.items()):  # a view may name those above it
            if re.search(rf"\b{name}\b", " ".join([query, *named])):
                named.insert(0, f"{name} as ({view})")
        query = (f"with {', '.join(named)} " if named else "") + query
        files = re.findall(r'"([^"]+\.csv)"', query)
        if not files:
            raise ValueError("the query names no file of rows")
        try:
            for name in files:
                self.read(name)
            found = [cell for row in self.database.execute(query) for cell in row]
        except (OSError, sqlite3.Error) as error:
            raise ValueError(str(error)) from error
        if not found or not all(isinstance(cell, int | float) for cell in found):
            raise ValueError(f"the query gives {found or 'no rows'}")
        return found

    def text(self, name: str) -> str:
        """The file, or that of the rows.tar.xz with which a report was published: of its folder, and of its parts'."""
        path = self.folder / name
        for report in path.parents[:2]:
            if not path.exists() and (report / PACKED).exists():
                with tarfile.open(report / PACKED) as packed:
                    for member in packed:  # below a folder that has the name of the report where it was measured
                        if Path(*Path(member.name).parts[1:]) == path.relative_to(report):
                            return io.TextIOWrapper(cast("IO[bytes]", packed.extractfile(member))).read()
        return path.read_text(encoding="utf-8")

    def read(self, name: str) -> None:
        if name in self.files:
            return
        header, *rows = csv.reader(io.StringIO(self.text(name)))
        columns = ", ".join(f'"{column}" numeric' for column in header)
        self.database.execute(f'create table "{name}" ({columns})')
        places = ", ".join("?" for _ in header)
        self.database.executemany(f'insert into "{name}" values ({places})', [[c or None for c in row] for row in rows])
        self.files.add(name)


def pattern(text: str, blank: str = rf"({NUMBER})") -> re.Pattern[str]:
    """Matches `text` however its lines are broken, with a number for each {}."""
    parts = [r"\s+".join(re.escape(word) for word in re.split(r"\s+", part)) for part in text.strip().split("{}")]
    return re.compile(blank.join(parts))


def rounded(value: float, printed: str) -> str:
    """`value` with the decimals that are printed."""
    return f"{value:,.{len(printed.partition('.')[2])}f}"


def line_of(page: str, position: int) -> int:
    return page.count("\n", 0, position) + 1


def erase(expression: re.Pattern[str], page: str) -> str:
    """The page with spaces in place of what matches, so that positions stay."""
    return expression.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), page)


def measured(page: str) -> Iterator[re.Match[str]]:
    """The numbers beside a unit, with decimals, or in a table of such numbers, but for its first column."""
    number, alone = re.compile(NUMBER), re.compile(NUMBER + ALONE)
    for figure in FIGURE.finditer(page):
        yield from number.finditer(page, figure.start(), figure.end())
    for table in TABLE.finditer(page):
        if IN_TABLE.search(table[1]) or FIGURE.search(table[2]):
            for cells in LATER_CELLS.finditer(page, table.start(2), table.end(2)):
                yield from alone.finditer(page, *cells.span(1))


def compute(name: str, page: str, entry: dict[str, str], rows: Rows) -> Report:
    """The figures of one text of a page."""
    report = Report()
    places = list(pattern(entry["text"]).finditer(page))
    if len(places) != 1:
        report.problems.append(f"{name}: found {len(places)} times, expected once: {entry['text'].strip()}")
        return report
    (place,) = places
    try:
        values = rows.numbers(entry["query"])
        if len(values) != len(place.groups()):
            raise ValueError(f"the query gives {len(values)} numbers for {len(place.groups())} figures")
    except ValueError as error:
        report.problems.append(f"{name}:{line_of(page, place.start())}: {error}: {entry['text'].strip()}")
        return report
    for index, value in enumerate(values, start=1):
        start, printed = place.start(index), place[index]
        figure = Figure(name, line_of(page, start), start, printed, rounded(value, printed))
        report.figures.append(figure)
        if not figure.agrees:
            report.problems.append(f"{name}:{figure.line}: {printed} is printed, its rows give {figure.computed}")
    return report


def uncovered(name: str, page: str, covered: set[int], declared: Iterable[str]) -> list[str]:
    """The figures of a page that are neither at the positions `covered` nor in a text `declared` not to be measured."""
    problems = [f"{name}: not found: {text}" for text in declared if not pattern(text).search(page)]
    remaining = page
    for text in declared:
        remaining = erase(pattern(text), remaining)
    numbers = {number.start(): number[0] for number in measured(erase(VERSION, erase(CODE, remaining)))}
    for start in sorted(numbers.keys() - covered):
        problems.append(f"{name}:{line_of(page, start)}: no rows for {numbers[start]} in docs/figures.toml")
    return problems


def check(root: Path) -> Report:
    """All pages below `root` that are written: each figure and its rows, and every figure that has none."""
    sources = tomllib.loads((root / "docs/figures.toml").read_text())
    results = root / "docs/results"
    rows, total = Rows(results, sources.get("views", {})), Report()
    paths = [root / "README.md", *sorted(path for path in (root / "docs").rglob("*.md") if results not in path.parents)]
    paths += sorted([*results.glob("*/README.md"), *results.glob("*/*/answers/*.md")])
    pages = {path.relative_to(root).as_posix(): path.read_text() for path in paths}
    for entry in sources["figures"]:
        report = compute(entry["page"], pages.get(entry["page"], ""), entry, rows)
        total.figures += report.figures
        total.problems += report.problems
    declared = sources.get("not-measured", {})
    for name in pages | declared:
        covered = {figure.start for figure in total.figures if figure.page == name}
        total.problems += uncovered(name, pages.get(name, ""), covered, declared.get(name, {}))
    return total


def write(root: Path, figures: Sequence[Figure]) -> None:
    """Put what rows give in the place of what is printed."""
    for figure in sorted(figures, key=lambda figure: -figure.start):
        path = root / figure.page
        page = path.read_text()
        path.write_text(page[: figure.start] + figure.computed + page[figure.start + len(figure.printed) :])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print each figure and what its rows give")
    parser.add_argument("--write", action="store_true", help="replace figures by what their rows give")
    options = parser.parse_args(arguments)
    report = check(ROOT)
    if options.list:
        for figure in report.figures:
            print(f"{figure.page}:{figure.line}: {figure.printed}, rows {figure.computed}")
    if options.write:
        write(ROOT, [figure for figure in report.figures if not figure.agrees])
        report = check(ROOT)
    print("\n".join([*report.problems, f"{len(report.figures)} figures, {len(report.problems)} problems"]))
    return bool(report.problems)


if __name__ == "__main__":
    sys.exit(main())
