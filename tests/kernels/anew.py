"""Modules as they would be with what is installed at the moment, and a kernel that compiles nothing."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any


def loaded_anew(module: ModuleType) -> ModuleType:
    """A second copy of a module."""
    assert module.__file__ is not None
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_anew", module.__file__)
    assert spec is not None
    assert spec.loader is not None
    anew = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(anew)
    return anew


class FakeKernel:
    """A kernel, and what compiling it returns. Records how it was compiled and what each launch passed."""

    arg_names = ("x", "y", "length", "TILE")

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Callable[..., FakeKernel]:
        def compile_and_run(*args: Any, **options: Any) -> FakeKernel:
            self.compiled.append((grid, args, options))
            return self

        return compile_and_run
