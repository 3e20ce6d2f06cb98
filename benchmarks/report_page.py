"""The page of a report: what the parts of a suite left in their folders, as Markdown and as one file of HTML."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report_findings import ANSWERS, statements
from benchmarks.report_markdown import Heading, headings, html_of, shifted
from benchmarks.report_parts import LOG, OK, PRINTED, RESULTS, STATE, TABLES, Outcome, State
from benchmarks.report_rows import Line, read_rows
from benchmarks.report_style import STYLE
from benchmarks.report_suites import PROGRAMS
from cs336_systems.files import write_text
from cs336_systems.profiling.environment import Environment
from cs336_systems.profiling.progress import readable_seconds
from cs336_systems.profiling.report import ABSENT, environment_lines, markdown_table

MARKDOWN, HTML = "report.md", "report.html"
ENVIRONMENT = "environment.json"
_TOP = ("parts", "environment", "findings")


@dataclass(frozen=True)
class Section:
    """A chapter of the page: what links to it name, its title, and its text, whose headings begin at level 3."""

    anchor: str
    title: str
    text: str


def assemble(folder: Path) -> list[Path]:
    """Write the report of what is in the folder, as Markdown and as HTML; the paths of both.

    Raises:
        FileNotFoundError: the folder has no part with results, and no record of any.
    """
    state = State.read(folder) or _found_in(folder)
    title = f"Measurements: {state.facts.get('suite') or folder.name}"
    sections = sections_of(state)
    written = [folder / MARKDOWN, folder / HTML]
    write_text(written[0], as_markdown(title, sections))
    write_text(written[1], as_html(title, sections, folder))
    return written


def _found_in(folder: Path) -> State:
    """A record of the folders that have results, where nobody kept one."""
    names = [path.name for path in sorted(folder.glob("*/")) if (path / TABLES).exists() or (path / RESULTS).exists()]
    if not names:
        raise FileNotFoundError(f"{folder} has no {STATE}, and no folder in it has a {TABLES} or a {RESULTS}")
    programs = {name: next((program for program in PROGRAMS if name.startswith(program)), name) for name in names}
    return State(folder, {"programs": programs}, {name: Outcome(OK, "found in the folder") for name in names})


def sections_of(state: State) -> list[Section]:
    """All chapters: the parts and what became of them, the environment, what the figures say, and each part's own."""
    programs: dict[str, str] = state.facts.get("programs", {})
    environments = {name: _environment_lines(state.folder / name) for name in state.outcomes}
    known = [lines for lines in environments.values() if lines]
    common = [line for line in (known[0] if known else []) if all(line in lines for lines in known)]
    parts = [
        _part_section(state, name, programs.get(name, name), environments[name], common) for name in state.outcomes
    ]
    return [
        Section(_TOP[0], "What was run", _overview(state, programs)),
        Section(_TOP[1], "Environment", _shared_environment(common, known)),
        Section(_TOP[2], "What the figures say", _findings(state, programs)),
        *parts,
    ]


def _shared_environment(common: Sequence[str], known: Sequence[Sequence[str]]) -> str:
    if not known:
        return "No part left a record of its environment."
    return "\n".join(common) if common else "The parts have nothing of it in common; each says its own."


def _overview(state: State, programs: dict[str, str]) -> str:
    lines = []
    for name, outcome in state.outcomes.items():
        program = programs.get(name, name)
        rows = read_rows(state.folder / name / RESULTS)
        took = ABSENT if outcome.seconds is None else readable_seconds(outcome.seconds)
        about = PROGRAMS[program].about if program in PROGRAMS else ABSENT
        good = sum(row.get("status") == "ok" for row in rows)
        counted = f"{good} of {len(rows)}" if rows else ABSENT
        lines.append([name, about, outcome.status, outcome.reason or ABSENT, took, counted])
    table = markdown_table(["part", "what it measures", "status", "why", "last run", "rows with figures"], lines)
    done = sum(outcome.status == OK for outcome in state.outcomes.values())
    made = f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC"
    facts = [f"{done} of {len(state.outcomes)} parts are complete; this page was made at {made}."]
    if said := str(state.facts.get("about", "")):
        facts.insert(0, f"{said[:1].upper()}{said[1:]}. Device: {state.facts.get('device')}.")
    return " ".join(facts) + "\n\n" + table


def _findings(state: State, programs: dict[str, str]) -> str:
    """Of each program, from the rows of all its parts together: no part need answer every question by itself."""
    rows: dict[str, list[Line]] = {}
    for name in state.outcomes:
        rows.setdefault(programs.get(name, name), []).extend(read_rows(state.folder / name / RESULTS))
    parts = []
    for program in rows:
        if answers := ANSWERS.get(program):
            said = statements(answers, rows[program])
            parts.append(f"### {PROGRAMS[program].title}")
            parts.append("\n".join(f"- **{question}:** {answer}" for question, answer in said))
    return "\n\n".join(parts) or "No part has rows that could say anything."


def _title(name: str, program: str) -> str:
    title = PROGRAMS[program].title if program in PROGRAMS else name
    return title if name == program else f"{title}: {name.removeprefix(program).strip('-')}"


def _part_section(state: State, name: str, program: str, environment: list[str], common: list[str]) -> Section:
    folder, outcome = state.folder / name, state.outcomes[name]
    parts = []
    if outcome.status != OK:
        reason = f": {outcome.reason}" if outcome.reason else ""
        parts.append(f"**{outcome.status[:1].upper()}{outcome.status[1:]}{reason}.**")
        if not folder.exists():
            return Section(f"part-{name}", _title(name, program), parts[0])
    parts.append(" · ".join(line.removeprefix("- ") for line in environment if line not in common))
    parts += [f"![{path.stem}]({name}/{path.name})" for path in sorted(folder.glob("*.png"))]
    parts.append(_body(folder, environment))
    beside = sorted(path for path in folder.rglob("*") if path.is_file() and _worth_a_link(path))
    if beside:
        links = [f"[{path.relative_to(folder)}]({path.relative_to(state.folder)})" for path in beside]
        parts.append("Files: " + ", ".join(links))
    return Section(f"part-{name}", _title(name, program), "\n\n".join(part for part in parts if part))


def _worth_a_link(path: Path) -> bool:
    return path.suffix in (".csv", ".html", ".json", ".gz", ".pickle", ".md") and path.name != "configuration.json"


def _body(folder: Path, environment: list[str]) -> str:
    """What a program wrote for people, without its title and its environment, which stand elsewhere on the page."""
    path = folder / TABLES if (folder / TABLES).exists() else folder / PRINTED
    if not path.exists() or not (text := path.read_text(encoding="utf-8", errors="replace").strip()):
        return "It left no table." if not (folder / LOG).exists() else f"It left no table; see {LOG} in its folder."
    lines = [line for line in text.splitlines() if line not in environment]
    if lines and lines[0].startswith("# "):
        lines = lines[1:]
    return shifted("\n".join(lines).strip(), 1)


def _environment_lines(folder: Path) -> list[str]:
    """The environment that a part recorded, as its own tables say it; none where it recorded none."""
    path = folder / ENVIRONMENT
    if not path.exists():
        return []
    stored = json.loads(path.read_text(encoding="utf-8"))
    names = {field.name for field in dataclasses.fields(Environment)}
    known = {name: value for name, value in stored.items() if name in names} | {"state_at_start": None}
    return environment_lines(Environment(**known))


def as_markdown(title: str, sections: Sequence[Section]) -> str:
    """The page as Markdown: its contents, then its chapters."""
    contents = "\n".join(f"- [{section.title}](#{section.anchor})" for section in sections)
    chapters = [f'<a id="{section.anchor}"></a>\n\n## {section.title}\n\n{section.text}' for section in sections]
    return "\n\n".join([f"# {title}", contents, *chapters]) + "\n"


def as_html(title: str, sections: Sequence[Section], folder: Path) -> str:
    """The page as one file: its style and its pictures are in it, and no program."""

    def source(path: str) -> str | None:
        picture = folder / path
        if not picture.is_file():
            return None
        return f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"

    chapters = []
    for section in sections:
        body = html_of(section.text, section.anchor, source)
        heading = f"<h2>{html.escape(section.title)}</h2>"
        chapters.append(f'<section id="{section.anchor}">{heading}\n{body}</section>')
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8"/>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            '<meta name="color-scheme" content="light dark"/>',
            f"<title>{html.escape(title)}</title>",
            f"<style>{STYLE}</style></head>",
            f'<body><header id="top"><h1>{html.escape(title)}</h1></header>',
            f'<div class="page">{_contents(sections)}<main>',
            *chapters,
            "</main></div></body></html>\n",
        ]
    )


def _contents(sections: Sequence[Section]) -> str:
    """The table of contents: chapters, and what they are divided into."""
    items = []
    for section in sections:
        within = [heading for heading in headings(section.text, section.anchor) if heading.level == 3]
        items.append(f"<li>{_link(section.anchor, section.title)}{_nested(within)}</li>")
    return f'<nav aria-label="Contents"><p>Contents</p><ol>{"".join(items)}</ol></nav>'


def _nested(found: Sequence[Heading]) -> str:
    if not found:
        return ""
    return "<ol>" + "".join(f"<li>{_link(heading.anchor, heading.text)}</li>" for heading in found) + "</ol>"


def _link(anchor: str, text: str) -> str:
    return f'<a href="#{anchor}">{html.escape(text)}</a>'
