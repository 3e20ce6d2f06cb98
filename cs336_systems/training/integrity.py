"""Whether a checkpoint is what was written: the checksums in its ``state.json``, and the newest one that has them."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STATE = "state.json"
FORMAT = 2
"""Of the files; the first one had pickles among them, and is not read."""

PREFIX = "step-"
_NAME = re.compile(PREFIX + r"(\d{8,18})")
_FIELDS = {"format": int, "step": int, "data": str, "files": dict}
_PIECE = 2**20

Entry = list[int | str]
"""Of a file: its size in bytes, and its checksum."""


class NotWholeError(ValueError):
    """A checkpoint is not what was written; the message says which file, and what is wrong with it."""


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        step: updates made. The position in the data follows from it: see `data`.
        data: a hash of the training tokens; another one would be another order.
    """

    step: int
    data: str


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files were found to be what was written: `verify` and `latest` make it.

    Attributes:
        path: its folder.
        progress: how far its run was.
        files: the names of its files.
    """

    path: Path
    progress: Progress
    files: tuple[str, ...]


def verify(path: Path) -> Checkpoint:
    """The checkpoint in a folder, every file of which is read once.

    Raises:
        NotWholeError: a file is missing, cannot be read, or differs from what was written.
    """
    state = _read_state(path)
    names = tuple(state["files"])
    # hashlib lets other threads run.
    with _readable(path), ThreadPoolExecutor() as pool:
        found = [*pool.map(entry_of, [path / name for name in names])]
    for name, entry in zip(names, found, strict=True):
        if entry != state["files"][name]:
            raise NotWholeError(f"{path.name}: the contents of {name} differ from what was written")
    return Checkpoint(path, Progress(state["step"], state["data"]), names)


def is_whole(path: Path) -> bool:
    """Whether every file of a checkpoint is what was written."""
    try:
        verify(path)
    except NotWholeError:
        return False
    return True


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the oldest first, whose state and sizes are right; contents are not looked at."""
    found = []
    for path in _folders(folder):
        try:
            _read_state(path)
        except NotWholeError:
            continue
        found.append(path)
    return found


def latest(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint; None where there is no checkpoint. A warning names newer ones, and what is wrong.

    Raises:
        NotWholeError: there are checkpoints, and none is whole.
    """
    reasons = []
    for path in reversed(_folders(folder)):
        try:
            checkpoint = verify(path)
        except NotWholeError as error:
            reasons.append(str(error))
            continue
        if reasons:
            warnings.warn(f"{path.name} is the newest whole checkpoint of {folder}: {'; '.join(reasons)}", stacklevel=2)
        return checkpoint
    if reasons:
        raise NotWholeError(f"{folder} must have a whole checkpoint; got {'; '.join(reasons)}")
    return None


def _folders(folder: Path) -> list[Path]:
    """What is named as a checkpoint, by step."""
    return sorted((path for path in folder.glob(f"{PREFIX}*") if _NAME.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    return int(path.name.removeprefix(PREFIX))


def _read_state(path: Path) -> dict[str, Any]:
    """The fields of a checkpoint's state, whose files have the sizes noted there. Raises NotWholeError."""
    with _readable(path):
        content = (path / STATE).read_bytes()
    try:
        text = content.decode()
        state = json.loads(text)
    except (ValueError, RecursionError):
        raise NotWholeError(f"{path.name}: {STATE} is no JSON") from None
    if not isinstance(state, dict):
        raise NotWholeError(f"{path.name}: {STATE} must hold fields; got {type(state).__name__}")
    if state.get("format") != FORMAT:
        raise NotWholeError(
            f"{path.name}: its format must be {FORMAT}; got {state.get('format', 1)!r}, of another version of "
            "cs336_systems, which can read it"
        )
    state.pop("checksum", None)
    if text != rendered(state):
        raise NotWholeError(f"{path.name}: {STATE} differs from what was written")
    entries: Any = state.get("files")
    if not _has_types(state, _FIELDS) or not all(
        _is_name(name) and isinstance(entry, list) and len(entry) == 2 for name, entry in entries.items()
    ):
        raise NotWholeError(f"{path.name}: {STATE} must hold {', '.join(_FIELDS)}")
    for name, (size, _) in entries.items():
        with _readable(path):
            found = (path / name).stat().st_size
        if found != size:
            raise NotWholeError(f"{path.name}: {name} must have {size} bytes; got {found}")
    return state


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise NotWholeError where a file of a checkpoint cannot be read, or a name is none that the system takes."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise NotWholeError(f"{path.name}: {error}") from error


def _has_types(values: dict[str, Any], types: dict[str, type]) -> bool:
    return values.keys() == types.keys() and all(type(values[name]) is kind for name, kind in types.items())


def _is_name(name: str) -> bool:
    """Whether it is a file within the folder."""
    return Path(name).name == name


def rendered(fields: dict[str, Any]) -> str:
    """The text of ``state.json``: the fields, and their checksum."""
    checksum = hashlib.sha256(json.dumps(fields).encode()).hexdigest()
    return json.dumps(fields | {"checksum": checksum}, indent=1) + "\n"


def entry_of(path: Path) -> Entry:
    """The size of a file, and its SHA-256: the fastest of hashlib's on processors that have instructions for it."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            size += len(piece)
    return [size, digest.hexdigest()]
