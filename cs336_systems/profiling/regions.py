"""Regions of a model: which module or named range, and which source line, runs an operation."""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import einops
import jaxtyping
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from typing_extensions import Self

from ..ranges import ranges_opened_by

OPTIMIZER = "optimizer"
ATTENTION_STEPS = SCORES, MASK, SOFTMAX, VALUES = tuple(
    f"attention: {name}" for name in ("scores", "mask", "softmax", "values")
)
"""The named ranges of naive attention."""

REGION_RULES: tuple[tuple[str, str], ...] = (
    (r"(^|\.)(lm_head|head)( |$)", "head and loss"),
    (r" \w*(Rotary|RoPE)\w*$", "rope"),
    (r" \w*Embedding$", "embedding"),
    (r" \w*Norm$", "norm"),
    (r"attn\.\w*proj(ection)? \w+$", "projections"),
    (r" \w*(SwiGLU|MLP|FeedForward)$", "mlp"),
    (r" \w*Attention$", "attention"),
    (r" \w*(Block|DecoderLayer|EncoderLayer)$", "residual"),
    (r"^ ", "model"),
)
"""Patterns of "path class", and the region of the first that is found."""

RegionOf = Callable[[str, nn.Module], "str | None"]


def region_of_module(path: str, module: nn.Module) -> str | None:
    """The region of a module by its path and class name, or None if it belongs to the module around it.

    The rules fit this library's modules and similarly named ones, such as those of Llama in transformers.
    """
    text = f"{path} {type(module).__name__}"
    return next((region for pattern, region in REGION_RULES if re.search(pattern, text)), None)


class RegionTracker:
    """Tracks, in a ``with`` block, the region and the module path that run on each thread: the innermost ones.

    Unlike `torch.utils.module_tracker.ModuleTracker` it knows the innermost module, gives a shared module the path
    below its caller, and survives a forward that raises, as recomputation in a checkpointed block does.

    Args:
        model: the root, whose path is "".
        region_of: gives a module's region from its path and itself; None leaves it in the region around it.
        hook_all: register global hooks, which see all modules, instead of hooks on the modules that have a region.
            Hooks on a submodule keep this library's modules from being fused; global hooks make torch.compile trace
            compiled modules again.

    Entering raises RuntimeError if another tracker is entered.
    """

    def __init__(self, model: nn.Module, region_of: RegionOf = region_of_module, *, hook_all: bool = True) -> None:
        self._paths: dict[nn.Module, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self._paths.setdefault(module, []).append(path)
        self._regions = {module: region_of(paths[0], module) for module, paths in self._paths.items()}
        self._regions[model] = self._regions[model] or "model"
        self._hook_all = hook_all
        self.hooks = ExitStack()  # of what the block installs
        self.per_thread = threading.local()

    @property
    def _stack(self) -> list[tuple[str, str]]:
        return self.per_thread.__dict__.setdefault("stack", [])

    @property
    def current(self) -> tuple[str, str]:
        """Region and path; ("", "") outside of the model."""
        return self._stack[-1] if self._stack else ("", "")

    def __enter__(self) -> Self:
        registers: list[Any] = [(register_module_forward_pre_hook, register_module_forward_hook)]
        if not self._hook_all:
            modules = [module for module, region in self._regions.items() if region is not None]
            registers = [(module.register_forward_pre_hook, module.register_forward_hook) for module in modules]
        with ExitStack() as hooks:
            hooks.enter_context(ranges_opened_by(self.range))
            for register_pre_hook, register_hook in registers:
                hooks.callback(register_pre_hook(self._enter).remove)
                hooks.callback(register_hook(self._exit, always_call=True).remove)
            self.hooks = hooks.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self.hooks.close()

    @contextmanager
    def range(self, region: str, path: str | None = None) -> Iterator[None]:
        """A region around the block, by default at the current path."""
        self.push(region, self.current[1] if path is None else path)
        try:
            yield
        finally:
            self.pop()

    def push(self, region: str, path: str) -> None:
        """Enter a region."""
        self._stack.append((region, path))

    def pop(self) -> None:
        """Leave the innermost region."""
        self._stack.pop()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            region, path = self.current
            paths = self._paths.get(module, [path])
            below = next((each for each in paths if each.startswith(f"{path}.")), paths[0])
            self.push(self._regions.get(module) or region, below)

    def _exit(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.pop()


_SKIPPED = (
    *(str(Path(str(package.__file__)).parent) + os.sep for package in (torch, einops, jaxtyping)),
    *(str(Path(__file__).parent / name) for name in ("regions.py", "recording.py", "saved.py")),
    *(str(module.__file__) for module in (contextlib, functools)),
)


class Statement(NamedTuple):
    """A line of source code; empty if unknown."""

    filename: str = ""
    line: int = 0
    function: str = ""

    def __str__(self) -> str:
        return f"{os.path.basename(self.filename)}:{self.line} {self.function}" if self.filename else ""

    @property
    def source(self) -> str:
        """The text of the line."""
        return linecache.getline(self.filename, self.line).strip()

    @classmethod
    def innermost(cls) -> Statement:
        """The innermost line on the caller's stack outside of torch, einops, jaxtyping and this package."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED):
            frame = frame.f_back
        return cls() if frame is None else cls(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested mappings, tuples and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)
