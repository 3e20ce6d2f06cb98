"""Pausing the garbage collector restores what was, whichever threads and processes pause it too."""

from __future__ import annotations

import gc
import os
import threading

import pytest

from cs336_systems.kernels.garbage import collection_paused


@pytest.fixture(params=[False, True], ids=["disabled", "enabled"])
def enabled(request):
    """Whether garbage is collected before; what a test leaves is undone."""
    (gc.enable if request.param else gc.disable)()
    yield request.param
    gc.enable()


def test_nested_blocks(enabled):
    with collection_paused():
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() == enabled


def test_a_block_that_fails(enabled):
    with pytest.raises(ValueError, match="failed"), collection_paused():
        raise ValueError("failed")
    assert gc.isenabled() == enabled


@pytest.fixture
def other_thread():
    """Begins a block in another thread, and returns what ends it."""
    began, may_end = threading.Event(), threading.Event()

    def pause():
        with collection_paused():
            began.set()
            assert may_end.wait(60)

    thread = threading.Thread(target=pause)

    def end():
        may_end.set()
        thread.join()

    thread.start()
    assert began.wait(60)
    yield end
    end()


def test_blocks_of_two_threads_that_overlap(enabled, other_thread):
    with collection_paused():
        other_thread()
        assert not gc.isenabled()
    assert gc.isenabled() == enabled


def test_a_block_that_another_thread_outlives(enabled, other_thread):
    with collection_paused():
        pass
    assert not gc.isenabled()
    other_thread()
    assert gc.isenabled() == enabled


def forks(test):
    """Marks a test that forks; from Python 3.12 on os.fork warns if there are other threads."""
    test = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")(test)
    return pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")(test)


def in_fork(check):
    """Whether a check holds in a forked process."""
    process = os.fork()
    if process == 0:
        try:
            os._exit(not check())
        finally:
            os._exit(2)
    return os.waitpid(process, 0)[1] == 0


def in_a_block():
    with collection_paused():
        return not gc.isenabled()


@forks
def test_forked_processes(enabled, other_thread):
    assert in_fork(lambda: gc.isenabled() == enabled and in_a_block() and gc.isenabled() == enabled)
    with collection_paused():
        assert in_fork(lambda: not gc.isenabled())
    other_thread()
    assert in_fork(lambda: gc.isenabled() == enabled)
    with collection_paused():
        assert in_fork(in_a_block)


@forks
def test_a_process_that_forks_in_a_block_restores_what_was(enabled):
    with collection_paused():
        process = os.fork()
    if process == 0:
        os._exit(gc.isenabled() != enabled)
    assert os.waitpid(process, 0)[1] == 0
    assert gc.isenabled() == enabled
