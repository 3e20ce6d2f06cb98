"""The Markdown that the measurement tools write, as HTML: headings, lists, tables, pictures, code and links.

What comes out is well-formed XML too, and nothing of the text gets into it unescaped.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cs336_systems.profiling.report import ABSENT

Source = Callable[[str], "str | None"]
"""What stands in the page for the path of a picture: a data URI; None where there is no such file."""

_HEADING = re.compile(r"(#{1,6}) +(.*)")
_PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)]*)\)")
_RULE = re.compile(r"\|[ :|-]+\|")
_CELL_BORDER = re.compile(r"(?<!\\)\|")
_BEGINS_A_BLOCK = re.compile(r"#{1,6} |- |\||!\[|```")
_NUMBER = re.compile(r"[-+−]?\d")
_INLINE = re.compile(r"(`[^`]+`)|\*\*([^*]+)\*\*|\[([^\]]+)\]\(([^)\s]+)\)")
_HIGHEST, _LOWEST = 1, 6


@dataclass(frozen=True)
class Heading:
    """A heading of a page: its level, its text, and what links to it name."""

    level: int
    text: str
    anchor: str


def headings(markdown: str, prefix: str) -> list[Heading]:
    """The headings in order; anchors begin with ``prefix``, which must be another for each part of a page."""
    found: list[Heading] = []
    for line in _lines_outside_code(markdown):
        if match := _HEADING.fullmatch(line.rstrip()):
            found.append(Heading(len(match[1]), match[2], f"{prefix}-{len(found) + 1}"))
    return found


def _lines_outside_code(markdown: str) -> list[str]:
    lines, inside = [], False
    for line in markdown.splitlines():
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            lines.append(line)
    return lines


def shifted(markdown: str, levels: int) -> str:
    """The same text with its headings so many levels further down, the lowest of HTML's at most."""

    def shift(match: re.Match[str]) -> str:
        return "#" * max(_HIGHEST, min(_LOWEST, len(match[1]) + levels)) + " "

    return re.sub(r"^(#{1,6}) +", shift, markdown, flags=re.MULTILINE)


def html_of(markdown: str, prefix: str, source: Source) -> str:
    """The text as HTML; its headings have the anchors that `headings` gives them."""
    anchors = iter(heading.anchor for heading in headings(markdown, prefix))
    lines = markdown.splitlines()
    parts: list[str] = []
    at = 0
    while at < len(lines):
        end = _end_of_block(lines, at)
        block = lines[at:end]
        at = end
        if match := _HEADING.fullmatch(block[0].rstrip()):
            level = len(match[1])
            parts.append(f'<h{level} id="{next(anchors)}">{inline(match[2])}</h{level}>')
        elif block[0].startswith("```"):
            code = "\n".join(line for line in block[1:] if not line.startswith("```"))
            parts.append(f'<pre tabindex="0"><code>{html.escape(code)}</code></pre>')
        elif block[0].startswith("|"):
            parts.append(table(block))
        elif block[0].startswith("- "):
            parts.append(_list(block))
        elif block[0].startswith("!["):
            parts.append(_pictures(block, source))
        elif block[0].strip():
            parts.append(f"<p>{inline(' '.join(block))}</p>")
    return "\n".join(parts)


def _end_of_block(lines: list[str], at: int) -> int:
    """Where the block that begins at a line ends."""
    first, end = lines[at], at + 1
    if first.startswith("```"):
        while end < len(lines) and not lines[end].startswith("```"):
            end += 1
        return min(len(lines), end + 1)
    if first.startswith("#") or not first.strip():
        return end
    if first.startswith("!["):
        # Pictures with nothing but empty lines between them are one gallery.
        while end < len(lines) and (lines[end].startswith("![") or not lines[end].strip()):
            end += 1
        return end
    for mark, continues in (("|", ("|",)), ("- ", ("- ", "  "))):
        if first.startswith(mark):
            while end < len(lines) and lines[end].startswith(continues):
                end += 1
            return end
    while end < len(lines) and lines[end].strip() and not _BEGINS_A_BLOCK.match(lines[end]):
        end += 1
    return end


def inline(text: str) -> str:
    """A line's code, bold text and links; everything else escaped."""
    parts, at = [], 0
    for match in _INLINE.finditer(text):
        parts.append(html.escape(text[at : match.start()]))
        code, bold, label, target = match.groups()
        if code:
            parts.append(f"<code>{html.escape(code[1:-1])}</code>")
        elif bold:
            parts.append(f"<strong>{html.escape(bold)}</strong>")
        else:
            parts.append(f'<a href="{html.escape(target)}">{html.escape(label)}</a>')
        at = match.end()
    return "".join([*parts, html.escape(text[at:])])


def _list(lines: list[str]) -> str:
    items: list[str] = []
    for line in lines:
        if line.startswith("- "):
            items.append(line[2:])
        else:
            items[-1] += " " + line.strip()
    return "<ul>" + "".join(f"<li>{inline(item)}</li>" for item in items) + "</ul>"


def table(lines: list[str]) -> str:
    """A Markdown table in a box of its own, which scrolls where the page is narrower than the table."""
    rows = [_cells(line) for line in lines if not _RULE.fullmatch(line.strip())]
    head, body = rows[0], rows[1:]
    classes = [' class="number"' if i and _of_numbers(row[i] for row in body) else "" for i in range(len(head))]
    titles = "".join(f'<th scope="col"{name}>{inline(cell)}</th>' for cell, name in zip(head, classes, strict=True))
    lines_of_body = []
    for row in body:
        first = f'<th scope="row">{inline(row[0])}</th>'
        rest = "".join(f"<td{name}>{inline(cell)}</td>" for cell, name in zip(row[1:], classes[1:], strict=True))
        lines_of_body.append(f"<tr>{first}{rest}</tr>")
    return (
        '<div class="scroll" role="region" aria-label="table" tabindex="0"><table>'
        f"<thead><tr>{titles}</tr></thead><tbody>{''.join(lines_of_body)}</tbody></table></div>"
    )


def _of_numbers(cells: Iterable[str]) -> bool:
    """Whether a column holds numbers; some of them may be missing, or have a status in their place."""
    known = [bool(_NUMBER.match(cell)) for cell in cells if cell != ABSENT]
    return 2 * sum(known) >= len(known)


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in _CELL_BORDER.split(line.strip())[1:-1]]


def _pictures(lines: list[str], source: Source) -> str:
    figures = []
    for alternative, path in (match.groups() for line in lines for match in _PICTURE.finditer(line)):
        data = source(path)
        name = inline(alternative)
        if data is None:
            figures.append(f"<p>{name}: there is no such file.</p>")
        else:
            image = f'<img src="{data}" alt="{html.escape(alternative)}"/>'
            figures.append(f"<figure>{image}<figcaption>{name}</figcaption></figure>")
    return f'<div class="plots">{"".join(figures)}</div>'
