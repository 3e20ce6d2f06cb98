"""The backend for Hopper without one: which calls it takes, and what its plans pass to the kernels."""

from __future__ import annotations

import pytest
import torch
import triton

from cs336_systems.kernels.call import NO_AUX, Aux, Call, Options, Wanted
from cs336_systems.kernels.sm90 import backend
from cs336_systems.kernels.sm90.tiles import split_head_dim

OPTIONS = Options(0.1)
CAUSAL = Options(0.1, window_right=0)
STARTS = torch.zeros(6, dtype=torch.int32)
PACKED = Aux(cu_seqlens_q=STARTS, cu_seqlens_k=STARTS.clone())


def tensors(*shape, dtype=torch.bfloat16):
    """q, k and v without memory."""
    return [torch.empty(shape or (2, 4, 100, 64), dtype=dtype, device="meta") for _ in range(3)]


ALONE = torch.empty_strided((1, 1, 100, 64), (3, 5, 64, 1), dtype=torch.bfloat16, device="meta")
"""Strides of axes of one entry do not matter."""


@pytest.mark.parametrize(
    ("qkv", "options", "aux"),
    [
        *[(tensors(4, 100, d), OPTIONS, NO_AUX) for d in (24, 64, 80, 128, 256)],
        *[(tensors(2, 4, 100, d), Options(0.1, 5, 0), NO_AUX) for d in (40, 64, 80, 128, 256)],
        (tensors(4, 100, 64), Options(0.1, None, 0, False), NO_AUX),
        (tensors(2, 4, 100, 80), Options(0.1, softcap=5.0), NO_AUX),
        (tensors(2, 4, 100, 80), Options(0.1, dropout_p=0.5), Aux(seed=torch.zeros(1, dtype=torch.int64))),
        *[(tensors(*leading, 100, 64), Options(0.1, 5, 0), PACKED) for leading in ((4,), (1, 4))],
        ([ALONE] * 3, OPTIONS, NO_AUX),
    ],
)
def test_supported_calls(qkv, options, aux):
    assert backend.unsupported_call(Call(*qkv, options, aux)) is None


@pytest.mark.parametrize(
    ("qkv", "options", "aux", "reason"),
    [
        (tensors(dtype=torch.float32), OPTIONS, NO_AUX, "needs float16 or bfloat16; got torch.float32"),
        (tensors(2, 4, 9, 16), OPTIONS, NO_AUX, "or 264 to 512 and fewer; got 16 of q and 16 of v"),
        (tensors(2, 4, 9, 44), OPTIONS, NO_AUX, "got 44 of q"),
        (tensors(2, 4, 9, 520), OPTIONS, NO_AUX, "got 520 of q"),
        (tensors(), Options(0.0), NO_AUX, "needs a positive scale; got 0.0"),
        (tensors(), Options(-1.0), NO_AUX, "got -1.0"),
        (tensors(), OPTIONS, Aux(cache_lengths=STARTS), "computes no cache_lengths"),
        (tensors(), OPTIONS, PACKED, "needs packed sequences in a batch of 1; got 2"),
        (tensors(4, 1 << 30, 64), OPTIONS, PACKED, f"at most {1 << 29} packed rows"),
        (tensors(2, 2, 2, 9, 64), OPTIONS, NO_AUX, "at most one batch axis before the heads; got 2"),
        (tensors(2, 4, 0, 64), OPTIONS, NO_AUX, "needs tensors that are not empty"),
        ([x.expand(3, -1, -1, -1) for x in tensors(1, 4, 9, 64)], OPTIONS, NO_AUX, "strides of q"),
        ([x[..., :64] for x in tensors(1, 4, 9, 68)], OPTIONS, NO_AUX, "multiples of 16 bytes"),
        ([x.mT for x in tensors(1, 4, 64, 64)], OPTIONS, NO_AUX, "q with contiguous rows; its last stride is 64"),
        ([torch.zeros(9 * 64 + 1).half()[1:].view(1, 9, 64)] * 3, OPTIONS, NO_AUX, "begin at multiples of 16 bytes"),
    ],
)
def test_unsupported_calls(qkv, options, aux, reason):
    assert reason in backend.unsupported_call(Call(*qkv, options, aux))


@pytest.mark.parametrize(
    ("dims", "split"),
    [
        ((64, 64), (64, 0, 0)),
        ((72, 72), (64, 16, 16)),
        ((80, 64), (64, 16, 0)),
        ((96, 96), (64, 32, 32)),
        ((104, 104), (128, 0, 0)),
        ((192, 192), (128, 64, 64)),
        ((192, 128), (128, 64, 0)),
        ((200, 200), (256, 0, 0)),
        ((264, 264), (256, 256, 0)),
        ((512, 512), (256, 256, 0)),
        ((320, 64), (256, 256, 0)),
        ((64, 128), None),
        ((192, 64), None),
        ((256, 264), None),
        ((520, 512), None),
    ],
)
def test_split_head_dims(dims, split):
    assert split_head_dim(*dims) == split


def test_the_backward_supports_fewer_deterministic_calls(monkeypatch):
    monkeypatch.setattr(backend, "unsupported_device", lambda device: None)
    deterministic = Options(0.1, deterministic=True)
    assert backend.supports_backward(Call(*tensors(2, 9, 136), OPTIONS), Wanted()) is None
    assert backend.supports_backward(Call(*tensors(2, 9, 128), deterministic), Wanted()) is None
    assert "above 128 in no fixed order" in backend.supports_backward(
        Call(*tensors(2, 9, 136), deterministic), Wanted()
    )
    for dims in ((264, 264), (512, 64), (512, 512)):
        q, k, _ = tensors(2, 9, dims[0])
        assert backend.supports_backward(Call(q, k, tensors(2, 9, dims[1])[2], OPTIONS), Wanted()) is None
    q, k, _ = tensors(2, 9, 192)
    assert backend.supports_backward(Call(q, k, tensors(2, 9, 128)[2], deterministic), Wanted()) is None
    assert "packed sequences" in backend.supports_backward(Call(*tensors(2, 9, 64), deterministic, PACKED), Wanted())


def test_devices_and_versions(monkeypatch):
    assert "compute capability 9.0; got meta" in backend.supports(Call(*tensors(), OPTIONS))
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    on_gpu = torch.device("cuda:0")
    assert backend.unsupported_device(on_gpu) is None
    monkeypatch.setattr(triton, "__version__", "4.0.0")
    with pytest.warns(UserWarning, match="4.0.0"):
        assert "got 4.0.0" in backend.unsupported_device(on_gpu)
    capability = (10, 0)
    assert "9.0; got cuda:0" in backend.unsupported_device(on_gpu)
