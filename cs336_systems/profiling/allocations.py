"""Allocations out of a memory snapshot: how large, from when to when, in which phase, and where from.

Time is counted in events: the allocations and frees of a recording, numbered in their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .origins import Frame, Origin, passes_through
from .recording import END, PHASE, Recording

BEFORE = "before"
"""The phase of what was allocated before the recording."""

_FREED = "free_completed"


@dataclass(frozen=True)
class Allocation:
    """A piece of memory.

    Attributes:
        bytes: that were asked for.
        begin, end: the events by which it was allocated and freed; begin is -1 if it was there before, end None if it
            was still there at the end.
        phase: in which it was allocated.
        origin: where from; None where the stack does not say.
        owner: of `recording.GRADIENT` and `OPTIMIZER_STATE`, what it held when a phase ended; empty for neither.
    """

    bytes: int
    begin: int
    end: int | None
    phase: str
    origin: Origin | None
    owner: str = ""

    def lives_at(self, event: int) -> bool:
        """Whether it is allocated after this event."""
        return self.begin <= event and (self.end is None or event < self.end)


@dataclass(frozen=True)
class Phase:
    """A stretch of a recording: from the event ``begin`` up to ``end``, which is the next one's."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True)
class History:
    """All allocations of a recording, in the order in which they were made.

    Attributes:
        allocations: with those that were there before and freed in it.
        phases: in their order.
        events: how many there are.
        standing_bytes: allocated before, and all the time.
    """

    allocations: tuple[Allocation, ...]
    phases: tuple[Phase, ...]
    events: int
    standing_bytes: int

    @property
    def standing_before(self) -> int:
        """Bytes allocated when the recording began, also those that were freed in it."""
        return self.standing_bytes + sum(each.bytes for each in self.allocations if each.begin < 0)

    def curve(self) -> list[int]:
        """Bytes allocated after each event."""
        changes = [0] * (self.events + 1)
        for allocation in self.allocations:
            changes[max(0, allocation.begin)] += allocation.bytes
            if allocation.end is not None:
                changes[allocation.end] -= allocation.bytes
        levels, level = [], self.standing_bytes
        for change in changes[: self.events]:
            level += change
            levels.append(level)
        return levels

    def peak(self) -> tuple[int, int]:
        """The event after which most is allocated, the first of these, and how many bytes; (0, standing) if none."""
        levels = self.curve()
        if not levels:
            return 0, self.standing_bytes
        most = max(levels)
        return levels.index(most), most

    def phase(self, name: str) -> Phase:
        """The last phase of a name. Raises KeyError if there is none."""
        for phase in reversed(self.phases):
            if phase.name == name:
                return phase
        raise KeyError(f"name must be a phase of {[phase.name for phase in self.phases]}; got {name!r}")


def read_history(recording: Recording) -> History:
    """The allocations of a recording."""
    entries = recording.snapshot["device_traces"][recording.device_index]
    reader = _Reader(recording.owners)
    for entry in entries:
        reader.read(entry)
    return reader.history(recording.before_bytes)


class _Reader:
    """Goes through the events of a trace once."""

    def __init__(self, owners: Sequence[Mapping[int, str]]) -> None:
        self._owners = owners
        self._found: list[Allocation] = []
        self._live: dict[int, int] = {}
        self._begun: list[tuple[str, int]] = []
        self._marks: set[int] = set()
        self._events = 0

    def read(self, entry: Mapping[str, Any]) -> None:
        action, address = entry["action"], entry.get("addr", 0)
        if action == "alloc":
            name = _phase_of(entry["frames"])
            if name is not None:
                self._marks.add(address)
                self._begin(name)
                return
            phase = self._begun[-1][0] if self._begun else BEFORE
            self._live[address] = len(self._found)
            self._found.append(Allocation(entry["size"], self._events, None, phase, origin_of(entry["frames"])))
            self._events += 1
        elif action == _FREED and address in self._marks:
            self._marks.remove(address)
        elif action == _FREED:
            index = self._live.pop(address, None)
            if index is None:
                self._found.append(Allocation(entry["size"], -1, self._events, BEFORE, None))
            else:
                self._found[index] = replace(self._found[index], end=self._events)
            self._events += 1

    def _begin(self, name: str) -> None:
        if len(self._begun) < len(self._owners):
            for address, owner in self._owners[len(self._begun)].items():
                if address in self._live:
                    index = self._live[address]
                    self._found[index] = replace(self._found[index], owner=owner)
        self._begun.append((name, self._events))

    def history(self, before_bytes: int) -> History:
        later = [*self._begun[1:], (END, self._events)]
        phases = [Phase(name, begin, end) for (name, begin), (_, end) in zip(self._begun, later, strict=False)]
        freed = sum(allocation.bytes for allocation in self._found if allocation.begin < 0)
        shown = tuple(phase for phase in phases if phase.name != END)
        return History(tuple(self._found), shown, self._events, before_bytes - freed)


def _phase_of(frames: Sequence[Frame]) -> str | None:
    for frame in frames:
        if frame["name"].startswith(PHASE):
            return str(frame["name"][len(PHASE) :])
    return None


def origin_of(frames: Sequence[Frame]) -> Origin | None:
    """Where a stack comes from: its innermost origin that was written into it, else its innermost statement."""
    for frame in frames:
        origin = Origin.of_frame(frame)
        if origin is not None and origin.filename:
            return origin
        if origin is not None:
            # The operation is known, and the statement that it comes from is not: that of the stack will do.
            return _statement_of(frames, origin.operation) or origin
    return _statement_of(frames, "")


def _statement_of(frames: Sequence[Frame], operation: str) -> Origin | None:
    for frame in frames:
        filename = frame["filename"]
        if Origin.of_frame(frame) is None and not passes_through(filename) and not filename.startswith("??"):
            return Origin(filename, frame["line"], frame["name"], "", operation)
    return None
