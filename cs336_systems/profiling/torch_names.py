"""Every private or moving name of torch that only measurements use. Without one, these raise RuntimeError."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import Node

from ..kernels.torch_names import LIST, find


def _lacking(name: str) -> RuntimeError:
    return RuntimeError(
        f"this measurement needs {name}, which torch {torch.__version__} lacks. Install one of torch {LIST}, or a "
        "newer cs336_systems."
    )


def _measured_by(name: str) -> Any:
    """`find`; if there is no such name, a class that raises when it is called."""

    class Lacking:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            raise _lacking(name.replace(":", "."))

    return find(name) or Lacking


# The autograd node that this thread computes, None outside of a backward pass.
current_node: Callable[[], Any] = _measured_by("torch:_C._current_autograd_node")

# The number of this thread's next autograd node.
next_node_number: Callable[[], int] = _measured_by("torch:_C._autograd._get_sequence_nr")


def node_number(node: Node) -> int:
    """The number that autograd gave a node when the forward pass made it."""
    try:
        return node._sequence_nr()
    except AttributeError:
        raise _lacking("torch.autograd.graph.Node._sequence_nr") from None


# Sees every operation below autograd.
TorchDispatchMode: Any = _measured_by("torch.utils._python_dispatch:TorchDispatchMode")


def without_donated_buffers() -> AbstractContextManager[Any]:
    """Graphs that are compiled inside can run their backward pass again; others overwrite the saved tensors.

    Without the name torch raises when such a backward pass runs again.
    """
    if find("torch._functorch.config:donated_buffer") is None:
        return nullcontext()
    return find("torch._functorch.config:patch")(donated_buffer=False)


def compiler_counters() -> Mapping[str, int]:
    """Inductor's counters in this process, such as its cache's hits and misses."""
    counters = find("torch._dynamo.utils:counters")
    if counters is None:
        raise _lacking("torch._dynamo.utils.counters")
    return counters["inductor"]


COMPILER = ("torch._inductor.compile_fx", "torch._inductor.codegen.cuda_combined_scheduling")
"""Nearly all that torch.compile imports at its first use. It imports a missing one itself."""
