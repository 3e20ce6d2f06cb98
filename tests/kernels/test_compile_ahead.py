"""The backward's kernels are compiled in the background while the forward's are, and are those that it launches."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from cs336_systems.attention import FlashAttentionFunction, attention, dispatch
from cs336_systems.kernels import launching
from cs336_systems.kernels.launching import Launch, Launcher, compile_ahead

CPU = torch.device("cpu")


class Kernel:
    """A kernel whose compilation ends once `may_compile` is set."""

    arg_names = ("x",)
    cache_key = ""

    def __init__(self, fails=False):
        self.may_compile, self.events, self.fails = threading.Event(), [], fails

    def warmup(self, *args, grid, **constants):
        self.events.append("compiling")
        assert self.may_compile.wait(60)
        if self.fails:
            raise RuntimeError("it does not compile")
        self.events.append("compiled")
        return self

    def __getitem__(self, grid):
        return lambda *args, **options: self.events.append("launched")


@pytest.fixture(autouse=True)
def compiled_rather_than_interpreted(monkeypatch):
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(launching, "_in_background", {})
    monkeypatch.setattr(launching, "start_compiler", list)
    monkeypatch.setattr(launching, "build_launcher", lambda kernel: kernel.events.append("built"))
    monkeypatch.setattr(launching, "runner_of", lambda compiled, grid: (None, None))
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.device("meta"))


KEYS = """
from cs336_systems.kernels.launching import Launcher
from cs336_systems.kernels.sm90 import backward, forward
kernels = forward.forward_kernel, backward.backward_kernel
for kernel in kernels:
    Launcher(kernel)
print(*[kernel.hash for kernel in kernels])
"""


@pytest.mark.every_triton
def test_every_process_has_the_same_keys_for_the_cache_on_disk():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    how = {"env": environment, "cwd": Path(__file__).parents[2], "text": True}
    found = [subprocess.check_output([sys.executable, "-c", KEYS], **how) for _ in "abc"]
    assert len(set(found)) == 1
    assert len(set(found[0].split())) == 2


def test_kernels_are_hashed_in_their_order_before_other_threads_compile_them(monkeypatch):
    events: list[Any] = []
    kernels = [Kernel(), Kernel()]
    monkeypatch.setattr(launching, "find_key", events.append)
    monkeypatch.setattr(launching, "start_compiler", lambda: events.append("compiling") or [])
    compile_ahead([(kernel, launch()) for kernel in kernels], CPU)
    assert events == [*kernels, "compiling"]
    for kernel in kernels:
        kernel.may_compile.set()
    Launcher(kernels[0])
    assert events[-1] is kernels[0]


def launch():
    return Launch((1, 1), ("x",), (), {}, {})


@pytest.mark.parametrize("fails", [False, True])
def test_a_launch_waits_for_its_kernel_alone(fails):
    kernel, other = Kernel(fails), Kernel()
    compile_ahead([(kernel, launch()), (other, launch())], CPU)
    first = threading.Thread(target=Launcher(kernel), args=((16,), launch))
    first.start()
    first.join(0.2)
    assert first.is_alive()
    kernel.may_compile.set()
    first.join(60)
    assert kernel.events == (["compiling", "launched"] if fails else ["compiling", "compiled", "built", "launched"])
    assert "compiled" not in other.events
    other.may_compile.set()


def test_no_garbage_is_collected_while_a_launch_compiles():
    enabled: list[bool] = []

    class Events(list[Any]):
        def append(self, event):
            enabled.append(gc.isenabled())

    kernel = Kernel()
    kernel.events = Events()
    kernel.may_compile.set()
    compile_ahead([(kernel, launch())], CPU)
    wait(launching._in_background[kernel])
    Launcher(kernel)((16,), launch)
    assert enabled == [True, True, True, False]  # compiling, compiled and built in the background, launched
    assert gc.isenabled()


@pytest.mark.parametrize("is_ahead", [False, True])
def test_kernels_wait_for_what_triton_does_once(monkeypatch, is_ahead):
    begun, kernel = Future(), Kernel()
    kernel.may_compile.set()
    monkeypatch.setattr(launching, "start_compiler", lambda: [begun])
    task = (compile_ahead, [(kernel, launch())], CPU) if is_ahead else (Launcher(kernel), (16,), launch)
    thread = threading.Thread(target=task[0], args=task[1:])
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert not kernel.events
    begun.set_result(None)
    thread.join(60)
    wait(launching._in_background.get(kernel, ()))
    assert kernel.events == (["compiling", "compiled", "built"] if is_ahead else ["launched"])


def test_nothing_is_described_for_the_interpreter(monkeypatch):
    monkeypatch.setattr(launching, "INTERPRETED", True)
    compile_ahead((pytest.fail("described") for _ in range(1)), CPU)


@pytest.fixture
def asked(monkeypatch):
    """The calls whose backward is to be compiled."""
    calls = []
    monkeypatch.setattr(dispatch.KERNELS[1].module, "compile_backward", calls.append)
    monkeypatch.setattr(launching, "INTERPRETED", True)
    dispatch.clear_plans()
    return calls


def made(shape, requires_grad=False):
    return torch.randn(shape, requires_grad=requires_grad)


@pytest.mark.parametrize("of", ["q", "bias", "sinks", "nothing"])
def test_backwards_are_compiled_where_a_gradient_is_needed(asked, of):
    shapes = {"q": (1, 2, 9, 16), "k": (1, 2, 9, 16), "v": (1, 2, 9, 16), "bias": (9, 9), "sinks": (2,)}
    tensors = {name: made(shape, name == of) for name, shape in shapes.items()}
    with torch.no_grad():
        attention(**tensors, impl="flash")
    assert not asked
    dispatch.clear_plans()
    for _ in range(2):
        attention(**tensors, impl="flash")
    assert len(asked) == (of != "nothing")


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_calls_of_the_function_itself(asked, needs_gradient):
    q, k, v = (made((1, 9, 16), needs_gradient) for _ in range(3))
    for _ in range(2):
        FlashAttentionFunction.apply(q, k, v, True)
    assert len(asked) == needs_gradient


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "case", "kernels"),
    [
        # With every Triton one case of each family: how it tells launches apart is its own affair, which are made not.
        pytest.param(
            *("sm90", {"dtype": "bfloat16", "d": 64, "feature": "bias"}),
            ["backward_kernel", "finish_kernel", "pair_gradient_kernel", "prepare_kernel"],
            marks=pytest.mark.every_triton,
        ),
        (
            *("sm90", {"dtype": "float16", "d": 80, "feature": "packed", "return_lse": True}),
            ["backward_kernel", "finish_kernel", "prepare_kernel"],
        ),
        ("triton", {"dtype": "float16", "d": 32, "feature": "slopes"}, ["dkdv_kernel", "dq_kernel"]),
        pytest.param(
            *("triton", {"dtype": "float32", "d": 32, "return_lse": True}),
            ["dkdv_kernel", "dq_kernel", "split_kernel"],
            marks=pytest.mark.every_triton,
        ),
        ("triton", {"dtype": "tf32", "d": 32, "feature": "packed"}, ["dkdv_kernel", "dq_kernel", "split_kernel"]),
    ],
)
def test_what_was_compiled_is_what_is_launched(compiled_by, family, case, kernels):
    [row] = compiled_by("compile_ahead", family, json.dumps(case))
    assert row["ahead"] == kernels
    assert "forward_kernel" in row["of_forward"]
    assert row["late"] == []
    assert not row["sympy"]
    assert row["launchers"] == (kernels if triton.__version__.startswith("3.6.") else [])
