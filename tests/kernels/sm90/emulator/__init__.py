"""Runs the kernels for Hopper on a CPU: Gluon's language on torch's tensors, a Python thread for each role of a CTA.

The kernels' source is imported a second time, as `emulated`, with stand-ins for Triton's modules. Tiles, addresses,
masks, barriers, their phases and what a role waits for are as on a GPU; if all roles wait, the launch fails. Not
emulated: layouts, 32-bit overflow, and when asynchronous operations finish, which here is where they are issued. But a
tile that TMA overwrites must not be loaded from any more, by what the barriers say (`accesses`).
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch

from .language import add_fragments, stand_ins
from .values import Value

KERNELS = Path(__file__).parents[4] / "kernels"
SMS = 3


@functools.cache
def emulated() -> SimpleNamespace:
    """The package of the kernels whose Triton is this module: its ``backend``, plans of which run on CPU tensors."""
    package = types.ModuleType("emulated")
    package.__path__ = [str(KERNELS)]
    modules = {"emulated": package, **stand_ins()}
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "triton"}
    for name in before:
        del sys.modules[name]
    sys.modules.update(modules)
    try:
        names = [f"emulated.{path}" for path in ("launching", "rules", *_paths())]
        loaded = {name.rpartition(".")[2]: importlib.import_module(name) for name in names}
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
            del sys.modules[name]
        sys.modules.update(before)
    backend = loaded["backend"]
    # Neighbours stay where they are: what the instructions do with them is no arithmetic.
    for module in map(vars, loaded.values()):
        if "add_fragments" in module:
            module["add_fragments"] = add_fragments
        if "pack_pairs" in module:
            module["pack_pairs"] = lambda x, dtype, pinned=False: Value(x.to(dtype).x.contiguous().view(torch.int32))
            module["unpack_operand"] = lambda x, dtype, layout, columns: x.to(dtype, bitcast=True)
    backend.workspace_for = lambda device, tiles: torch.zeros(1 + tiles, dtype=torch.int32)
    # The portable kernels, which are interpreted, compute gradients after the backward.
    portable = "triton.captured_gradients"
    sys.modules[f"emulated.{portable}"] = importlib.import_module(f"cs336_systems.kernels.{portable}")
    # Several CTAs, which run side by side and claim tiles.
    loaded["launching"].num_sms = lambda device: SMS
    return SimpleNamespace(**loaded)


def _paths() -> Iterator[str]:
    for path in sorted((KERNELS / "sm90").rglob("*.py")):
        if path.stem != "__init__":
            yield ".".join(path.relative_to(KERNELS).with_suffix("").parts)
