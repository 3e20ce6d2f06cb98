"""Which backend runs, and what `explain` says about the others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cs336_systems.attention import (
    Attention,
    Implementation,
    attention,
    dispatch,
    explain,
    explain_varlen,
    explain_with_cache,
    use_backends,
)
from cs336_systems.kernels.call import Call
from cs336_systems.testing import Shapes, assert_within_budget, evaluate, make_inputs

from .helpers import DOUBLE, HALF

BY_NAME = {backend.name: backend for backend in dispatch.BACKENDS}
FLASH, SDPA, COMPILED, TILED, NAIVE = Implementation
NEEDS_A_GPU = "it needs tensors on a CUDA GPU (or TRITON_INTERPRET=1 to run on a CPU, slowly); got cpu"


def tensors(q_len=5, k_len=5, d=4, dv=4, dtype=torch.float32, leading=(2,)):
    """Zeros: what is chosen depends on no value."""
    shapes = ((*leading, q_len, d), (*leading, k_len, d), (*leading, k_len, dv))
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]


@pytest.fixture
def ran(no_plans, monkeypatch):
    """The implementations that calls reach from here on, in order. Nothing is computed."""
    names: list[Implementation] = []

    def planner(backend):
        def plan(call):
            def run(q, k, v, aux):
                names.append(backend.implementation)
                out = q.new_zeros(*q.shape[:-1], v.shape[-1])
                return out, q.new_zeros(q.shape[:-1]) if call.return_lse else None

            return run

        return plan

    for backend in dispatch.BACKENDS:
        monkeypatch.setattr(backend, "plan", planner(backend))
    return names


@pytest.fixture
def not_interpreted(monkeypatch):
    """As on a machine where kernels are compiled."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def gpu(monkeypatch, not_interpreted):
    """Calls count as those on a GPU of the compute capability that is set, 8.0 to begin with."""
    made = SimpleNamespace(capability=(8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: made.capability)
    monkeypatch.setattr(Call, "device", property(lambda call: torch.device("cuda", 0)))
    return made


CPU_CALLS = {
    "plain": ({}, {}, SDPA),
    "longer_keys": ({"q_len": 3, "k_len": 7}, {"causal": True}, SDPA),
    "wide_double": ({"dtype": DOUBLE, "d": 300, "dv": 300}, {}, SDPA),
    "log_sum_exp": ({}, {"return_lse": True}, NAIVE),
    "log_sum_exp_in_16_bits": ({"dtype": HALF}, {"return_lse": True}, TILED),
    "many_scores": ({"q_len": 2048, "k_len": 2049}, {"return_lse": True}, TILED),
    "blind_rows": ({"q_len": 7, "k_len": 3}, {"causal": True}, NAIVE),
    "no_blind_rows": ({"q_len": 7, "k_len": 3}, {"causal": "top_left"}, SDPA),
    "no_keys": ({"k_len": 0}, {}, NAIVE),
}


@pytest.mark.parametrize("name", CPU_CALLS)
def test_what_is_explained_is_what_runs(ran, name):
    sizes, settings, choice = CPU_CALLS[name]
    q, k, v = tensors(**sizes)
    explanation = explain(q, k, v, **settings)
    assert (explanation.choice, explanation.backend, explanation.backward) == (choice, choice.value, None)
    assert set(explanation.reasons) == set(BY_NAME) - {choice.value}
    assert ran == []
    of_module = {key: value for key, value in settings.items() if key != "return_lse"}
    for _ in range(2):  # planned, then found again
        attention(q, k, v, **settings)
        Attention(**of_module)(q, k, v, return_lse="return_lse" in settings)
    assert ran == [choice] * 4


@pytest.mark.parametrize("impl", [*Implementation, *(implementation.value for implementation in Implementation)])
def test_the_implementation_asked_for_runs(ran, monkeypatch, impl):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    attention(*tensors(), impl=impl)
    assert ran == [Implementation(impl)]
    assert explain(*tensors(), impl=impl).choice is Implementation(impl)


EMPTY = "torch's kernels disagree on empty inputs"
NO_LSE = "torch's scaled_dot_product_attention does not return the log-sum-exp"
MASKS_ALONE = "torch's kernels are asked for causal masks alone"
NEVER = {
    "wide_keys": ("flash", {"d": 1025}, {}, "its head dimensions go up to 1024; got 1025"),
    "log_sum_exp": ("sdpa", {}, {"return_lse": True}, NO_LSE),
    "softcap": ("sdpa", {}, {"softcap": 1.0}, MASKS_ALONE),
    "window": ("sdpa", {}, {"window": (1, None)}, MASKS_ALONE),
    "sinks": ("sdpa", {}, {"sinks": torch.zeros(1)}, MASKS_ALONE),
    "dropped": ("sdpa", {}, {"dropout_p": 0.5}, MASKS_ALONE),
    "no_keys": ("sdpa", {"k_len": 0}, {}, EMPTY),
    "no_queries": ("sdpa", {"q_len": 0}, {}, EMPTY),
    "no_batch": ("sdpa", {"leading": (0,)}, {}, EMPTY),
    "blind_rows": ("sdpa", {"q_len": 6}, {"causal": True}, "torch's kernels disagree on queries that see no key"),
}


@pytest.mark.parametrize("call", [attention, explain])
@pytest.mark.parametrize("name", NEVER)
def test_the_implementation_asked_for_never_falls_back(ran, call, name):
    impl, sizes, settings, reason = NEVER[name]
    with pytest.raises(ValueError, match=r"^impl=") as raised:
        call(*tensors(**sizes), impl=impl, **settings)
    assert str(raised.value) == f"impl='{impl}' cannot compute this call: {reason}"
    assert ran == []
    backend = "triton" if impl == "flash" else impl
    assert explain(*tensors(**sizes), **settings).reasons[backend] == reason


def test_an_explanation_has_a_line_for_each_backend(not_interpreted):
    lines = str(explain(*tensors(), return_lse=True)).splitlines()
    assert lines == [
        "naive: chosen",
        f"sm90: {NEEDS_A_GPU}",
        f"triton: {NEEDS_A_GPU}",
        f"sdpa: {NO_LSE}",
        "tiled: 'naive' is faster on cpu while its scores take at most 32 MiB",
        "compiled: it takes seconds to compile, and only runs if asked for",
    ]
    reasons = explain(*tensors(dtype=HALF), return_lse=True).reasons
    assert reasons["naive"] == "'tiled' comes before it on cpu"
    reasons = explain(*tensors(), impl="naive").reasons
    assert reasons == dict.fromkeys(("sm90", "triton"), NEEDS_A_GPU) | dict.fromkeys(
        ("sdpa", "tiled", "compiled"), "impl='naive' was asked for"
    )


@pytest.mark.parametrize(
    ("sizes", "choice"), [({}, FLASH), ({"dtype": DOUBLE}, SDPA), ({"d": 1025}, SDPA), ({"k_len": 0}, FLASH)]
)
def test_on_a_gpu_flash_comes_first(gpu, sizes, choice):
    explanation = explain(*tensors(**{"dtype": HALF} | sizes))
    assert explanation.choice is choice
    backend = "triton" if choice is FLASH else "sdpa"
    assert explanation.backend == backend
    assert explanation.backward == (backend if choice is FLASH else None)
    assert explanation.reasons["naive"] == f"'{backend}' comes before it on cuda"


def test_torch_s_kernels_are_not_all_deterministic(gpu):
    reason = explain(*tensors(dtype=DOUBLE), deterministic=True).reasons["sdpa"]
    assert reason == "not all of torch's kernels are deterministic"


def test_without_triton_there_is_no_flash(gpu, monkeypatch):
    monkeypatch.setattr(dispatch, "TRITON_IS_INSTALLED", False)
    explanation = explain(*tensors(dtype=HALF))
    assert explanation.choice is SDPA
    for name in ("sm90", "triton"):
        assert explanation.reasons[name] == "it needs the package triton, which is not installed"


@pytest.mark.parametrize(
    ("value", "expected"), [(None, False), ("0", False), ("false", False), ("1", True), ("True", True), ("on", True)]
)
def test_triton_is_asked_to_interpret_by_its_own_rule(monkeypatch, value, expected):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if value is not None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert dispatch.interpreting() is expected
    triton = pytest.importorskip("triton")
    assert triton.knobs.runtime.interpret is expected


def test_the_backward_may_be_another_backend_s(flash_device, no_plans, monkeypatch):
    """Here sm90 has a forward, which is triton's, and no backward."""
    sm90, triton, forwards = BY_NAME["sm90"], BY_NAME["triton"], []

    def plan_forward(call):
        forwards.append(call)
        return triton.module.plan_forward(call)

    monkeypatch.setattr(sm90, "supports", lambda call: None)
    monkeypatch.setattr(sm90, "supports_backward", lambda call, wanted: "it has no backward for this")
    monkeypatch.setattr(sm90.module, "plan_forward", plan_forward, raising=False)
    inputs = make_inputs(Shapes.of(1, q_len=9, d=16), dtype=HALF, device=flash_device)
    explanation = explain(*inputs[:3], impl="flash")
    assert (explanation.backend, explanation.backward) == ("sm90", "triton")
    assert explanation.reasons["sm90 backward"] == "it has no backward for this"
    assert str(explanation).startswith("sm90: chosen, with the backward of triton\n")
    results = evaluate(lambda q, k, v: attention(q, k, v, impl="flash", return_lse=True), inputs)
    assert_within_budget(results, inputs)
    assert len(forwards) == 1


def test_use_backends_allows_only_the_named_ones(ran):
    with use_backends("tiled", "naive"):
        attention(*tensors(dtype=HALF))
        reasons = explain(*tensors()).reasons
        assert reasons["sdpa"] == reasons["triton"] == "use_backends() allows only tiled, naive"
        with pytest.raises(ValueError, match=r"impl='sdpa' cannot compute this call: use_backends\(\) allows only"):
            attention(*tensors(), impl="sdpa")
        with use_backends("naive"):
            attention(*tensors(dtype=HALF))
        with use_backends("tiled"):
            attention(*tensors())
        attention(*tensors())
    attention(*tensors())
    assert ran == [TILED, NAIVE, TILED, NAIVE, SDPA]
    with pytest.raises(ValueError, match=r"^names must be of sm90, triton, sdpa, tiled, compiled, naive; got 'flash'$"):
        use_backends("flash").__enter__()
    with use_backends("triton"), pytest.raises(ValueError, match=r"^no backend can compute this call: .*tiled: use_"):
        attention(*tensors(dtype=DOUBLE))
    assert explain(*tensors()).choice is SDPA


def test_what_is_chosen_for_packed_sequences():
    q, starts = torch.zeros(5, 2, 16), torch.tensor([0, 2, 5])
    explanation = explain_varlen(q, q, q, starts, causal=True)
    assert explanation.choice is SDPA
    explanation = explain_varlen(q, q, q, starts, window=(1, 0))
    assert explanation.choice is TILED
    assert explanation.reasons["sdpa"] == MASKS_ALONE
    assert explain_varlen(q, q, q, starts, impl="naive").choice is NAIVE


def test_what_is_chosen_for_a_cache(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    q, k, lengths = torch.zeros(1, 2, 1, 16), torch.zeros(1, 1, 16, 16), torch.tensor([9])
    assert explain_with_cache(q, k, k, lengths).choice is SDPA
    assert explain_with_cache(q, k, k, lengths, window=(3, None)).choice is SDPA
    two = torch.zeros(1, 2, 2, 16)
    assert explain_with_cache(two, k, k, lengths, window=(3, None)).choice is NAIVE
    explanation = explain_with_cache(q, k, k, lengths, softcap=2.0)
    assert explanation.choice is NAIVE
    assert explanation.reasons["tiled"] == "it takes no KV cache lengths that the device alone knows"
    assert explain_with_cache(q, k, k, lengths, impl="flash").choice is FLASH


def test_tensors_without_data_are_as_those_of_the_cpu():
    q, k, v = (x.to("meta") for x in tensors(dv=3))
    assert explain(q, k, v).choice is SDPA
    out, lse = attention(q, k, v, impl="naive", return_lse=True)
    assert (out.shape, lse.shape, out.device.type) == ((2, 5, 3), (2, 5), "meta")
