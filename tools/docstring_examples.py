"""An extension of griffe, named in mkdocs.yml: what this library's docstrings have besides Google's style.

Examples after ``>>>`` become blocks of code, a line ``a, b: text`` of a section becomes a line for each name, and a
literal block needs no second colon.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*(?:\n\n>>> .*(?:\n.+)*)*", re.MULTILINE)
GROUP = re.compile(r"^    (\w+(?:, \w+)+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def google_style(docstring: str) -> str:
    """The docstring as griffe and Markdown read it."""
    text = EXAMPLE.sub(lambda example: f"```pycon\n{example[0]}\n```", docstring)
    text = GROUP.sub(lambda group: "\n".join(f"    {name}: {group[2]}" for name in group[1].split(", ")), text)
    text = text.replace("(*batch", r"(\*batch")  # two of them in a paragraph would be emphasis
    return re.sub(r"::$", ":", text, flags=re.MULTILINE)


class Examples(griffe.Extension):
    """Rewrites each docstring."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = google_style(obj.docstring.value)
