"""Modules as they would be with what is installed at the moment."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from types import ModuleType

import pytest


def loaded_anew(module: ModuleType) -> ModuleType:
    """A second copy of a module."""
    assert module.__file__ is not None
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_anew", module.__file__)
    assert spec is not None
    assert spec.loader is not None
    anew = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(anew)
    return anew


def without(monkeypatch: pytest.MonkeyPatch, *names: str, module: ModuleType) -> ModuleType:
    """A second copy of a module, made where these names are missing; the rest of the test has them again."""
    with monkeypatch.context() as changed:
        for name in names:
            owner, _, path = name.partition(":")
            *owners, last = path.split(".")
            with contextlib.suppress(ImportError, AttributeError):
                changed.delattr(functools.reduce(getattr, owners, importlib.import_module(owner)), last)
        return loaded_anew(module)
