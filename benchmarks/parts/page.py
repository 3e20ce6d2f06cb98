"""The pages of a report: one for each question, from the rows in the folders of its parts, as Markdown and as HTML."""

from __future__ import annotations

import base64
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import OptionsDict
from markupsafe import Markup

from benchmarks.lib.intervals import LEGEND, pooled, with_interval
from benchmarks.lib.results import CSV, Status
from benchmarks.lib.tables import bullets, markdown, sections
from benchmarks.parts.questions import QUESTIONS, Question
from cs336_systems.files import write_text

INDEX, TEMPLATE, ANSWERS = "report", "page.html", "answers"
OUTCOME, LOG, TABLES, ENVIRONMENT = "outcome.json", "log.txt", "tables.md", "environment.json"
_FACTS = ("device", "torch", "triton", "cuda", "driver", "python", "commit", "dirty", "date")
_FILES = (".csv", ".html", ".json", ".gz", ".pickle")
_LISTS = ("round_ms", "steps_ms", "warmup_ms")


def write_pages(folder: Path, *, plots: bool = True) -> list[Path]:
    """Write the pages of a report, each as Markdown and as HTML: one for each question, one for each other part.

    report.md and report.html, the first of the paths returned, say what was run and lead to the others. Beside the page
    of a question are its rows, and its plots unless ``plots`` is false. Raises ValueError if the folder has no folder
    with results or an outcome.
    """
    known = (OUTCOME, TABLES, CSV)
    parts = [path for path in sorted(folder.glob("*/")) if any((path / name).exists() for name in known)]
    if not parts:
        raise ValueError(f"{folder} must have folders with one of {', '.join(known)}; it has none")
    pages = {}
    for question in QUESTIONS:
        asked = [part for part in parts if question.asks_for(part.name) and (part / CSV).exists()]
        if asked and (text := answer(question, asked, folder, plots)):
            pages[question.name] = question.title, text
    covered = {
        part for part in parts for question in QUESTIONS if question.name in pages and question.asks_for(part.name)
    }
    pages |= {part.name: (part.name, section(part)) for part in parts if part not in covered}
    for name in {part.name for part in covered} - pages.keys():  # a part that had no rows yet had a page
        for suffix in (".md", ".html"):
            (folder / f"{name}{suffix}").unlink(missing_ok=True)
    index = {INDEX: (f"Benchmarks: {folder.resolve().name}", overview(parts, {name: pages[name][0] for name in pages}))}
    paths = []
    for name, (title, text) in (index | pages).items():
        back = "" if name == INDEX else f"\n[All pages]({INDEX}.md)\n"
        text = f"# {title}\n\n{text}\n{back}"
        write_text(folder / f"{name}.md", text)
        write_text(folder / f"{name}.html", as_html(text, folder))
        paths += [folder / f"{name}.md", folder / f"{name}.html"]
    return paths


def answer(question: Question, parts: Sequence[Path], folder: Path, plots: bool) -> str:
    """The answer that a person wrote, if there is one, the tables and plots, and what was measured how.

    If the rows are of several devices, each has tables and plots of its own, with its name.
    The rows are written beside it, as CSV and as JSON (pandas' orient "split"), figures with six digits and without the
    times of each step. It is "" if they have no figure that answers the question.
    """
    rows = pd.concat([pooled(pd.read_csv(part / CSV)).assign(part=part.name) for part in parts], ignore_index=True)
    rows = rows.query(question.rows) if question.rows else rows
    devices = by_device(rows)
    titled = {
        f"{device}: {title}" if device else title: text
        for device, those in devices.items()
        for title, text in question.tables(those).items()
    }
    tables = sections(titled)
    if not tables:
        return ""
    legend = bullets([f"{sign} {text}" for sign, text in LEGEND.items() if sign in tables])
    if plots:
        for old in folder.glob(f"{question.name}-*.png"):  # may be of all devices together, or of one more
            old.unlink()
        for device, those in devices.items():
            question.plots(those, folder / "-".join(filter(None, [question.name, *device.lower().split()])))
    drawn = sorted(folder.glob(f"{question.name}-*.png"))
    drawn += [folder / name for name in question.pictures if (folder / name).exists()]
    shown = "\n\n".join(f"![{path.stem.replace('-', ' ')}]({path.relative_to(folder)})" for path in drawn)
    single = rows.drop(columns=[name for name in rows if name in _LISTS or name.endswith("_steps_ms")])
    single = single.dropna(axis="columns", how="all")
    floats = single.select_dtypes("float")
    single = single.assign(**floats.map(lambda value: float(f"{value:.6g}")))
    write_text(folder / f"{question.name}.csv", single.to_csv(index=False))
    as_json = single.to_json(orient="split", index=False, double_precision=15)
    write_text(folder / f"{question.name}.json", f"{as_json}\n")
    files = f"Rows: [{question.name}.csv]({question.name}.csv), [{question.name}.json]({question.name}.json)"
    path = folder / ANSWERS / f"{question.name}.md"
    written = path.read_text(encoding="utf-8").strip() if path.exists() else ""
    return "\n\n".join(filter(None, [written, tables, legend, shown, f"## Measured\n\n{measured(parts)}", files]))


def by_device(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The rows of each device by its name; all of them by "" if they are of one, or do not say.

    A table or a plot of several devices would not say which figure is whose.
    """
    devices = rows["device"].fillna("unknown device") if "device" in rows else pd.Series()
    if devices.nunique() < 2:
        return {"": rows}
    return {name: rows[devices == name] for name in devices.unique()}


def _caption(path: Path) -> str:
    """What a plot shows and of which part, for example `median ms forward, of attention`."""
    part = path.parent.parent if path.parent.name == "plots" else path.parent
    return f"{path.stem.replace('-', ' ')}, of {part.name}"


def measured(parts: Sequence[Path]) -> str:
    """With what each part was measured, and its command."""
    found = {part.name: _json(part / ENVIRONMENT) for part in parts}
    facts = pd.DataFrame([{"part": name, **{fact: each.get(fact) for fact in _FACTS}} for name, each in found.items()])
    shared = [fact for fact in _FACTS if len(parts) > 1 and facts[fact].nunique(dropna=False) == 1]
    first = facts.iloc[0]
    together = ", ".join(f"{fact} {first[fact]}" for fact in shared if not pd.isna(first[fact]))
    names = {part.name: f"[{part.name}]({part.name}/{TABLES})" for part in parts if (part / TABLES).exists()}
    commands = bullets(
        [f"{names.get(name, name)}: `{each['command']}`" for name, each in found.items() if each.get("command")]
    )
    differing = facts.drop(columns=shared)
    table = markdown(differing) if len(differing.columns) > 1 else ""
    return "\n\n".join(filter(None, [together, table, commands]))


def overview(parts: Sequence[Path], titles: Mapping[str, str]) -> str:
    """The pages, what was run and with what, and the speed-ups of each part."""
    ran = []
    for part in parts:
        outcome, rows = _json(part / OUTCOME), _rows(part)
        line = {name: outcome.get(name) for name in ("status", "reason", "seconds")}
        ok = f"{sum(rows['status'] == Status.OK.value)} of {len(rows)}" if len(rows) else None
        ran.append({"part": part.name, **line, "rows with figures": ok})
    found = [table for table in map(speedups, parts) if len(table)]
    links = bullets([f"[{title}]({name}.md)" for name, title in titles.items()])
    return f"{links}\n\n" + sections(
        {
            "Parts": markdown(pd.DataFrame(ran)),
            "Speed-ups": markdown(pd.concat(found)) if found else "",
            "Measured": measured(parts),
        }
    )


def speedups(part: Path) -> pd.DataFrame:
    """The geometric mean of each column of speed-ups over the rows of a provider and pass, and how many rows it has."""
    frame, lines = _rows(part), []
    for column in (name for name in frame if name.startswith("speedup") and not name.endswith(("_low", "_high"))):
        by = [name for name in ("provider", "pass", "which") if name in frame] or ["status"]
        for key, rows in frame[frame[column] > 0].groupby(by, sort=False):
            if (rows[column] == 1).all():  # what the others are compared with
                continue
            ends = [rows.get(f"{column}{end}", rows[column]) for end in ("", "_low", "_high")]
            mean = with_interval(*(statistics.geometric_mean(each) for each in ends))
            lines.append([part.name, " ".join(key), column.replace("_", " "), mean, len(rows)])
    return pd.DataFrame(lines, columns=["part", "of", "speed-up", "geometric mean, ×", "rows"])


def section(part: Path) -> str:
    """A part that answers no question: its plots, its tables without title and environment, and its files."""
    outcome = _json(part / OUTCOME)
    texts = [f"**{outcome['status']}: {outcome['reason']}**"] if outcome.get("reason") else []
    plots = sorted(part.rglob("*.png"))
    texts.append("\n".join(f"![{_caption(path)}]({path.relative_to(part.parent)})" for path in plots))
    if (part / TABLES).exists():
        blocks = (part / TABLES).read_text(encoding="utf-8").strip().split("\n\n")
        if blocks[0].startswith("# "):
            blocks = blocks[2 if blocks[1:] and blocks[1].startswith("- device: ") else 1 :]
        texts.append("\n\n".join(blocks))
    texts.append(f"## Measured\n\n{measured([part])}")
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
        for child in token.children or ():
            if child.type == "link_open":  # from page to page
                child.attrSet("href", re.sub(r"^([^/]+)\.md$", r"\1.html", str(child.attrGet("href"))))
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
