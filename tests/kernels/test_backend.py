"""Which calls the Triton backend computes, and the reasons that it gives."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.kernels.call import MAX_LENGTH, Aux, Call, Options, Wanted
from cs336_systems.kernels.triton import backend


def made(q=(2, 4, 8, 16), k=(2, 2, 8, 16), v=None, dtype=torch.float16, aux=None, device="meta", **options):
    q, k, v = (torch.empty(shape, dtype=dtype, device=device) for shape in (q, k, v or k))
    return Call(q, k, v, Options(1.0, **options), aux or Aux())


@pytest.fixture
def on(monkeypatch):
    """A call on a device with a compute capability, or in the interpreter."""

    def change(call, device="cpu", capability=(9, 0)):
        monkeypatch.setenv("TRITON_INTERPRET", "1" if device == "cpu" else "0")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(Call, "device", torch.device(device))
        return call

    return change


def test_calls_that_are_computed(on):
    for call in (
        made(),
        made(window_left=3, window_right=0, softcap=2.0, dropout_p=0.5),
        made(dtype=torch.float32, dropout_p=1.0),
    ):
        for device in ("cpu", "cuda"):
            assert backend.supports(on(call, device)) is None
            assert backend.supports_backward(call, Wanted()) is None


REASONS = {
    "dtype": (made(dtype=torch.float64), "cpu", "it computes in float16, bfloat16 and float32; got float64"),
    "rows": (
        made(q=(1, MAX_LENGTH + 1, 16), k=(1, 5, 16)),
        "cuda",
        f"it counts rows in 32 bits, up to {MAX_LENGTH}; got {MAX_LENGTH + 1} of q and 5 of k",
    ),
    "head_dim": (made(v=(2, 2, 8, 1025)), "cuda", "its head dimensions go up to 1024; got 1025"),
    "dropout": (
        made(dtype=torch.float32, dropout_p=0.99995),
        "cuda",
        "in float32 its dropout_p goes up to 0.9999, or is 1; got 0.99995",
    ),
    "interpreter": (made(dtype=torch.bfloat16), "cpu", "Triton's interpreter computes wrong bfloat16 products"),
    "device": (
        made(),
        "meta",
        "it needs tensors on a CUDA GPU (or TRITON_INTERPRET=1 to run on a CPU, slowly); got meta",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_reasons(on, name):
    call, device, reason = REASONS[name]
    assert backend.supports(on(call, device)) == reason
    assert backend.supports_backward(call, Wanted()) == reason


def test_gpus_that_are_too_old_or_interpreted(on, monkeypatch):
    expected = "it needs a GPU of compute capability 8.0 or newer; cuda has 7.5"
    assert backend.supports(on(made(), "cuda", (7, 5))) == expected
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend.supports(made()) == "TRITON_INTERPRET is set, so its kernels run on CPU tensors alone; got cuda"


DECODING = {"window_right": 0, "window_left": 5, "softcap": 3.0}


@pytest.mark.parametrize(
    ("options", "aux", "given"),
    [
        ({"dropout_p": 0.1}, {"seed": torch.zeros(1, dtype=torch.int64)}, "dropout"),
        ({}, {"sinks": torch.zeros(4)}, "sinks"),
        ({"scores": (("alibi", (None,)),), "mask": ("document", ())}, {}, "score rules, a mask"),
        ({"window_right": 1}, {}, "keys after a query's own"),
        ({"window_right": None}, {}, "keys after a query's own"),
    ],
)
def test_decoding_takes_a_window_and_a_softcap_alone(on, options, aux, given):
    lengths = torch.zeros(2, dtype=torch.int64)
    assert backend.supports(on(made(aux=Aux(cache_lengths=lengths), **DECODING))) is None
    call = on(made(aux=Aux(cache_lengths=lengths, **aux), **DECODING | options))
    assert backend.supports(call) == f"its decoding kernels take a window and a softcap alone; got {given}"
    assert backend.supports_backward(call, Wanted()) == "decoding has no backward"
