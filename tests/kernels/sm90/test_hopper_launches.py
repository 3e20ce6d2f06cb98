"""What plans launch on Hopper: grids, addresses, descriptors and workspaces, without a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cs336_systems.kernels import launching
from cs336_systems.kernels.call import NO_AUX, Aux, Call, Options, Wanted
from cs336_systems.kernels.sm90 import backend, launches

from .test_hopper_backend import CAUSAL, PACKED


class Recorder:
    """In place of a launcher: describes every launch, and keeps it with the addresses that were passed."""

    def __init__(self, kernel, calls):
        self.kernel, self.calls = kernel, calls

    def __call__(self, addresses, describe, *described):
        launch = describe(*described)
        bases = [getattr(x, "base", x) for x in launch.tensors]
        assert addresses == tuple(None if x is None else x.data_ptr() for x in bases)
        self.calls.append((self.kernel.__name__, addresses, launch))


@pytest.fixture
def calls(monkeypatch):
    """The launches of plans, each checked to pass the addresses of what it describes; on a GPU of 2 multiprocessors."""
    made = []
    monkeypatch.setattr(launching, "Launcher", lambda kernel: Recorder(kernel, made))
    monkeypatch.setattr(backend, "workspace_for", lambda device, tiles: torch.zeros(1 + tiles, dtype=torch.int32))
    monkeypatch.setattr(launching, "num_sms", lambda device: 2)
    return made


def call_of(d=64, dv=None, *, is_packed=False, options=CAUSAL):
    """(2, 4, 200, d) q and (2, 2, 300, d) k, or packed, with rows before heads in memory."""
    batch = 1 if is_packed else 2
    q, k, v = (torch.randn(batch, rows, heads, columns, dtype=torch.bfloat16).transpose(1, 2)
               for rows, heads, columns in ((200, 4, d), (300, 2, d), (300, 2, dv or d)))  # fmt: skip
    return Call(q, k, v, options, PACKED if is_packed else NO_AUX)


def run_backward(call, dout=None, dlse=None):
    """The gradients."""
    out, lse = call.q.new_empty(*call.q.shape[:-1], call.v_head_dim), torch.empty(call.q.shape[:-1])
    dout = torch.randn_like(out) if dout is None else dout
    run = backend.plan_backward(call, out, dout, dlse is not None, Wanted())
    return run(call.q, call.k, call.v, out, lse, dout, dlse, call.aux)


@pytest.mark.parametrize(("d", "dv", "ctas"), [(64, 64, 6), (80, 80, 6), (256, 256, 2), (192, 128, 2)])
@pytest.mark.parametrize("is_packed", [False, True])
def test_forward_launches(calls, d, dv, ctas, is_packed):
    call = call_of(d, dv, is_packed=is_packed)
    out, lse = backend.plan_forward(call)(call.q, call.k, call.v, call.aux)
    assert out.shape == (*call.q.shape[:-1], dv)
    assert out.stride()[1:] == (dv, 4 * dv, 1)
    assert lse.shape == call.q.shape[:-1]
    [(name, addresses, launch)] = calls
    assert name == "forward_kernel"
    assert addresses[:4] == tuple(x.data_ptr() for x in (call.q, call.k, call.v, out))
    assert [x is not None for x in addresses[4:8]] == [d in (80, 192)] * 2 + [d == 80] * 2
    assert addresses[8] == lse.data_ptr()
    assert launch.grid == (ctas, 1)
    assert launch.constants["PERSISTENT"]
    assert launch.constants["BOTTOM_RIGHT"] == is_packed
    rows = 64 if d in (64, 80) else 128
    num_tiles = 4 * (200 // rows + 5 + 1) if is_packed else 8 * -(-200 // rows)
    assert launch.tensors[9].numel() == 1 + num_tiles
    for descriptor in launch.tensors[: 4 if is_packed else 0]:
        heads, columns = descriptor.base.shape[1], descriptor.base.shape[3]
        wrap, *strides = descriptor.strides
        bound = descriptor.shape[3]
        assert descriptor.shape[2:] == [heads, bound, columns]
        assert strides == [heads * columns, columns, heads * columns, 1]
        # Row r of a sequence of 7 rows that begins at 90, as bytes are addressed.
        for row in range(7):
            elements = bound * wrap + 97 * strides[0] + (bound - 7 + row) * strides[2]
            assert (elements * 2) % 2**64 == (90 + row) * strides[0] * 2
        assert all(0 < stride * 2 < 2**40 and stride * 2 % 16 == 0 for stride in descriptor.strides[:-1])


def test_a_launch_computes_256_columns_of_a_wider_output(calls):
    call = call_of(512, 400)
    out, _ = backend.plan_forward(call)(call.q, call.k, call.v, call.aux)
    for (_, addresses, launch), columns in zip(calls, (slice(256), slice(256, 400)), strict=True):
        expected = call.q, call.k, call.v[..., columns], out[..., columns]
        assert addresses[:4] == tuple(x.data_ptr() for x in expected)
        assert [x.shape[-1] for x in launch.tensors[:4]] == [x.shape[-1] for x in expected]


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize(
    ("d", "dv", "tiles_of"),
    [
        (64, 64, (64, 0, 0)),
        (80, 64, (64, 32, 0)),
        (96, 96, (64, 32, 32)),
        (128, 128, (128, 0, 0)),
        (192, 128, (128, 64, 0)),
        (136, 72, (128, 64, 0)),
        (136, 136, (128, 64, 64)),
        (256, 256, (256, 0, 0)),
    ],
)
@pytest.mark.parametrize("num_sms", [2, 1000])
@pytest.mark.parametrize("is_packed", [False, True])
def test_backward_launches(calls, monkeypatch, num_sms, d, dv, tiles_of, with_dlse, is_packed):
    monkeypatch.setattr(launching, "num_sms", lambda device: num_sms)
    call = call_of(d, dv, is_packed=is_packed)
    gradients = run_backward(call, dlse=torch.randn(call.q.shape[:-1]) if with_dlse else None)
    assert [x.stride() for x in gradients[:3]] == [x.stride() for x in (call.q, call.k, call.v)]
    assert gradients[3:] == (None, ())
    (_, prepare, _), (_, main, launch), (_, finish, _) = calls
    assert [name for name, *_ in calls] == ["prepare_kernel", "backward_kernel", "finish_kernel"]
    shares_keys = dv > 128
    turns = None if shares_keys else prepare[7]
    starts = [x.data_ptr() for x in (call.aux.cu_seqlens_q, call.aux.cu_seqlens_k)] if is_packed else [None] * 2
    assert (prepare[3] is not None) == with_dlse
    assert main[:9] == (*[x.data_ptr() for x in (call.q,)], prepare[1], call.k.data_ptr(), call.v.data_ptr(),
                        *prepare[4:6], *[x.data_ptr() for x in gradients[1:3]], prepare[6])  # fmt: skip
    assert main[9] == turns
    assert tuple([launch.constants[name] for name in ("HEAD_DIM", "K_TAIL", "V_TAIL")]) == tiles_of
    assert main[10:13] == ((main[0], main[2], main[6]) if tiles_of[1] else (None,) * 3)
    assert main[13:16] == ((main[1], main[3], main[7]) if tiles_of[2] else (None,) * 3)
    assert main[-6:] == (*starts, None, None, None, None)
    assert finish == (prepare[6], prepare[7], gradients.q.data_ptr(), starts[0])
    keys = 64 if shares_keys else 128
    tiles = 2 * (300 // keys + 5 + 1) if is_packed else 4 * -(-300 // keys)
    row_programs = 4 * (200 // 128 + 5 + 1) * 2 if is_packed else 8 * 256 // 64
    assert [launch.grid[0] for *_, launch in calls] == [row_programs, min(num_sms, tiles), row_programs]
    assert launch.constants["PERSISTENT"] == (num_sms == 2)
    if is_packed:
        assert all(5 in launch.arguments for *_, launch in calls)


@pytest.mark.parametrize("shift", [0, 1])
def test_a_dout_that_tma_cannot_load_is_copied(calls, shift):
    call = call_of()
    dout = torch.ones((), dtype=torch.bfloat16).expand(call.q.shape)
    if shift:
        dout = torch.ones(call.q.numel() + 1, dtype=torch.bfloat16)[1:].view(call.q.shape)
    run_backward(call, dout)
    passed = calls[1][2].tensors[1].base
    assert passed.is_contiguous()
    assert passed.data_ptr() % 16 == 0
    assert torch.equal(passed, dout)


@pytest.mark.parametrize(
    ("batch_heads", "group", "length", "d", "together"),
    [
        (32, 1, 4096, 256, 4),
        (16, 1, 16384, 128, 2),
        (32, 4, 16384, 128, 8),
        (31, 1, 8192, 256, 2),
        (3, 1, 128, 64, 3),
        (6, 1, 1 << 20, 128, 1),
    ],
)
def test_sections_are_of_equal_size_where_they_can_be(batch_heads, group, length, d, together):
    assert launches.heads_per_section(torch.empty(length, d, device="meta"), batch_heads, group) == together


def test_workspaces(monkeypatch):
    """One is kept for each device and stream while it is large enough; a captured graph gets its own."""
    is_capturing, stream, cpu = False, 7, torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    monkeypatch.setattr(backend, "raw_stream", lambda index: stream)
    monkeypatch.setattr(backend, "_workspaces", {})
    monkeypatch.setattr(backend, "_new_kept_workspace", backend._new_workspace)
    first = backend.workspace_for(cpu, 10)
    assert first[0] == 0
    assert backend.workspace_for(cpu, first.numel() - 1) is first
    larger = backend.workspace_for(cpu, first.numel())
    assert larger.numel() > first.numel()
    assert larger[0] == 0
    assert backend.workspace_for(cpu, 10) is larger
    stream = 8
    other = backend.workspace_for(cpu, 10)
    assert other is not larger
    is_capturing = True
    captured = backend.workspace_for(cpu, 10)
    assert captured is not other
    assert captured.numel() == 11
    assert captured[0] == 0


def test_dropout_is_passed_as_a_seed_and_two_numbers(calls, monkeypatch):
    monkeypatch.setattr(Recorder, "__call__", lambda self, addresses, describe, *described: calls.append(
        (addresses, describe(*described))
    ))  # fmt: skip
    seed, options = torch.tensor([5]), Options(0.1, dropout_p=0.75)
    call = dataclasses.replace(call_of(), options=options, aux=Aux(seed=seed))
    backend.plan_forward(call)(call.q, call.k, call.v, call.aux)
    run_backward(call)
    (forward, forward_launch), _, (backward, backward_launch), _ = calls
    assert forward[-2] == backward[-1] == (seed.data_ptr(), 0x20002000, 4.0)
    assert forward_launch.tensors[-2] == backward_launch.tensors[-1] == (seed, 0x20002000, 4.0)
