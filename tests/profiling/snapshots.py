"""Snapshots made by hand, in the form that torch's have."""

from __future__ import annotations

from cs336_systems.profiling.origins import Origin
from cs336_systems.profiling.recording import PHASE, TRACKED_TENSORS, Recording


def alloc(address, size, *frames):
    """An allocation; frames innermost first, as dicts or origins."""
    told = [frame.frame() if isinstance(frame, Origin) else frame for frame in frames]
    return {"action": "alloc", "addr": address, "size": size, "stream": 0, "frames": told, "time_us": 0}


def free(address, size=0):
    """A free, in the two steps that CUDA's allocator writes down."""
    entry = {"addr": address, "size": size, "stream": 0, "frames": [], "time_us": 0}
    return [{"action": "free_requested", **entry}, {"action": "free_completed", **entry}]


def mark(phase):
    """What marks the begin of a phase, at an address that others have at other times."""
    return [alloc(1, 1, {"filename": "recording.py", "line": 1, "name": PHASE + phase}), *free(1, 1)]


def frame(filename, line, name):
    """A frame of a stack."""
    return {"filename": filename, "line": line, "name": name}


def origin(module="", operation="", *, filename="/home/model.py", line=1, function="forward"):
    """An origin, by what matters to a test."""
    return Origin(filename, line, function, module, operation)


def recording(*entries, before=0, owners=()):
    """A recording of these entries; lists of them are laid flat."""
    flat = [each for entry in entries for each in (entry if isinstance(entry, list) else [entry])]
    return Recording({"segments": [], "device_traces": [flat]}, 0, before, tuple(owners), TRACKED_TENSORS)
