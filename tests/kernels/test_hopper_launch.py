"""What a call of the kernels for Hopper passes them, without a GPU: the addresses of what it describes."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch

from cs336_systems.kernels.settings import Settings
from cs336_systems.kernels.sm90 import coverage, describe, launch
from cs336_systems.kernels.sm90.describe import Rows

CAUSAL = Settings("bottom_right").text


class Recorder:
    """In place of a launcher: describes every launch, and notes the addresses beside those of what is described."""

    launches: ClassVar[list[Any]] = []

    def __init__(self, kernel):
        self.kernel = kernel

    def __call__(self, addresses, describe):
        described = describe()
        of_tensors = [getattr(tensor, "base", tensor) for tensor in described.tensors]
        pointers = tuple(None if tensor is None else tensor.data_ptr() for tensor in of_tensors)
        Recorder.launches.append((self.kernel.__name__, addresses, pointers, described))


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


def operands(settings):
    return settings.text, settings.numbers


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
    assert pointers[-4] == lse.data_ptr()
    assert pointers[-2:] == (None, None)
    assert described.grid == ({64: 6, 80: 6, 256: 2}[d], 1)
    assert described.constants["PERSISTENT"]
    assert described.constants["HEAD_DIM"] == {64: 64, 80: 64, 256: 256}[d]


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("processors", [2, 1000])
def test_the_backward_passes_what_it_describes(launches, monkeypatch, processors, d, with_dlse):
    monkeypatch.setattr(launch, "processors_of", lambda device: processors)
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
    assert prepare[4:] == (*main[4:6], *main[8:10], None)
    assert main[:4] == tuple(x.data_ptr() for x in (q, dout, k, v))
    assert main[6:8] == tuple(x.data_ptr() for x in gradients[1:])
    assert finish == (main[8], gradients[0].data_ptr(), None)
    assert main[-2:] == (None, None)
    programs = min(processors, 3 * 4)
    assert [described.grid for *_, described in launches] == [(8 * 256 // 64, 1), (programs, 1), (8 * 256 // 64, 1)]
    assert launches[1][3].constants["PERSISTENT"] == (processors == 2)


PACKED = Settings("bottom_right", packed=(None, None))


def packed_call(d=64, rows=(200, 300), sequences=5, dtype=torch.int32):
    """q, k, v and dout as packed sequences are passed on, and where they begin; numbers are not looked at."""
    by_length = (torch.randn(rows[x], heads, d, dtype=torch.bfloat16) for x, heads in ((0, 4), (1, 2), (1, 2), (0, 4)))
    starts = [torch.zeros(sequences + 1, dtype=dtype) for _ in range(2)]
    return [x.transpose(0, 1)[None] for x in by_length], starts


@pytest.mark.parametrize("d", [64, 80, 256])
def test_packed_sequences_are_described_by_where_they_end(launches, d):
    (q, k, v, _), starts = packed_call(d)
    out, lse = launch.forward(q, k, v, 0.1, PACKED.text, PACKED.numbers, starts)
    [(_, addresses, pointers, described)] = launches
    assert addresses == pointers
    assert pointers[-2:] == tuple(x.data_ptr() for x in starts)
    assert pointers[-4] == lse.data_ptr()
    assert out.stride()[1:] == q.stride()[1:]
    assert described.arguments[-1] == 5
    assert described.constants["TO_THE_END"]
    tiles = 4 * (200 // 128 + 5 + 1)
    assert described.constants["PERSISTENT"] == (tiles > 2)
    for descriptor in described.tensors[:-4]:
        heads, width = descriptor.base.shape[1], descriptor.base.shape[3]
        big, *strides = descriptor.strides
        bound = descriptor.shape[3]
        assert descriptor.shape[2:] == [heads, bound, width]
        assert strides == [heads * width, width, heads * width, 1]
        # The row r of a sequence of 7 that begins at 90, as bytes are addressed.
        for row in range(7):
            elements = bound * big + 97 * strides[0] + (bound - 7 + row) * strides[2]
            assert (elements * 2) % 2**64 == (90 + row) * strides[0] * 2
        assert all(0 < stride * 2 < 2**40 and stride * 2 % 16 == 0 for stride in descriptor.strides[:-1])


@pytest.mark.parametrize("d", [64, 256])
def test_the_backward_of_packed_sequences_passes_what_it_describes(launches, monkeypatch, d):
    monkeypatch.setattr(launch, "processors_of", lambda device: 1000)
    (q, k, v, dout), starts = packed_call(d)
    call = PACKED.text, PACKED.numbers, starts
    gradients = launch.backward(q, k, v, torch.empty_like(q), torch.empty(q.shape[:-1]), dout, None, 0.1, *call)[:3]
    assert [x.stride()[1:] for x in gradients] == [x.stride()[1:] for x in (q, k, v)]
    for _, addresses, pointers, described in launches:
        assert addresses == pointers
        assert 5 in described.arguments
    prepare, main, finish = [pointers for _, _, pointers, _ in launches]
    assert main[-2:] == tuple(x.data_ptr() for x in starts)
    assert prepare[-1] == finish[-1] == starts[0].data_ptr()
    rows = 4 * (200 // 128 + 5 + 1) * 128 // 64
    keys = {64: 128, 256: 64}[d]
    assert [described.grid[0] for *_, described in launches] == [rows, 2 * (300 // keys + 5 + 1), rows]


def test_plans_are_for_so_many_sequences_of_one_dtype(launches):
    for rows, sequences, dtype in (
        ((200, 300), 5, torch.int32),
        ((200, 300), 6, torch.int32),
        ((200, 300), 6, torch.int64),
    ):
        (q, k, v, _), starts = packed_call(64, rows, sequences, dtype)
        launch.forward(q, k, v, 0.1, PACKED.text, PACKED.numbers, starts)
    assert len(launch._forward_plans._plans) == 3


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
        "batch": (q, k, v, PACKED.text, PACKED.numbers, packed_call()[1]),
        "sinks and a seed": (q, k, v, *operands(Settings(sinks=True, dropout=0.5)), (torch.zeros(4), torch.zeros(2))),
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
