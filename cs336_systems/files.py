"""Files that are complete or absent, whatever ends the process or the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A binary file that replaces `path` atomically, after a flush to disk, unless the block raises an exception."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder: a rename is atomic within one file system.
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically, as UTF-8."""
    with replacing(path) as file:
        file.write(text.encode())


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk. Windows cannot open folders, and needs no flush."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
