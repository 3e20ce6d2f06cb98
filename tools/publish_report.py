"""Put a report into the repository: its pages with the pictures and tables that they link to, and all rows, packed.

    python tools/publish_report.py results/2025 docs/results/h100/2025

Answers in the target are kept, and are in the pages. Tables lose the spaces that align their columns. rows.tar.xz holds
the rows of each page as CSV and as JSON, and what `benchmarks/report.py` needs to go on with the report and to make its
pages again, HTML among them.
"""

from __future__ import annotations

import argparse
import lzma
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lib.results import CSV, JOURNAL, JSON, LOCK, SETTINGS
from benchmarks.parts.page import ANSWERS, LOG, write_pages

ROWS = "rows.tar.xz"
_NOT_PACKED = (LOCK, LOG, JSON)
_MADE_AGAIN = (".png", ".html", ".pickle")
_LINK = re.compile(r"\]\(([^)#:]+)\)")
_LINK_TO_ROWS = re.compile(r"\]\([^)#:]+\.(?:csv|json)\)")
_RULE = re.compile(r"^\|[-:|]+\|$", re.MULTILINE)
_TABLE_LINE = re.compile(r"^\|.*", re.MULTILINE)


def narrow(text: str) -> str:
    """Markdown that is shown the same, without the spaces that align columns: a third of the bytes of tables."""
    text = _RULE.sub(lambda rule: re.sub("-+", "-", rule[0]), text)
    return _TABLE_LINE.sub(lambda line: re.sub(" {2,}", " ", line[0]), text)


def pack(report: Path, archive: Path, pages: Path | None = None) -> None:
    """Pack the folders of the parts that have rows, without what can be made again, and the rows of the pages."""
    hardest = 9 | lzma.PRESET_EXTREME
    with lzma.open(archive, "wb", preset=hardest) as file, tarfile.open(fileobj=file, mode="w") as packed:
        for path in sorted(pages.glob("*.*")) if pages is not None else ():
            if path.suffix in (".csv", ".json"):
                packed.add(path, Path(report.name, path.name))
        for rows in sorted(report.glob(f"*/{CSV}")):
            for path in sorted(rows.parent.rglob("*")):
                if path.is_file() and path.name not in _NOT_PACKED and path.suffix not in _MADE_AGAIN:
                    packed.add(path, Path(report.name, path.relative_to(report)))


def publish(report: Path, target: Path) -> list[Path]:
    """Replace a target by the pages of a report.

    Raises ValueError if the report has no rows, or the target has files and is no published report.

    Returns:
        The files written.
    """
    parts = [path.parent for path in sorted(report.glob(f"*/{CSV}"))]
    if not parts:
        raise ValueError(f"report must have folders with a {CSV}; got {report}")
    if not (target / ROWS).exists() and any(path.name != ANSWERS for path in target.glob("*")):
        raise ValueError(f"target must be a new folder, or have a {ROWS}, since what is in it is removed; got {target}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, report.name)
        for part in parts:
            shutil.copytree(part, folder / part.name, ignore=shutil.ignore_patterns(*_NOT_PACKED, JOURNAL, SETTINGS))
        if (target / ANSWERS).exists():
            shutil.copytree(target / ANSWERS, folder / ANSWERS)
        pages = [path for path in write_pages(folder) if path.suffix == ".md"]
        for page in pages:
            page.write_text(_LINK_TO_ROWS.sub(f"]({ROWS})", page.read_text(encoding="utf-8")), encoding="utf-8")
        links = {link for page in pages for link in _LINK.findall(page.read_text(encoding="utf-8"))}
        links = {link for link in links if (folder / link).is_file()}
        answers = {str(path.relative_to(folder)) for path in (folder / ANSWERS).glob("*")}
        shutil.rmtree(target, ignore_errors=True)
        names = sorted(links | answers | {page.name for page in pages})
        for name in names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(".md") and name not in answers:
                (target / name).write_text(narrow((folder / name).read_text(encoding="utf-8")), encoding="utf-8")
            else:
                shutil.copyfile(folder / name, target / name)
        pack(report, target / ROWS, folder)
    return [target / name for name in [*names, ROWS]]


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status is 0, or 2 for folders that do not fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="the folder of a report")
    parser.add_argument("target", type=Path, help="the folder for its pages; what else is in it is removed")
    options = parser.parse_args(arguments)
    try:
        paths = publish(options.report, options.target)
    except ValueError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    print(f"{len(paths)} files, {sum(path.stat().st_size for path in paths) / 2**20:.1f} MiB in {options.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
