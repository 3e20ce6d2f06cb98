"""Hooks of mkdocs.yml.

Links to source files become links to pages that show them, tables of rows are not searched, and a public name that the
reference does not show is a warning, which ends a strict build.
"""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

log = logging.getLogger("mkdocs.hooks")

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()(?:\.\./)+[\w./-]+\.\w+(?=\))")


def source_of(link: str, page: str) -> str | None:
    """The path, from the root, of the file outside of docs to which a page links."""
    path = (DOCS / page).parent.joinpath(link).resolve()
    if not path.is_file() or not path.is_relative_to(ROOT) or path.is_relative_to(DOCS):
        return None
    return path.relative_to(ROOT).as_posix()


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each source file that a page links to."""
    pages = [file for file in files if file.is_documentation_page() and file.abs_src_path]
    links = {(link, page.src_uri) for page in pages for link in LINK.findall(Path(page.abs_src_path).read_text())}
    for path in sorted({path for path in (source_of(*each) for each in links) if path}):
        text = (ROOT / path).read_text()
        page = f"# {path}\n\n````{Path(path).suffix[1:]}\n{text}````\n"
        files.append(File.generated(config, f"source/{path}.md", content=page))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Link to the pages of source files. Fences keep their language alone: no other word is known there."""
    name = page.file.src_uri
    if name.startswith(("results/", "source/")) and not name.endswith("README.md"):
        page.meta["search"] = {"exclude": True}
    up = "../" * name.count("/")

    def replaced(match: re.Match[str]) -> str:
        path = source_of(match[0], name)
        return match[0] if path is None else f"{up}source/{path}.md"

    return LINK.sub(replaced, markdown.replace("```python notest\n", "```python\n"))


def on_page_content(html: str, page: Any, **kwargs: Any) -> str:
    """Warn of public names of a module that its page of the reference does not show."""
    for module in re.findall(r"^::: (\S+)", page.markdown, re.MULTILINE):
        for name in exported(module):
            # A function in a file of the same name, which griffe takes for the file, has a separate line.
            if not any(f'id="{module}.{each}"' in html for each in (name, f"{name}.{name}")):
                log.warning("%s does not show %s of %s", page.file.src_uri, name, module)
    # In a cell a bar is written \\|, in code too; Markdown for Python leaves the backslash there.
    return re.sub(r"<td[^>]*>.*?</td>", lambda cell: cell[0].replace("\\|", "|"), html, flags=re.DOTALL)


def exported(module: str) -> Iterator[str]:
    """What ``__all__`` of a package has."""
    path = ROOT / module.replace(".", "/") / "__init__.py"
    for node in ast.parse(path.read_text()).body if path.exists() else ():
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            yield from ast.literal_eval(node.value)
