"""Text files tokenised once, into a file that is mapped into memory, beside a JSON that says what it was made from.

Neither file is ever half-written: each is written under another name and renamed, the JSON last, and without a JSON
that fits there is no tokenised file. It is made anew when a file's size or time, their list, or the tokenizer changes.
"""

from __future__ import annotations

import codecs
import fnmatch
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..files import replacing, write_text
from .tokens import Tokenizer

VERSION = 1
"""Of the format; another one is made anew."""

_LOOKED_AT = 8192
_PIECE = 2**24

Tokens = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Corpus:
    """Tokenised text: the tokens, mapped read-only, a hash of them, and from how many files they were made."""

    tokens: Tokens
    digest: str
    files: int
    reused: bool


def text_files(paths: Sequence[str], pattern: str = "*") -> list[Path]:
    """The text files among `paths`, those of a folder in sorted order, and of all folders within it.

    Of a folder, files are left out that the pattern does not match by their name, that are hidden or in a hidden
    folder, or that do not begin as UTF-8 text does. A file that is named itself is always taken.

    Raises:
        ValueError: a path does not exist, or there is no text file in it.
    """
    found: list[Path] = []
    for name in paths:
        path = Path(name)
        if path.is_file():
            found.append(path)
            continue
        if not path.is_dir():
            raise ValueError(f"data must be files and folders that exist; got {name}")
        inside = sorted(file for file in path.rglob("*") if file.is_file() and not _hidden(file.relative_to(path)))
        inside = [file for file in inside if fnmatch.fnmatchcase(file.name, pattern) and _looks_like_text(file)]
        if not inside:
            raise ValueError(f"data must have text files that match {pattern!r}; got none in {name}")
        found += inside
    return list(dict.fromkeys(found))


def tokenise(paths: Sequence[str], pattern: str, tokenizer: Tokenizer, folder: Path) -> Corpus:
    """The tokens of all text files of `paths`, an end of document after each; from `folder` where they are kept there.

    Raises:
        ValueError: there are no such files, or one is not UTF-8.
    """
    sources = text_files(paths, pattern)
    made_from = {
        "version": VERSION,
        "tokenizer": tokenizer.name,
        "files": [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in sources],
    }
    # Named by what was asked for, so that changed files are found here, and take the place of what they were.
    asked = json.dumps([[os.path.realpath(path) for path in paths], pattern, tokenizer.name])
    stem = folder / f"{Path(paths[0]).resolve().stem}-{hashlib.sha256(asked.encode()).hexdigest()[:12]}"
    description, binary = Path(f"{stem}.json"), Path(f"{stem}.bin")
    kept = _kept(description, binary, made_from)
    if kept is None:
        description.unlink(missing_ok=True)
        made = _write(binary, sources, tokenizer)
        write_text(description, json.dumps({"made_from": made_from, **made}, indent=1) + "\n")
    about = made if kept is None else kept
    tokens: Tokens = np.memmap(binary, dtype=about["dtype"], mode="r", shape=(about["count"],))
    return Corpus(tokens, about["digest"], len(sources), reused=kept is not None)


def _kept(description: Path, binary: Path, made_from: dict[str, Any]) -> dict[str, Any] | None:
    """What the JSON says of the binary file, if it was made from this and is whole."""
    try:
        about: dict[str, Any] = json.loads(description.read_text(encoding="utf-8"))
        whole = binary.stat().st_size == about["count"] * np.dtype(about["dtype"]).itemsize
        return about if whole and about["made_from"] == made_from else None
    except (FileNotFoundError, json.JSONDecodeError, KeyError):
        return None


def _write(binary: Path, sources: Sequence[Path], tokenizer: Tokenizer) -> dict[str, Any]:
    dtype = np.dtype("<u2") if tokenizer.size <= 2**16 else np.dtype("<u4")
    digest, count = hashlib.sha256(), 0
    with replacing(binary) as file:
        for source in sources:
            for tokens in (*map(tokenizer.encode, _pieces(source)), [tokenizer.end_of_document]):
                # An array of bytes would be read as one string.
                content = np.asarray(np.frombuffer(tokens, np.uint8) if isinstance(tokens, bytes) else tokens, dtype)
                digest.update(content.tobytes())
                file.write(content.tobytes())
                count += len(content)
    return {"dtype": dtype.str, "count": count, "digest": digest.hexdigest()}


def _pieces(path: Path) -> Iterator[str]:
    """The text of a file in pieces that end where lines end, so that a file may be larger than memory."""
    with path.open("rb") as file:
        while piece := file.read(_PIECE) + file.readline():
            try:
                yield piece.decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"data must be text in UTF-8; got {path}: {error}") from None


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _looks_like_text(path: Path) -> bool:
    with path.open("rb") as file:
        beginning = file.read(_LOOKED_AT)
    try:
        # Incrementally: of a longer file a character may be cut off here.
        codecs.getincrementaldecoder("utf-8")().decode(beginning, final=len(beginning) < _LOOKED_AT)
    except UnicodeDecodeError:
        return False
    return bool(beginning) and b"\0" not in beginning
