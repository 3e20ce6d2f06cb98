"""The memory that the host has left."""

from __future__ import annotations

from benchmarks.lib import host_memory
from benchmarks.lib.host_memory import available_bytes


def test_the_smaller_of_both_is_available(monkeypatch):
    assert 2**20 < available_bytes() <= host_memory._kernel_available()
    monkeypatch.setattr(host_memory, "_kernel_available", lambda: 100)
    for limit, expected in ((70, 70), (200, 100), (None, 100)):
        monkeypatch.setattr(host_memory, "_cgroup_available", lambda limit=limit: limit)
        assert available_bytes() == expected


def test_what_the_kernel_and_the_control_group_allow(tmp_path):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 150\n")
    assert host_memory._cgroup_available(tmp_path) == 450
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory._cgroup_available(tmp_path) is None
    assert host_memory._cgroup_available(tmp_path / "nowhere") is None
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:       7 kB\n")
    assert host_memory._kernel_available(tmp_path / "meminfo") == 7 * 1024
    assert host_memory._kernel_available(tmp_path / "nowhere") > 2**20
