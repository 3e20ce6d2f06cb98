"""Where the tests run: the Triton kernels interpreted on a CPU, or compiled on a GPU, with the same test bodies.

A test that takes ``device`` runs on "cpu" and, marked ``gpu``, on "cuda": ``-m gpu`` selects the second where there is
one. A test that takes ``flash_device`` runs the kernels, which are interpreted or compiled, never both in one process.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import hypothesis
import pytest
import torch


def _begin_with_a_gpu_of_its_own() -> None:
    """Share the GPUs out among pytest's workers: each sees them all, but another one first."""
    count = torch.cuda.device_count()
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    if count > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
        order = ((int(worker) + number) % count for number in range(count))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, order))


_begin_with_a_gpu_of_its_own()
HAS_CUDA = torch.cuda.is_available()

# The tests compute little at a time: threads of torch's own, here and in the programs that tests run, would only get
# into the way of pytest's workers.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)

MOST_WORKERS = 8
"""Of pytest, unless a number is given: each takes most of a GiB, and seconds to start."""
MOST_WORKERS_ON_A_GPU = 4
"""They share its memory; what they gain is that kernels are compiled side by side."""

# Triton decides when it is imported, so this comes before anything that imports it.
if HAS_CUDA:
    os.environ.pop("TRITON_INTERPRET", None)
else:
    os.environ["TRITON_INTERPRET"] = "1"


if not HAS_CUDA and importlib.util.find_spec("triton"):
    from .interpreter import make_faster

    make_faster()

if not HAS_CUDA:
    # Else a tenth of the time in which torch traces, or kernels are interpreted, goes into looking for cycles, of which
    # there are few. On a GPU they may hold memory that another test needs.
    gc.set_threshold(100_000, 50, 100)

# An example can take seconds, to interpret or to compile, and one in CI must fail for everybody or for nobody.
hypothesis.settings.register_profile("here", deadline=None, max_examples=20, print_blob=True)
# To find the smallest example that fails takes minutes; the blob that is printed reproduces one.
hypothesis.settings.register_profile(
    "ci",
    parent=hypothesis.settings.get_profile("here"),
    derandomize=True,
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "here")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What ``-n auto`` means: as many workers as there are cores to use, on a CPU half as many again, up to a limit.

    A fifth of the time of two workers on two cores is spent waiting for programs that the tests have started. Runs of
    pytest side by side, as many as TEST_RUNS says, have as many workers together.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if HAS_CUDA:
        most = min(cores, MOST_WORKERS_ON_A_GPU * torch.cuda.device_count())
    else:
        most = min(cores * 3 // 2, MOST_WORKERS)
    return max(1, most // int(os.environ.get("TEST_RUNS", "1")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine has no GPUs for, and drop what cannot exist on it."""
    no_gpu = pytest.mark.skip(reason="needs a CUDA GPU")
    one_gpu = pytest.mark.skip(reason="needs two CUDA GPUs")
    impossible = [item for item in items if not _can_exist(item)]
    if impossible:
        config.hook.pytest_deselected(items=impossible)
        items[:] = [item for item in items if item not in set(impossible)]
    marked = {item.path for item in items if item.get_closest_marker("every_triton")}
    unnamed = [path for path in marked if "every_triton" not in path.read_text()]
    assert not unnamed, f"tools/tritons.sh finds no tests in {unnamed}, which must name every_triton"
    for item in items:
        if _runs_kernels(item):
            # Lanes whose results are discarded overflow in silence on a GPU; in the interpreter NumPy warns of them.
            item.add_marker(pytest.mark.filterwarnings("ignore:.* encountered in :RuntimeWarning"))
        if item.get_closest_marker("gpu") and not HAS_CUDA:
            item.add_marker(no_gpu)
        elif item.get_closest_marker("multi_gpu") and torch.cuda.device_count() < 2:
            item.add_marker(one_gpu)
    items[:] = _longest_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def _longest_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """The part of the items that each worker begins with begins with its share of the longest ones.

    Those compile many kernels. At the end of a run, one of them would keep a worker busy when the others have nothing.
    """
    longest: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        (longest if "compiled_by" in getattr(item, "fixturenames", ()) else others).append(item)
    size, ordered = -(-len(items) // workers), []
    for worker in range(workers):
        mine = longest[worker::workers]
        rest = size - len(mine)
        ordered += mine + others[:rest]
        others = others[rest:]
    return ordered


def _runs_kernels(item: pytest.Item) -> bool:
    return _params(item).get("impl") == "flash" or "flash_device" in getattr(item, "fixturenames", ())


def _can_exist(item: pytest.Item) -> bool:
    """Kernels that are compiled take no CPU tensors, and the interpreter's bfloat16 products are not to be trusted."""
    on_cpu = _params(item).get("device") == "cpu"
    return not (on_cpu and _runs_kernels(item) and (HAS_CUDA or _params(item).get("dtype") is torch.bfloat16))


def _params(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that plain PyTorch code runs on."""
    return torch.device(request.param)


@pytest.fixture(scope="session")
def flash_device(device: torch.device) -> torch.device:
    """The device that the Triton kernels run on: "cuda" where there is one, else "cpu", interpreted."""
    return device


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> None:
    """Tables of a module draw the same random numbers on every run: collecting a module imports it."""
    torch.manual_seed(zlib.crc32(collector.nodeid.encode()))


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """Each test has random numbers of its own, the same on every run."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def _matmul_precision_for_others() -> Iterator[None]:
    """What a test, or a program that it runs, sets for products of float32 matrices ends with the test."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


MOST_KEPT = 2**30
"""Bytes of a GPU's memory that a worker may keep between tests."""


@pytest.fixture
def compile_afresh() -> Iterator[None]:
    """The test compiles for itself: nothing is found that another one left, and no limit is used up."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _gpu_memory_for_others() -> Iterator[None]:
    """A worker keeps little of the memory of a GPU that it needs no more: others share it."""
    yield
    if HAS_CUDA and torch.cuda.memory_reserved() > MOST_KEPT:
        torch.cuda.empty_cache()


@contextmanager
def _waiting_forbidden() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def waiting_forbidden() -> Callable[[], AbstractContextManager[None]]:
    """Inside of what it makes, waiting for the GPU is an error."""
    return _waiting_forbidden


@pytest.fixture
def requested_bytes() -> Callable[[], int]:
    """Bytes of the GPU's memory that tensors asked for, and have.

    `torch.cuda.memory_allocated` counts the pieces that they got: those above 1 MiB may be up to 1 MiB larger, where a
    larger one was free and not worth splitting, which depends on what ran before.
    """
    return lambda: int(torch.cuda.memory_stats()["requested_bytes.all.current"])


@pytest.fixture
def matmul_precision(request: pytest.FixtureRequest) -> str:
    """Indirectly parametrised: torch's setting for products of float32 matrices, for the time of the test."""
    torch.set_float32_matmul_precision(request.param)
    return request.param
