"""Exports of Nsight Systems: kernels by the ranges that were open when they were launched."""

from __future__ import annotations

import json
import math

import pytest

from cs336_systems.profiling import read_nsys, read_trace
from cs336_systems.profiling.nsys import read_ranges
from cs336_systems.profiling.trace import ELSEWHERE

from .nsys_exports import Export

pytest.importorskip("pandas")


@pytest.fixture
def export():
    return Export()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "report.sqlite"


def step(export, process=9):
    """A step whose backward runs on another thread."""
    export.range("[phase] forward", 0, 100, process=process)
    export.range("[residual] layers.0", 0, 50, process=process)
    export.range("[mlp] layers.0.ffn", 10, 20, process=process, registered=True)
    export.range("somebody else's", 10, 20, process=process)
    export.range("[norm] across threads", 0, 100, process=process, kind=60)
    export.kernel("ampere_sgemm_128x64_nn", 10, 40, process=process)
    export.kernel("void elementwise_kernel<float>(int)", 20, 5, process=process)
    export.kernel("after all regions", 70, 1, process=process)
    export.range("[phase] backward", 100, 200, process=process)
    export.range("[mlp] layers.0.ffn backward", 110, 120, 2, process=process)
    export.kernel("ampere_sgemm_64x64_nt", 112, 60, 2, process=process)
    export.kernel("sum of gradients", 112, 2, process=process)


EXPECTED = [
    ("ampere_sgemm_128x64_nn", 40.0, "forward", "mlp", True, "matrix products"),
    ("void elementwise_kernel<float>(int)", 5.0, "forward", "residual", True, "elementwise"),
    ("after all regions", 1.0, "forward", ELSEWHERE, True, "other"),
    ("ampere_sgemm_64x64_nt", 60.0, "backward", "mlp", True, "matrix products"),
    ("sum of gradients", 2.0, "backward", ELSEWHERE, True, "other"),
]


def rows(calls):
    return [*calls.itertuples(index=False, name=None)]


def test_a_kernel_belongs_to_the_ranges_around_its_launch(export, path, tmp_path):
    step(export)
    calls = read_nsys(export.write(path))
    assert rows(calls) == EXPECTED
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": []}))
    assert list(calls.columns) == list(read_trace(tmp_path / "trace.json").columns)


def test_processes_have_their_own_phases_threads_and_launches(export, path):
    step(export)
    export.range("[phase] optimizer", 60, 130, process=8)
    export.kernel("multi_tensor_apply_kernel", 70, 3, process=8)
    found = rows(read_nsys(export.write(path)))
    assert [row for row in found if row[2] != "optimizer"] == EXPECTED
    assert ("multi_tensor_apply_kernel", 3.0, "optimizer", ELSEWHERE, True, "optimizer") in found


def test_copies_and_fills_have_the_names_of_torch_profiler(export, path):
    export.range("[phase] forward", 0, 100)
    export.range("[embedding] tokens", 0, None)  # still open when the capture ended
    export.copy(10, 7)
    export.fill(2)
    assert {row[0]: row[1:] for row in rows(read_nsys(export.write(path)))} == {
        "Memcpy HtoD (Pageable -> Device)": (7.0, "forward", "embedding", True, "copy"),
        "Memset (Device)": (2.0, ELSEWHERE, ELSEWHERE, True, "copy"),
    }


def test_without_ranges_all_is_elsewhere(export, path):
    export.kernel("softmax_warp_forward", 10, 3)
    row = ("softmax_warp_forward", 3.0, ELSEWHERE, ELSEWHERE, True, "softmax")
    assert rows(read_nsys(export.write(path))) == [row]
    assert read_ranges(path).empty


def test_ranges_are_in_the_order_of_their_start(export, path):
    export.range("inner", 20, 30)
    export.range("outer", 10, 40, registered=True)
    export.range("open", 50, None)
    assert rows(read_ranges(export.write(path))) == [
        ("outer", pytest.approx(0.03)),
        ("inner", pytest.approx(0.01)),
        ("open", math.inf),
    ]


def test_other_files_are_refused(export, path, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"an SQLite export of Nsight Systems; there is no file .*report"):
        read_nsys(path)
    export.range("[phase] forward", 0, 100)
    with pytest.raises(RuntimeError, match=r"report\.sqlite must have CUDA kernels; Nsight Systems recorded none"):
        read_nsys(export.write(path))
    export.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", 0, 1)
    with pytest.raises(ValueError, match=r"it has whole graphs\. Record it with --cuda-graph-trace=node"):
        read_nsys(export.write(path))
    path.unlink()
    path.touch()
    with pytest.raises(ValueError, match=r"report\.sqlite must be an SQLite export .* has no table StringIds"):
        read_nsys(path)
    (tmp_path / "report.nsys-rep").write_text("no SQLite" * 100)
    with pytest.raises(ValueError, match=r"report\.nsys-rep must be .* `nsys export --type sqlite`; .*not a database"):
        read_nsys(tmp_path / "report.nsys-rep")
    export = Export()
    export.copy(1, 1)
    del export._rows["ENUM_CUDA_MEM_KIND"]
    with pytest.raises(ValueError, match="no such table: ENUM_CUDA_MEM_KIND"):
        read_nsys(export.write(path))
