"""Every private or moving name of torch that only measurements use. Without one, these raise RuntimeError."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import Node

from cs336_systems.kernels.torch_names import LIST, find


def _lacking(name: str) -> RuntimeError:
    return RuntimeError(
        f"this measurement needs {name}, which torch {torch.__version__} lacks. Install one of torch {LIST}, or a "
        "newer cs336_systems."
    )


def _measured_by(name: str) -> Any:
    """`find`, for what only measurements need; if it is missing, what raises when it is called."""

    def lacking(*arguments: Any, **options: Any) -> Any:
        raise _lacking(name.replace(":", "."))

    return find(name) or lacking


# A memory snapshot as an interactive page.
trace_plot: Any = _measured_by("torch.cuda._memory_viz:trace_plot")

# The node of autograd that is computed in this thread, None outside of a backward pass.
current_node: Callable[[], Any] = _measured_by("torch:_C._current_autograd_node")

# The number that the next node of autograd gets in this thread.
next_node_number: Callable[[], int] = _measured_by("torch:_C._autograd._get_sequence_nr")


def node_number(node: Node) -> int:
    """The number that autograd gave a node when the forward pass made it."""
    try:
        return node._sequence_nr()
    except AttributeError:
        raise _lacking("torch.autograd.graph.Node._sequence_nr") from None


class _NoDispatchMode:
    def __init__(self) -> None:
        raise _lacking("torch.utils._python_dispatch.TorchDispatchMode")


# What sees every operation, once autograd has.
TorchDispatchMode: Any = find("torch.utils._python_dispatch:TorchDispatchMode") or _NoDispatchMode


def without_donated_buffers() -> AbstractContextManager[object]:
    """What compiles inside has backward passes that can run again on the same graph; others overwrite what they get.

    Without the name torch says so where such a backward pass runs again.
    """
    if find("torch._functorch.config:donated_buffer") is None:
        return nullcontext()
    patched: AbstractContextManager[object] = find("torch._functorch.config:patch")(donated_buffer=False)
    return patched


def compiler_counters() -> Mapping[str, int]:
    """How often Inductor met what, in this process: its cache's hits and misses among them."""
    counters = find("torch._dynamo.utils:counters")
    if counters is None:
        raise _lacking("torch._dynamo.utils.counters")
    found: Mapping[str, int] = counters["inductor"]
    return found


COMPILER = ("torch._inductor.compile_fx", "torch._inductor.codegen.cuda_combined_scheduling")
"""What torch.compile imports when it is first used, nearly all of it. One that is missing is imported then."""
