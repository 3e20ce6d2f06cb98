"""What a call of the kernels for Hopper passes them, without a GPU: the addresses of what it describes."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch

from cs336_systems.kernels.hopper import coverage, describe, launch
from cs336_systems.kernels.hopper.describe import Rows
from cs336_systems.kernels.settings import Settings

CAUSAL = Settings("bottom_right").text


class Recorder:
    """In place of a launcher: describes every launch, and notes the addresses beside those of what is described."""

    launches: ClassVar[list[Any]] = []

    def __init__(self, kernel):
        self.kernel = kernel

    def __call__(self, *arguments):
        *addresses, describe = arguments
        described = describe()
        of_tensors = [getattr(tensor, "base", tensor) for tensor in described.tensors]
        pointers = tuple(None if tensor is None else tensor.data_ptr() for tensor in of_tensors)
        flat = tuple(address for group in addresses for address in group)
        Recorder.launches.append((self.kernel.__name__, flat, pointers, described))


@pytest.fixture
def launches(monkeypatch):
    """The launches of calls that are taken for those on a Hopper GPU."""
    monkeypatch.setattr(coverage, "_why_not_here", lambda device: None)
    monkeypatch.setattr(launch, "Launcher", Recorder)
    monkeypatch.setattr(launch, "TiledLauncher", Recorder)
    monkeypatch.setattr(launch, "_counter", lambda device: torch.zeros(4, dtype=torch.int32))
    monkeypatch.setattr(launch, "processors_of", lambda device: 2)
    monkeypatch.setattr(launch, "_forward_plans", launch.Plans())
    monkeypatch.setattr(launch, "_backward_plans", launch.Plans())
    monkeypatch.setattr(Recorder, "launches", [])
    return Recorder.launches


def tensors(d=64, q_len=200, k_len=300, dtype=torch.bfloat16):
    q, dout = (torch.randn(2, 4, q_len, d, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(2, 2, k_len, d, dtype=dtype) for _ in range(2))
    return q, k, v, dout


@pytest.mark.parametrize("d", [64, 80, 256])
def test_the_forward_passes_what_it_describes(launches, d):
    q, k, v, _ = tensors(d)
    out, lse = launch.forward(q, k, v, 0.1, CAUSAL)
    [(name, addresses, pointers, described)] = launches
    assert name == ("forward_more_kernel" if d == 80 else "forward_kernel")
    assert addresses == pointers
    assert pointers[:4] == tuple(x.data_ptr() for x in (q, k, v, out))
    assert pointers[-2] == lse.data_ptr()
    assert described.grid == ({64: 6, 80: 6, 256: 2}[d], 1)
    assert described.constants["PERSISTENT"]
    assert described.constants["HEAD_DIM"] == {64: 64, 80: 64, 256: 256}[d]


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_the_backward_passes_what_it_describes(launches, d, with_dlse):
    q, k, v, dout = tensors(d)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:-1])
    dlse = torch.randn(q.shape[:-1]) if with_dlse else None
    *gradients, of_extras = launch.backward(q, k, v, out, lse, dout, dlse, 0.1, CAUSAL)
    assert of_extras == []
    assert [x.shape for x in gradients] == [x.shape for x in (q, k, v)]
    for _, addresses, pointers, _ in launches:
        assert addresses == pointers
    prepare, main, finish = [pointers for _, _, pointers, _ in launches]
    assert prepare[:4] == (out.data_ptr(), dout.data_ptr(), lse.data_ptr(), None if dlse is None else dlse.data_ptr())
    assert prepare[4:] == (*main[4:6], main[-1])
    assert main[:4] == tuple(x.data_ptr() for x in (q, dout, k, v))
    assert main[6:8] == tuple(x.data_ptr() for x in gradients[1:])
    assert finish == (main[-1], gradients[0].data_ptr())
    assert [described.grid for *_, described in launches] == [(8 * 256 // 64, 1), (4 * 3, 1), (8 * 256 // 64, 1)]


@pytest.mark.parametrize("shift", [0, 1])
def test_a_gradient_that_cannot_be_copied_is_laid_out_anew(launches, shift):
    q, k, v, _ = tensors()
    dout = torch.ones((), dtype=q.dtype).expand(q.shape) if not shift else torch.ones(q.numel() + 1, dtype=q.dtype)
    if shift:
        dout = dout[shift:].view(q.shape)
    launch.backward(q, k, v, torch.empty_like(q), torch.empty(q.shape[:-1]), dout, None, 0.1, CAUSAL)
    passed = launches[1][3].tensors[1].base
    assert passed.is_contiguous()
    assert passed.data_ptr() % 16 == 0
    assert torch.equal(passed, dout)


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_what_they_do_not_cover_is_passed_on(launches, monkeypatch, name):
    asked = []
    monkeypatch.setattr(launch.portable, name, lambda *arguments: asked.append(arguments))
    q, k, v, dout = tensors()
    shifted = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
    single = tensors(dtype=torch.float32)
    calls = {
        "misaligned": (shifted, k, v, CAUSAL, (), ()),
        "float32": (*single[:3], CAUSAL, (), ()),
        "sinks": (q, k, v, Settings(sinks=True).text, (), (torch.zeros(4),)),
    }
    for q_of_call, k_of_call, v_of_call, *rest in calls.values():
        further = () if name == "forward" else (torch.empty_like(q_of_call), torch.empty(q.shape[:-1]), dout, None)
        getattr(launch, name)(q_of_call, k_of_call, v_of_call, *further, 0.1, *rest)
    assert len(asked) == len(calls)
    assert not launches


def test_rows_lie_where_their_addresses_say():
    sizes = 3, 128, 64
    memory = Rows.memory(*sizes, torch.device("cpu"))
    rows = Rows.of(memory, *sizes)
    assert Rows.addresses(memory.data_ptr(), *sizes) == tuple(x.data_ptr() for x in rows)
    assert sum(x.numel() for x in rows) == memory.numel()
    assert rows.sums.numel() == math.prod(sizes)


@pytest.mark.parametrize(
    ("matrices", "group", "length", "d", "together"),
    [
        (32, 1, 4096, 256, 4),
        (16, 1, 16384, 128, 2),
        (32, 4, 16384, 128, 8),
        (31, 1, 8192, 256, 2),
        (3, 1, 128, 64, 3),
        (6, 1, 1 << 20, 128, 1),
    ],
)
def test_sections_are_alike_where_they_can_be(matrices, group, length, d, together):
    assert describe.section(torch.empty(length, d, device="meta"), matrices, group) == together
