"""No kernel loads or stores outside of its tensors: the interpreter's memory accesses are checked one by one.

Other tests seldom notice: what is loaded there is multiplied by zeros, or never stored.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from cs336_systems.attention import attention, attention_varlen, attention_with_cache, varlen
from cs336_systems.attention.variants import block_local, document, relative_bias
from cs336_systems.kernels import launching
from cs336_systems.testing import Shapes, evaluate, make_cache, make_inputs, make_packed

from ..attention.helpers import FLOAT, HALF, packed_arguments
from .portable import tiled

pytestmark = pytest.mark.skipif(not launching.INTERPRETED, reason="needs the interpreter")


def shaped(*shape):
    return torch.randn(shape, requires_grad=True)


class Watch:
    """The interpreter's memory accesses, checked against the storages of a launch's tensors."""

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

    def atomic_rmw(self, operation, addresses, values, mask, order):
        self.check(addresses[mask], values.dtype.itemsize)
        return self.memory.atomic_rmw(operation, addresses, values, mask, order)

    def check(self, addresses, size):
        inside = np.zeros(addresses.shape, dtype=bool)
        for start, end in self.storages:
            inside |= (addresses >= start) & (addresses + np.uint64(size) <= end)
        self.checked += inside.size
        assert inside.all(), f"{np.count_nonzero(~inside)} of {inside.size} addresses are outside of every tensor"


def tensors_in(value):
    """The tensors among a launch's arguments, also within tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors_in(item)


@pytest.fixture
def watch(monkeypatch):
    watched = Watch(interpreter._interpreter)
    launch = interpreter.GridExecutor.__call__

    def launch_watched(self, *args, **kwargs):
        storages = [x.untyped_storage() for x in tensors_in((*args, *kwargs.values()))]
        watched.storages = [(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in storages]
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(interpreter, "_interpreter", watched)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_watched)
    yield
    assert watched.checked > 0


CALLS = [
    ((35, 50), (20, 40), HALF, lambda: {"causal": True}),
    ((50, 35), (40, 20), FLOAT, lambda: {"causal": True}),
    ((35, 50), (16, 16), HALF, dict),
    ((35, 50), (20, 40), FLOAT, dict),
    *[
        ((18, 35), (20, 12), FLOAT, features)
        for features in (
            lambda: {"bias": shaped(2, 1, 18, 35)},
            lambda: {"bias": shaped(2, 1, 1, 35), "causal": True},
            lambda: {"bias": shaped(18, 1), "window": (5, 3)},
            lambda: {"mask": torch.randn(2, 1, 18, 35) > 0},
            lambda: {"alibi_slopes": shaped(2, 2), "causal": True},
            lambda: {"scores": relative_bias(shaped(1, 52), 17)},
            lambda: {"sinks": shaped(2), "dropout_p": 0.5, "softcap": 3.0},
            lambda: {"mask": document(torch.arange(35).expand(2, 35) // 9).with_blocks(18, 35)},
        )
    ],
]


@pytest.mark.parametrize(("lengths", "widths", "dtype", "features"), CALLS)
def test_every_address_is_in_a_tensor(flash_device, watch, lengths, widths, dtype, features):
    (q_len, k_len), (d, dv), given = lengths, widths, features()
    shapes = Shapes.of(2, q_len=q_len, k_len=k_len, d=d, dv=dv, q_heads=2, kv_heads=1)
    with tiled(16, 16, ahead=given == {"causal": True}):
        inputs = make_inputs(shapes, dtype=dtype, device=flash_device)
        evaluate(partial(attention, impl="flash", return_lse=True), inputs, given)


def lists_of_other_sequences(monkeypatch, lengths, device):
    """As on a GPU, where nobody looks: lists whose blocks are visible as far as the longest sequence."""
    monkeypatch.setattr(varlen, "_check_listed", lambda *given: None)
    given = packed_arguments([(18, 18)] * len(lengths), device)
    starts = {name: given[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    return {"mask": block_local(30).with_blocks(18, 18, **starts)}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("none", FLOAT),
        ("lists", FLOAT),
        ("lists", HALF),
        ("causal", HALF),
        ("causal", FLOAT),
        ("window", HALF),
        ("bias", HALF),
        ("bias", FLOAT),
    ],
)
def test_every_address_of_packed_sequences_is_in_a_tensor(flash_device, watch, monkeypatch, name, dtype):
    """The last sequences are short of a tile, and no row follows them."""
    lengths = [(18, 3), (0, 5), (17, 18), (1, 2)]
    inputs = make_packed(lengths, d=20, dv=12, dtype=dtype, device=flash_device)
    features = {"causal": {"causal": True}, "window": {"window": (5, 3)}, "bias": {"bias": shaped(1, 2, 18, 18)}}
    if name == "lists":
        features["lists"] = lists_of_other_sequences(monkeypatch, lengths, flash_device)
    with tiled(16, 16):
        attend = partial(attention_varlen, **packed_arguments(lengths, flash_device), impl="flash", return_lse=True)
        evaluate(attend, inputs, features.get(name, {}))


@pytest.mark.parametrize(("new", "window", "dtype"), [(1, None, HALF), (3, None, FLOAT), (3, (9, 0), HALF)])
def test_every_address_of_a_cache_is_in_a_tensor(flash_device, watch, new, window, dtype):
    """A full sequence ends where its slots do; others are short, or empty."""
    sizes = {"q_heads": 4, "kv_heads": 2, "d": 20, "dv": 12, "new": new}
    cache = make_cache([70, 3, 0, 65], capacity=70, **sizes, dtype=dtype, device=flash_device)
    attention_with_cache(*cache, window=window, impl="flash")


@triton.jit
def copy_kernel(source, target, SIZE: tl.constexpr):
    """Without a mask."""
    places = tl.arange(0, SIZE)
    tl.store(target[0] + places, tl.load(source + places))


@pytest.mark.parametrize(("source", "target"), [(16, 12), (12, 16)])
def test_an_address_outside_is_noticed(flash_device, watch, source, target):
    x, y = (torch.zeros(size, device=flash_device) for size in (source, target))
    with pytest.raises(Exception, match="4 of 16 addresses are outside of every tensor"):
        copy_kernel[(1,)](x, (y,), 16)
