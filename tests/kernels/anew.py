"""Modules as they would be with what is installed at the moment."""

from __future__ import annotations

import importlib.util
from types import ModuleType


def loaded_anew(module: ModuleType) -> ModuleType:
    """A second copy of a module."""
    assert module.__file__ is not None
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_anew", module.__file__)
    assert spec is not None
    assert spec.loader is not None
    anew = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(anew)
    return anew
