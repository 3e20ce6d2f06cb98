"""Where in a model, and in its source, an operation comes from.

An `Origin` travels as one frame of a stack, in the form that torch's memory snapshots have: its file and line are those
of the statement, and its name says function, module and operation. So it survives wherever stacks do.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import einops
import jaxtyping
import torch
from torch import nn
from torch.nn.modules import module as global_hooks

Frame = dict[str, Any]
"""A frame as torch's memory snapshots have it: ``filename``, ``line`` and ``name``."""

_BETWEEN = " | "
_MOST_FRAMES = 24
# What an operation goes through on its way from the statement that asked for it.
_PASSED_THROUGH = tuple(str(Path(str(package.__file__)).parent) + os.sep for package in (torch, einops, jaxtyping))
_HERE = Path(__file__).parent
_PASSED_FILES = (
    *(str(_HERE / name) for name in ("origins.py", "recording.py", "saved.py")),
    *(str(module.__file__) for module in (contextlib, functools)),
)


@dataclass(frozen=True)
class Origin:
    """A statement, the module that ran it, and the operation.

    Attributes:
        filename, line, function: of the innermost statement outside of torch and einops.
        module: the path of the innermost module of the model, as `named_modules` has it; empty for the model itself,
            and for what is outside of it.
        operation: the name that torch has for it, such as ``aten.bmm``; in a backward pass followed by the node.
    """

    filename: str
    line: int
    function: str
    module: str
    operation: str

    @property
    def place(self) -> str:
        """File, line and function, without the folder."""
        return f"{os.path.basename(self.filename)}:{self.line} {self.function}"

    @property
    def source(self) -> str:
        """File and function, and the statement where its file can be read: ``naive.py:_naive: out = ...``."""
        text = linecache.getline(self.filename, self.line).strip()
        return f"{os.path.basename(self.filename)}:{self.function}: {text}"

    @property
    def name(self) -> str:
        """What stands for it as a frame's name."""
        return _BETWEEN.join((self.function, self.module, self.operation))

    def frame(self) -> Frame:
        """The frame that `of_frame` reads."""
        return {"filename": self.filename, "line": self.line, "name": self.name}

    @classmethod
    def of_frame(cls, frame: Frame) -> Origin | None:
        """What `frame` wrote; None for a frame that is none of these."""
        parts = frame["name"].split(_BETWEEN)
        if len(parts) != 3:
            return None
        return cls(frame["filename"], frame["line"], *parts)


def passes_through(filename: str) -> bool:
    """Whether a file belongs to what statements are passed on by: torch, einops, and the recording itself."""
    return filename.startswith(_PASSED_THROUGH) or filename in _PASSED_FILES


def stack() -> list[Frame]:
    """The Python stack of the caller, innermost frame first; outermost ones beyond a limit are left out."""
    frames: list[Frame] = []
    current: FrameType | None = sys._getframe(1)
    while current is not None and len(frames) < _MOST_FRAMES:
        frames.append(
            {"filename": current.f_code.co_filename, "line": current.f_lineno, "name": current.f_code.co_name}
        )
        current = current.f_back
    return frames


def statement() -> tuple[str, int, str]:
    """File, line and function of the innermost statement of the caller's stack that is not passed through."""
    current: FrameType | None = sys._getframe(1)
    while current is not None and passes_through(current.f_code.co_filename):
        current = current.f_back
    if current is None:
        return "", 0, ""
    return current.f_code.co_filename, current.f_lineno, current.f_code.co_name


class ModulePaths:
    """The module of a model that is running, at any time, by its path; one that is shared has the path of its user."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._running: list[tuple[str, nn.Module]] = []

    @property
    def current(self) -> str:
        """The path of the innermost module that runs; empty for the model itself, and outside."""
        return self._running[-1][0] if self._running else ""

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, `current` is kept."""
        before = global_hooks.register_module_forward_pre_hook(self._enter)
        # A checkpointed block that has what it needs is left by an exception.
        after = global_hooks.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()
            self._running.clear()

    def _enter(self, module: nn.Module, inputs: object) -> None:
        self._running.append((self._path(module), module))

    def _leave(self, module: nn.Module, inputs: object, output: object) -> None:
        self._running.pop()

    def _path(self, module: nn.Module) -> str:
        if self._running:
            name, user = self._running[-1]
            for attribute, child in user.named_children():
                if child is module:
                    return f"{name}.{attribute}" if name else attribute
        return self._names.get(id(module), self.current)


def named_call(origin_name: str, filename: str, line: int) -> Callable[..., Any]:
    """A function that calls what it is given, and that stacks show at this place, under this name."""
    # The call stands in the line after the first.
    code = _call.__code__.replace(co_name=origin_name, co_filename=filename, co_firstlineno=max(0, line - 1))
    # What is written in C, as torch's operations are, imports through the builtins of the innermost Python frame.
    return FunctionType(code, {"__builtins__": builtins})


def _call(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    return function(*arguments, **keywords)
