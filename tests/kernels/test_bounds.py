"""No kernel reads or writes outside of its tensors, whatever of a tile exists: each address in the interpreter is seen.

What lies there is seldom noticed otherwise: it is multiplied by zeros, or never stored.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from cs336_systems.attention import attention
from cs336_systems.kernels import launching, tuning
from cs336_systems.kernels.tuning import TileConfig
from cs336_systems.testing import Shapes, evaluate, make_inputs

pytestmark = pytest.mark.skipif(not launching.INTERPRETED, reason="needs the interpreter")


class Watch:
    """The interpreter's memory accesses, held to the storages of the tensors that a launch was given."""

    def __init__(self, memory):
        self.memory = memory
        self.storages = []
        self.checked = 0

    def __getattr__(self, name):
        return getattr(self.memory, name)

    def load(self, addresses, mask, other, dtype):
        self.check(addresses[mask], np.dtype(dtype).itemsize)
        return self.memory.load(addresses, mask, other, dtype)

    def store(self, addresses, values, mask):
        self.check(addresses[mask], values.dtype.itemsize)
        return self.memory.store(addresses, values, mask)

    def check(self, addresses, size):
        inside = np.zeros(addresses.shape, dtype=bool)
        for start, end in self.storages:
            inside |= (addresses >= start) & (addresses + np.uint64(size) <= end)
        assert inside.all(), f"{np.count_nonzero(~inside)} of {inside.size} addresses are outside of every tensor"
        self.checked += inside.size


@pytest.fixture
def watch(monkeypatch):
    watched = Watch(interpreter._interpreter)
    launch = interpreter.GridExecutor.__call__

    def launch_watched(self, *args, **kwargs):
        storages = [x.untyped_storage() for x in args if isinstance(x, torch.Tensor)]
        watched.storages = [(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in storages]
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(interpreter, "_interpreter", watched)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_watched)
    return watched


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("lengths", "widths", "causal"),
    [((35, 50), (20, 40), True), ((50, 35), (40, 20), True), ((35, 50), (16, 16), False)],
)
def test_every_address_is_in_a_tensor(flash_device, watch, lengths, widths, causal, dtype):
    (q_len, k_len), (d, dv) = lengths, widths
    shapes = Shapes.of(1, q_len=q_len, k_len=k_len, d=d, dv=dv, q_heads=2, kv_heads=1)
    inputs = make_inputs(shapes, dtype=dtype, device=flash_device)
    tile = TileConfig(16, 16, 4, 1, ahead=causal)
    with tuning.pin(forward=tile, dq=tile, dkdv=tile):
        evaluate(partial(attention, causal=causal, impl="flash", return_lse=True), inputs)
    assert watch.checked > 0
