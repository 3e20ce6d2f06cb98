"""Profiler ranges (`torch.profiler.record_function` and NVTX) for the modules of a model, forward and backward.

    with ModuleRanges(model) as ranges, torch.profiler.profile() as profiler:
        with ranges.phase("forward"):
            loss = model(tokens, targets=targets)
        with ranges.phase("backward"):
            loss.backward()

A range is named ``[region] path``, such as ``[projections] layers.3.attn.q_proj``; in the backward pass " backward" is
appended. Hooks exist only inside the ``with`` block.

Backward ranges come from autograd's sequence numbers: a node's number tells in which forward range it was created, and
each node of the graph of the model's output gets hooks that open and close that range. Module backward hooks neither
separate the scores and the softmax of one function, nor see modules whose inputs need no gradient.

These have no backward range: sums of gradients, which autograd computes between nodes; operations outside of the model;
the inside of a compiled function, which is one node; graphs created before the block. Recomputation in checkpointed
blocks has forward ranges. The forward must run on the thread that entered the block.
"""

from __future__ import annotations

import bisect
import re
import threading
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from typing_extensions import Self

from .regions import RegionOf, RegionTracker, region_of_module, tensors_in
from .torch_names import next_node_number, node_number

PHASE = "phase"
"""The region of the ranges of `ModuleRanges.phase`."""
_LABEL = re.compile(r"\[(?P<region>[^]]+)\] (?P<path>.*)")


def parse_label(label: str) -> tuple[str, str] | None:
    """The region and the path in the name of a range; None if it is not one of `ModuleRanges`."""
    match = _LABEL.fullmatch(label)
    return None if match is None else (match["region"], match["path"])


class ModuleRanges(RegionTracker):
    """Opens a range around each module's forward and backward; see the module's docstring.

    Args:
        model: an eager model. Compiled code has no ranges inside.
        region_of: gives a module's region from its path and itself; None leaves it in the region around it.
        nvtx: whether to open NVTX ranges too, for Nsight Systems. Default: whether CUDA is available.

    Entering raises RuntimeError if another tracker is entered.
    """

    def __init__(self, model: nn.Module, region_of: RegionOf = region_of_module, *, nvtx: bool | None = None) -> None:
        super().__init__(model, region_of, hook_all=False)
        self._model = model
        self._nvtx = torch.cuda.is_available() if nvtx is None else nvtx
        # Nodes with numbers from _starts[i] up to _starts[i + 1] were created in the range _creators[i].
        self._starts: list[int] = []
        self._creators: list[tuple[str, str]] = []

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        next_node_number()  # raises if this torch has no sequence numbers
        super().__enter__()
        self.hooks.callback(self._model.register_forward_hook(self._hook_graph).remove)
        return self

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A range around a whole phase of a step: "forward", "backward" or "optimizer"."""
        return self.range(PHASE, name)

    def push(self, region: str, path: str) -> None:
        """Open a range."""
        super().push(region, path)
        label = f"[{region}] {path}"
        if self._nvtx:
            torch.cuda.nvtx.range_push(label)
        record = torch.profiler.record_function(label)
        record.__enter__()
        self.per_thread.__dict__.setdefault("records", []).append(record)
        self._assign_next_nodes()

    def pop(self) -> None:
        """Close the innermost range."""
        super().pop()
        self.per_thread.records.pop().__exit__(None, None, None)
        if self._nvtx:
            torch.cuda.nvtx.range_pop()
        self._assign_next_nodes()

    def _assign_next_nodes(self) -> None:
        """Assign the nodes created from now on to the innermost range."""
        if threading.get_ident() == self._thread and torch.is_grad_enabled():
            self._starts.append(next_node_number())
            self._creators.append(self.current)

    def _hook_graph(self, model: nn.Module, args: Any, output: Any) -> None:
        """Hook all nodes of the output's graph but AccumulateGrad, which outlives the graph."""
        if torch.compiler.is_compiling():
            return
        seen: set[Node] = set()
        pending = [tensor.grad_fn for tensor in tensors_in(output)]
        while pending:
            node = pending.pop()
            if node is None or node in seen or hasattr(node, "variable"):
                continue
            seen.add(node)
            index = bisect.bisect_right(self._starts, node_number(node)) - 1
            region, path = self._creators[index] if index >= 0 else ("", "")
            if region not in ("", PHASE):
                node.register_prehook(lambda grads, opened=(region, f"{path} backward"): self.push(*opened))
                node.register_hook(lambda grad_inputs, grad_outputs: self.pop())
            pending.extend(next_node for next_node, _ in node.next_functions)
        self._starts.clear()
        self._creators.clear()
