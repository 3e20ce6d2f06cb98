"""SQLite exports as Nsight Systems writes them, with the columns that are read, for tests."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

PROCESS = 9
_COLUMNS = {
    "StringIds": "id INTEGER PRIMARY KEY, value",
    "ENUM_CUDA_MEMCPY_OPER": "id INTEGER PRIMARY KEY, name, label",
    "ENUM_CUDA_MEM_KIND": "id INTEGER PRIMARY KEY, name, label",
    "NVTX_EVENTS": 'start, "end", eventType, text, textId, globalTid',
    "CUPTI_ACTIVITY_KIND_RUNTIME": 'start, "end", nameId, globalTid, correlationId',
    "CUPTI_ACTIVITY_KIND_KERNEL": 'start, "end", demangledName, globalPid, correlationId',
    "CUPTI_ACTIVITY_KIND_MEMCPY": 'start, "end", copyKind, srcKind, dstKind, globalPid, correlationId',
    "CUPTI_ACTIVITY_KIND_MEMSET": 'start, "end", memKind, globalPid, correlationId',
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": 'start, "end"',
}


class Export:
    """Events of an export. Times are in microseconds; ``thread`` and ``process`` are numbers."""

    def __init__(self) -> None:
        self._strings: list[str] = []
        self._rows: dict[str, list[tuple[object, ...]]] = {
            "ENUM_CUDA_MEMCPY_OPER": [(1, "CUDA_MEMCPY_KIND_HTOD", "Host-to-Device")],
            "ENUM_CUDA_MEM_KIND": [(0, "", "Pageable"), (2, "", "Device")],
        }
        self._launches = 0

    def write(self, path: Path) -> Path:
        """The file; like Nsight Systems it has no tables without rows, but for the strings."""
        path.unlink(missing_ok=True)
        rows = self._rows | {"StringIds": list(enumerate(self._strings, 1))}
        with closing(sqlite3.connect(path)) as file, file:
            for table, each in rows.items():
                file.execute(f"CREATE TABLE {table} ({_COLUMNS[table]})")
                places = ", ".join("?" * len(_COLUMNS[table].split(",")))
                file.executemany(f"INSERT INTO {table} VALUES ({places})", each)
        return path

    def add(self, table: str, *row: object) -> None:
        self._rows.setdefault(table, []).append(row)

    def range(self, text, start, end, thread=1, *, process=PROCESS, registered=False, kind=59):
        """An NVTX range, whose text is that of a registered string or its own; without an end if that is None."""
        names = (None, self._string(text)) if registered else (text, None)
        self.add("NVTX_EVENTS", 1000 * start, end and 1000 * end, kind, *names, (process << 24) + thread)

    def kernel(self, name, launch, duration, thread=1, *, process=PROCESS):
        """A kernel whose launch began at this time; the kernel starts much later."""
        times = self._launch("cudaLaunchKernel", launch, duration, thread, process)
        owner = (process << 24, self._launches)
        self.add("CUPTI_ACTIVITY_KIND_KERNEL", *times, self._string(name), *owner)

    def copy(self, launch, duration):
        """A copy from the host to the device."""
        times = self._launch("cudaMemcpyAsync", launch, duration, 1, PROCESS)
        self.add("CUPTI_ACTIVITY_KIND_MEMCPY", *times, 1, 0, 2, PROCESS << 24, self._launches)

    def fill(self, duration):
        """A fill without a launch."""
        self.add("CUPTI_ACTIVITY_KIND_MEMSET", 0, 1000 * duration, 2, PROCESS << 24, 0)

    def _launch(self, name, start, duration, thread, process):
        self._launches += 1
        call = (1000 * start, 1000 * start + 500, self._string(name), (process << 24) + thread, self._launches)
        self.add("CUPTI_ACTIVITY_KIND_RUNTIME", *call)
        return 1000 * start + 10**6, 1000 * (start + duration) + 10**6

    def _string(self, text):
        self._strings.append(text)
        return len(self._strings)
