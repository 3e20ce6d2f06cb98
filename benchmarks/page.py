"""The page of a report: the tables and plots in the folders of its parts, as Markdown and as one file of HTML."""

from __future__ import annotations

import base64
import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import OptionsDict
from markupsafe import Markup

from benchmarks.intervals import with_interval
from benchmarks.results import CSV, Status
from benchmarks.tables import bullets, markdown, sections
from cs336_systems.files import write_text

MARKDOWN, HTML, TEMPLATE = "report.md", "report.html", "page.html"
OUTCOME, LOG, TABLES, ENVIRONMENT = "outcome.json", "log.txt", "tables.md", "environment.json"
_FACTS = ("device", "torch", "triton", "cuda", "driver", "python", "commit", "dirty", "date")
_FILES = (".csv", ".html", ".json", ".gz", ".pickle")


def write_page(folder: Path) -> list[Path]:
    """Write report.md and report.html of the folders in a folder that have results or an outcome; both paths.

    Raises ValueError if there is no such folder.
    """
    known = (OUTCOME, TABLES, CSV)
    parts = [path for path in sorted(folder.glob("*/")) if any((path / name).exists() for name in known)]
    if not parts:
        raise ValueError(f"{folder} must have folders with one of {', '.join(known)}; it has none")
    text = "\n\n".join([f"# Benchmarks: {folder.resolve().name}", overview(parts), *map(section, parts)]) + "\n"
    write_text(folder / MARKDOWN, text)
    write_text(folder / HTML, as_html(text, folder))
    return [folder / MARKDOWN, folder / HTML]


def overview(parts: Sequence[Path]) -> str:
    """What was run, its environment and commands, and the speed-ups of each part."""
    ran, environments, commands = [], [], []
    for part in parts:
        outcome, environment, rows = _json(part / OUTCOME), _json(part / ENVIRONMENT), _rows(part)
        line = {name: outcome.get(name) for name in ("status", "reason", "seconds")}
        ok = f"{sum(rows['status'] == Status.OK.value)} of {len(rows)}" if len(rows) else None
        ran.append({"part": part.name, **line, "rows with figures": ok})
        environments.append({"part": part.name, **{name: environment.get(name) for name in _FACTS}})
        if environment.get("command"):
            commands.append(f"{part.name}: `{environment['command']}`")
    measured = [table for table in map(speedups, parts) if len(table)]
    return sections(
        {
            "Parts": markdown(pd.DataFrame(ran)),
            "Environment": markdown(pd.DataFrame(environments)),
            "Commands": bullets(commands),
            "Speed-ups": markdown(pd.concat(measured)) if measured else "",
        }
    )


def speedups(part: Path) -> pd.DataFrame:
    """The geometric mean of each column of speed-ups over the rows of a provider and pass, and how many rows it has."""
    frame, lines = _rows(part), []
    for column in (name for name in frame if name.startswith("speedup") and not name.endswith(("_low", "_high"))):
        by = [name for name in ("provider", "pass", "which") if name in frame] or ["status"]
        for key, rows in frame[frame[column] > 0].groupby(by, sort=False):
            ends = [rows.get(f"{column}{end}", rows[column]) for end in ("", "_low", "_high")]
            mean = with_interval(*(statistics.geometric_mean(each) for each in ends))
            lines.append([part.name, " ".join(key), column.replace("_", " "), mean, len(rows)])
    return pd.DataFrame(lines, columns=["part", "of", "speed-up", "geometric mean, ×", "rows"])


def section(part: Path) -> str:
    """A part: its plots, its tables without title and environment, and its files."""
    outcome = _json(part / OUTCOME)
    texts = [f"## {part.name}"]
    if outcome.get("reason"):
        texts.append(f"**{outcome['status']}: {outcome['reason']}**")
    plots = sorted(part.rglob("*.png"))
    texts.append("\n".join(f"![{part.name}: {path.stem}]({path.relative_to(part.parent)})" for path in plots))
    if (part / TABLES).exists():
        blocks = (part / TABLES).read_text(encoding="utf-8").strip().split("\n\n")
        if blocks[0].startswith("# "):
            blocks = blocks[2 if blocks[1:] and blocks[1].startswith("- device: ") else 1 :]
        texts.append(re.sub(r"^(?=#+ )", "#", "\n\n".join(blocks), flags=re.MULTILINE))
    files = sorted(p for p in part.rglob("*") if p.suffix in _FILES or p.name == LOG)
    if files:
        texts.append("Files: " + ", ".join(f"[{p.relative_to(part)}]({p.relative_to(part.parent)})" for p in files))
    return "\n\n".join(filter(None, texts))


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _rows(part: Path) -> pd.DataFrame:
    return pd.read_csv(part / CSV) if (part / CSV).exists() else pd.DataFrame(columns=["status"])


def as_html(text: str, folder: Path) -> str:
    """The Markdown as one file of HTML, with a table of contents, its style and its pictures."""
    converter = MarkdownIt("commonmark", {"html": False}).enable("table")
    converter.add_render_rule("image", _figure)
    converter.add_render_rule("table_open", lambda *_: '<div class="scroll" role="region" tabindex="0"><table>')
    converter.add_render_rule("table_close", lambda *_: "</table></div>\n")
    tokens, contents = converter.parse(text), []
    for index, token in enumerate(tokens):
        inline = tokens[min(index + 1, len(tokens) - 1)]
        if token.type == "heading_open":
            token.attrSet("id", f"section-{index}")
            contents.append({"level": int(token.tag[1]), "id": f"section-{index}", "text": inline.content})
        elif token.type == "paragraph_open" and all(
            child.type in ("image", "softbreak") for child in inline.children or [inline]
        ):
            # A figure must not be inside of a paragraph.
            token.tag = tokens[index + 2].tag = "div"
    body = converter.renderer.render(tokens, converter.options, {"folder": folder})
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
    title = contents[0]["text"]
    return environment.get_template(TEMPLATE).render(title=title, contents=contents[1:], body=Markup(body))


def _figure(
    renderer: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, environment: dict[str, Any]
) -> str:
    """A picture, in the file itself, with its caption."""
    caption, path = Markup.escape(tokens[index].content), environment["folder"] / str(tokens[index].attrs["src"])
    if not path.is_file():
        return f"<p>{caption}: there is no such file.</p>"
    data = base64.b64encode(path.read_bytes()).decode()
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{caption}"><figcaption>{caption}</figcaption></figure>'
    )
