"""Device time by kernel, phase and region, from SQLite exports of Nsight Systems.

    nsys export --type sqlite report.nsys-rep
    calls = read_nsys(Path("report.sqlite"))  # a pandas DataFrame, as `read_trace` returns it

A kernel, copy or fill belongs to the NVTX ranges of `ModuleRanges` that were open when the CUDA call that launched it
began: to the innermost region on the thread of the call, and to the phase on any thread of its process, since the
caller of a backward waits for autograd's thread.
"""

from __future__ import annotations

import math
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .trace import Event, frame_of

if TYPE_CHECKING:
    import pandas as pd

_GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"


def _string(column: str) -> str:
    return f"(SELECT value FROM StringIds WHERE id = {column})"


def _memory(column: str) -> str:
    return f"coalesce((SELECT label FROM ENUM_CUDA_MEM_KIND WHERE id = {column}), 'Unknown')"


_DIRECTION = "(SELECT replace(substr(name, 18), 'TO', 'to') FROM ENUM_CUDA_MEMCPY_OPER WHERE id = copyKind)"
_MEMORIES = f"{_memory('srcKind')} || ' -> ' || {_memory('dstKind')}"
_COPY = f"'Memcpy ' || coalesce({_DIRECTION}, 'Unknown') || ' (' || {_MEMORIES} || ')'"


class _Source(NamedTuple):
    """A table: the category of its events in a Chrome trace, and SQL for their name, thread or process, and number."""

    category: str
    table: str
    name: str
    owner: str = "globalPid"
    correlation: str = "correlationId"
    where: str = "TRUE"


# Copies and fills have torch.profiler's names. CUDA_MEMCPY_KIND_HTOD is HtoD there. Type 59 is NvtxPushPopRange.
_RANGES = _Source("user_annotation", "NVTX_EVENTS", f"coalesce(text, {_string('textId')}, '')", "globalTid", "NULL")
_RANGES = _RANGES._replace(where="eventType = 59")
_SOURCES = (
    _RANGES,
    _Source("cuda_runtime", "CUPTI_ACTIVITY_KIND_RUNTIME", _string("nameId"), "globalTid"),
    _Source("kernel", "CUPTI_ACTIVITY_KIND_KERNEL", _string("demangledName")),
    _Source("gpu_memcpy", "CUPTI_ACTIVITY_KIND_MEMCPY", _COPY),
    _Source("gpu_memset", "CUPTI_ACTIVITY_KIND_MEMSET", f"'Memset (' || {_memory('memKind')} || ')'"),
)


def read_nsys(path: Path) -> pd.DataFrame:
    """The kernels, copies and fills in an SQLite export of Nsight Systems, as `read_trace` returns those of a trace.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no such export, or its CUDA graphs were traced as a whole.
        RuntimeError: the export has no kernels.
    """
    processes: dict[int, list[Event]] = {}
    for event in _events(path, *_SOURCES):
        processes.setdefault(event["pid"], []).append(event)
    calls = frame_of(processes.values())
    if calls.empty:
        raise RuntimeError(
            f"{path} must have CUDA kernels; Nsight Systems recorded none. Was it run with --trace=cuda,nvtx, and did "
            "kernels run between cudaProfilerStart and cudaProfilerStop?"
        )
    return calls.assign(microseconds=1e-3 * calls.microseconds)


def read_ranges(path: Path) -> pd.DataFrame:
    """The NVTX ranges in an SQLite export, in the order of their start: ``name`` and ``milliseconds`` on the host.

    A range without an end has infinitely many. Raises as `read_nsys`, but needs no kernels.
    """
    import pandas as pd

    ranges = [(event["name"], 1e-6 * event["dur"]) for event in _events(path, _RANGES)]
    return pd.DataFrame(ranges, columns=["name", "milliseconds"])


def _events(path: Path, *sources: _Source) -> list[Event]:
    """The rows of tables as events of a Chrome trace, in nanoseconds. An export lacks tables that would be empty."""
    if not path.is_file():
        raise FileNotFoundError(f"path must be an SQLite export of Nsight Systems; there is no file {path}")
    events: list[Event] = []
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as export:
            tables = {name for (name,) in export.execute("SELECT name FROM sqlite_master")}
            if "StringIds" not in tables:
                raise ValueError(f"{path} must be an SQLite export of Nsight Systems; it has no table StringIds")
            if _GRAPHS in tables and export.execute(f"SELECT count(*) FROM {_GRAPHS}").fetchone()[0]:
                raise ValueError(
                    f"{path} must have the kernels of CUDA graphs; it has whole graphs. Record it with "
                    "--cuda-graph-trace=node"
                )
            for category, table, name, owner, correlation, where in sources:
                if table not in tables:
                    continue
                columns = f'start, "end", {name}, {owner}, {correlation}'
                for start, end, label, thread, number in export.execute(f"SELECT {columns} FROM {table} WHERE {where}"):
                    events.append(
                        {
                            "cat": category,
                            "name": label,
                            "ts": start,
                            "dur": math.inf if end is None else end - start,
                            "pid": thread >> 24,  # 24 bits of a thread's number follow those of its process
                            "tid": thread,
                            "args": {"correlation": number},
                        }
                    )
    except sqlite3.Error as error:
        raise ValueError(
            f"{path} must be an SQLite export, by `nsys export --type sqlite`; reading it failed: {error}"
        ) from None
    return sorted(events, key=lambda event: event["ts"])
