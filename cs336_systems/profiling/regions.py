"""Ranges with the names of a model's regions, forward and backward, for torch.profiler and for Nsight Systems.

    with Regions(model) as regions, torch.profiler.profile() as profiler:
        with regions.during("forward"):
            loss = model(tokens, targets=targets)
        with regions.during("backward"):
            loss.backward()

A range is called ``[region] path``: ``[projections] layers.3.attn.q_proj``, and ``... backward`` in the backward pass.
Outside of ``with`` a model has no hooks and takes no time for them.

How the backward pass is known: autograd numbers its nodes in the order in which the forward pass makes them, so the
numbers at which a region begins and ends say which nodes are its own. When the model returns, each node of the graph
gets a hook before it and one after it, on whatever thread it will run. That tells apart what module hooks cannot:
parts of one function, as scores and softmax of naive attention, and modules whose inputs need no gradient.

What has no range of its own: sums of gradients where paths meet, which autograd computes between nodes; what is
computed outside the model, unless it is within ``regions.range``, which then marks its forward pass alone; the inside
of a compiled function, which is one node; a backward pass through a graph that was made before ``with``. What
checkpointing computes again in the backward pass has the names of the forward pass. The forward pass has to run on the
thread that entered ``with``, and one model at a time has ranges.
"""

from __future__ import annotations

import bisect
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from ..kernels.torch_names import next_node_number, node_number
from ..parts import marked_by
from .containers import tensors_in

PASS = "pass"
"""The region of a pass as a whole, as `Regions.during` marks it."""
BACKWARD = "backward"

EMBEDDING, ROPE, NORM, MLP, PROJECTIONS = "embedding", "rope", "norm", "mlp", "projections"
ATTENTION, RESIDUAL, HEAD, OPTIMIZER = "attention", "residual", "head and loss", "optimizer"
PARTS = SCORES, MASK, SOFTMAX, VALUES = tuple(f"attention: {name}" for name in ("scores", "mask", "softmax", "values"))
"""What naive attention consists of, as `cs336_systems.attention.naive` names it."""

_RULES: tuple[tuple[str, str], ...] = (
    (r"(^|\.)(lm_head|head)( |$)", HEAD),
    (r" \w*(Rotary|RoPE)\w*$", ROPE),
    (r" \w*Embedding$", EMBEDDING),
    (r" \w*Norm$", NORM),
    (r"attn\.\w*proj(ection)? \w+$", PROJECTIONS),
    (r" \w*(SwiGLU|MLP|FeedForward)$", MLP),
    (r" \w*Attention$", ATTENTION),
    (r" \w*(Block|DecoderLayer|EncoderLayer)$", RESIDUAL),
    (r"^ ", "model"),
)
_RANGE = re.compile(r"\[(?P<region>[^]]+)\] (?P<path>.*?)(?P<backward> backward)?")

NameOf = Callable[[str, nn.Module], "str | None"]


def region_of_module(path: str, module: nn.Module) -> str | None:
    """The region of a module, by its path in the model and the name of its class; None for that of what it is in.

    It knows this library's modules and those that are named alike, as Llama's of transformers are.
    """
    text = f"{path} {type(module).__name__}"
    return next((region for pattern, region in _RULES if re.search(pattern, text)), None)


def label_of(region: str, path: str = "", *, backward: bool = False) -> str:
    """The name of a range."""
    return f"[{region}] {path}" + (f" {BACKWARD}" if backward else "")


def region_of_label(label: str) -> str | None:
    """The region in the name of a range; None for a name that `label_of` did not make."""
    found = _RANGE.fullmatch(label)
    return None if found is None else found["region"]


class _Open:
    """One range, open from `__init__` to `close`, in torch.profiler and, on CUDA, for Nsight Systems."""

    __slots__ = ("_nvtx", "_record")

    def __init__(self, label: str, nvtx: bool) -> None:
        self._nvtx = nvtx
        if nvtx:
            torch.cuda.nvtx.range_push(label)
        self._record = torch.profiler.record_function(label)
        self._record.__enter__()

    def close(self) -> None:
        self._record.__exit__(None, None, None)
        if self._nvtx:
            torch.cuda.nvtx.range_pop()


class _Thread(threading.local):
    """The ranges that are open on a thread: for each, its region and its path."""

    def __init__(self) -> None:
        self.ranges: list[tuple[_Open, str, str]] = []


class Regions:
    """The ranges of a model, there while it is entered as a context manager. See the module's text.

    Args:
        model: any module. It is the eager one: in what is compiled there are no ranges.
        name_of: the region of a module from its path and itself, None for none of its own.
        nvtx: whether Nsight Systems is told too; by default where there is CUDA.
    """

    def __init__(self, model: nn.Module, name_of: NameOf = region_of_module, *, nvtx: bool | None = None) -> None:
        self._model, self._name_of = model, name_of
        self._nvtx = torch.cuda.is_available() if nvtx is None else nvtx
        self._threads = _Thread()
        self._thread = 0
        self._installed = ExitStack()
        # Nodes numbered from starts[i] up to starts[i + 1] belong to the i-th owner: its region and path.
        self._starts: list[int] = []
        self._owners: list[tuple[str, str] | None] = []

    def __enter__(self) -> Regions:
        self._thread = threading.get_ident()
        next_node_number()  # raises here where torch has none
        with ExitStack() as installed:
            installed.enter_context(marked_by(self._part))
            names: dict[nn.Module, list[str]] = {}
            for path, module in self._model.named_modules(remove_duplicate=False):
                names.setdefault(module, []).append(path)
            for module, paths in names.items():
                region = self._name_of(paths[0], module)
                if region is not None or module is self._model:
                    self._hook(installed, module, region or "model", paths)
            self._installed = installed.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        while self._threads.ranges:  # those of a forward pass that raised
            self._threads.ranges.pop()[0].close()
        self._forget()
        self._installed.close()

    def during(self, name: str) -> AbstractContextManager[None]:
        """A pass: "forward", "backward" or "optimizer", of which all that is computed in the meantime is a part."""
        return self.range(PASS, name)

    @contextmanager
    def range(self, region: str, path: str = "") -> Iterator[None]:
        """A region of one's own: the optimizer, a loss outside the model."""
        self._begin(region, path)
        try:
            yield
        finally:
            self._end()

    def _part(self, name: str) -> AbstractContextManager[None]:
        return self.range(name, self._threads.ranges[-1][2] if self._threads.ranges else "")

    def _hook(self, installed: ExitStack, module: nn.Module, region: str, paths: list[str]) -> None:
        def before(module: nn.Module, arguments: Any) -> None:
            if not torch.compiler.is_compiling():
                self._begin(region, paths[0] if len(paths) == 1 else self._path_here(paths))

        def after(module: nn.Module, arguments: Any, output: Any) -> None:
            if not torch.compiler.is_compiling():
                self._end()
                if module is self._model:
                    self._follow(output)

        installed.callback(module.register_forward_pre_hook(before).remove)
        # Also after a forward pass that raised, so that no range stays open.
        installed.callback(module.register_forward_hook(after, always_call=True).remove)

    def _path_here(self, paths: Iterable[str]) -> str:
        """Of the paths of a shared module, the one within what is running."""
        here = self._threads.ranges[-1][2] if self._threads.ranges else ""
        return next((path for path in paths if path.startswith(f"{here}.")), next(iter(paths)))

    def _begin(self, region: str, path: str, backward: bool = False) -> None:
        self._threads.ranges.append((_Open(label_of(region, path, backward=backward), self._nvtx), region, path))
        self._note()

    def _end(self) -> None:
        self._threads.ranges.pop()[0].close()
        self._note()

    def _note(self) -> None:
        """From the next node of autograd on, what is made belongs to the innermost range that is open."""
        if threading.get_ident() != self._thread or not torch.is_grad_enabled():
            return
        ranges = self._threads.ranges
        self._starts.append(next_node_number())
        self._owners.append(ranges[-1][1:] if ranges and ranges[-1][1] != PASS else None)

    def _forget(self) -> None:
        self._starts.clear()
        self._owners.clear()

    def _owner(self, node: Node) -> tuple[str, str] | None:
        index = bisect.bisect_right(self._starts, node_number(node)) - 1
        return self._owners[index] if index >= 0 else None

    def _follow(self, output: object) -> None:
        """Give the nodes of a graph, from a model's output to its parameters, the ranges of those who made them."""
        seen: set[Node] = set()
        waiting = [tensor.grad_fn for tensor in tensors_in(output)]
        while waiting:
            node = waiting.pop()
            # What adds to a parameter's gradient outlives the graph, and so would its hooks.
            if node is None or node in seen or hasattr(node, "variable"):
                continue
            seen.add(node)
            owner = self._owner(node)
            if owner is not None:
                self._hook_node(node, *owner)
            waiting.extend(following for following, _ in node.next_functions)
        self._forget()

    def _hook_node(self, node: Node, region: str, path: str) -> None:
        def before(gradients: object) -> None:
            self._begin(region, path, backward=True)

        def after(inputs: object, outputs: object) -> None:
            self._end()

        node.register_prehook(before)
        node.register_hook(after)
