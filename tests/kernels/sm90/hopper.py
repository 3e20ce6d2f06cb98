"""What the tests of the kernels for Hopper share: calls of the backend, on a GPU and without one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from cs336_systems.attention.call import Arguments, make_call
from cs336_systems.kernels.call import NO_AUX, Aux, Call, Options
from cs336_systems.kernels.language import interpreting
from cs336_systems.kernels.sm90 import backend
from cs336_systems.kernels.versions import why_not_gluon
from cs336_systems.testing import assert_within_budget, make_inputs, starts_of
from cs336_systems.testing.evaluation import leaves_of

from .emulator import emulated

on_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or why_not_gluon() is not None,
        reason="needs a Hopper GPU and a version of Triton that the kernels are written for",
    ),
]

KERNELS = ["emulated", pytest.param("hopper", marks=on_hopper)]
"""Which kernels a test of both is for."""

not_interpreted = pytest.mark.skipif(not interpreting(), reason="compiled portable kernels take no CPU tensors")
WITH_PORTABLE = [pytest.param("emulated", marks=not_interpreted), KERNELS[1]]
"""The same for tests that run portable kernels too."""


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> tuple[Any, str]:
    """A backend by the name of `KERNELS`, and the device of its tensors."""
    return (emulated().backend, "cpu") if request.param == "emulated" else (backend, "cuda")


BANDS = {
    "none": {},
    "causal": {"causal": "bottom_right"},
    "top_left": {"causal": "top_left"},
    "window": {"causal": "bottom_right", "window": (100, None)},
    "window_alone": {"window": (100, None)},
    "around": {"window": (30, 20)},
}


def options_of(d, *, causal=False, window=(None, None), softcap=None, deterministic=False):
    """Options with the default scale, from `attention`'s arguments."""
    left, right = window
    right = 0 if causal else right
    return Options(d**-0.5, left, right, causal != "top_left", softcap, deterministic=deterministic)


def oracle_settings(*, causal=False, window=(None, None), softcap=None):
    """The same arguments for the oracle."""
    features = {"window": None if window == (None, None) else window, "softcap": softcap}
    return {"causal": causal, "features": {name: value for name, value in features.items() if value is not None}}


NOTHING: Mapping[str, torch.Tensor] = {}


def compute(inputs, options, aux=NO_AUX, *, calls=None, backend=backend, captured=NOTHING):
    """Values and gradients of the last of several calls of one plan.

    calls: by default two on a GPU, where the first compiles and the second launches what it kept.
    captured: what score rules captured, by the names of its gradients.
    """
    calls = calls or (2 if inputs.q.is_cuda else 1)
    q, k, v, dout, dlse = inputs
    call = Call(q, k, v, options, aux)
    wanted = call.wanted
    assert sum(wanted.score_aux) == len(captured)
    assert backend.unsupported_call(call) is None
    assert backend.unsupported_backward(call) is None
    forward = backend.plan_forward(call)
    for _ in range(calls):
        out, lse = forward(q, k, v, aux)
    backward = backend.plan_backward(call, out, dout, True, wanted)
    for _ in range(calls):
        gradients = backward(q, k, v, out, lse, dout, dlse, aux)
    found = {"out": out, "lse": lse, "dq": gradients.q, "dk": gradients.k, "dv": gradients.v}
    more = (x for x in gradients.score_aux if x is not None)
    found |= {name: next(more).detach().view_as(tensor) for name, tensor in captured.items()}
    return found if gradients.sinks is None else found | {"dsinks": gradients.sinks.detach()}


def check_features(kernels, case, *, dtype=torch.bfloat16, learned=False):
    """Hold a case, (shapes, settings, features of a device), to the budget; return its call.

    learned: whether score changes captured what needs gradients.
    """
    backend, device = kernels
    shapes, settings, features = case
    inputs, given = make_inputs(shapes, dtype=dtype, device=device), features(device)
    call = make_call(*inputs[:3], Arguments.of(**settings, **given))
    captured = leaves_of({name: x for name, x in given.items() if name != "sinks"})[1] if learned else NOTHING
    actual = compute(inputs, call.options, call.aux, backend=backend, captured=captured)
    assert_within_budget(actual, inputs, **settings, features=given)
    return call


def heads_first(inputs):
    """Packed inputs with rows before heads as a call takes them: (1, heads, rows, d)."""
    q, k, v, dout = (x.transpose(0, 1)[None] for x in inputs[:4])
    return inputs._replace(q=q, k=k, v=v, dout=dout, dlse=inputs.dlse[None])


def rows_first(computed):
    """Values and gradients of packed inputs with rows before heads; lse (heads, rows)."""
    of_rows = {name: computed[name][0].transpose(0, 1) for name in ("out", "dq", "dk", "dv")}
    return computed | of_rows | {"lse": computed["lse"][0]}


def packed_aux(lengths, device, integers=torch.int32):
    """Where sequences of (q_len, k_len) begin."""
    q_starts, k_starts = (starts_of(column, device).to(integers) for column in zip(*lengths, strict=True))
    return Aux(cu_seqlens_q=q_starts, cu_seqlens_k=k_starts)
