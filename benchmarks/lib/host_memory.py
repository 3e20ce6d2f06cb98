"""How much memory the host has left for a case."""

from __future__ import annotations

import os
from pathlib import Path


def available_bytes() -> int | None:
    """Bytes that the host can allocate now without swapping; None if unknown.

    The smaller of the kernel's estimate and what the control group's limit leaves.
    """
    return min((size for size in (_kernel_available(), _cgroup_available()) if size is not None), default=None)


def _kernel_available(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        # Not Linux: three quarters of the physical memory.
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 3 // 4
    except (AttributeError, OSError, ValueError):
        return None


def _cgroup_available(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    try:
        limit = (folder / "memory.max").read_text().strip()
        if limit == "max":
            return None
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        # The group's usage includes its page cache, of which the kernel reclaims inactive pages on demand.
        used = int((folder / "memory.current").read_text()) - int(statistics["inactive_file"])
        return max(0, int(limit) - used)
    except (OSError, ValueError, KeyError):
        return None
