"""Which implementation runs, and what is said about the others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cs336_systems.attention import Attention, Explanation, Implementation, api, attention, choose, explain
from cs336_systems.attention.validation import check

FLASH, SDPA, COMPILED, TILED, NAIVE = (Implementation(name) for name in ("flash", "sdpa", "compiled", "tiled", "naive"))


def tensors(q_len=5, k_len=5, d=4, dv=4, dtype=torch.float32, leading=(2,)):
    """Zeros: what is chosen depends on no value."""
    shapes = ((*leading, q_len, d), (*leading, k_len, d), (*leading, k_len, dv))
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]


@pytest.fixture
def ran(monkeypatch):
    """The implementations that calls reach from here on, in order; nothing is computed, and nothing remembered."""
    names: list[Implementation] = []

    def record(implementation):
        def run(q, k, v, spec, return_lse, extras):
            names.append(implementation)
            return q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_zeros(q.shape[:-1]) if return_lse else None

        return run

    for implementation in Implementation:
        monkeypatch.setitem(api.RUN, implementation, record(implementation))
    monkeypatch.setattr(api, "_remembered", {})
    return names


@pytest.fixture
def compiled_kernels(monkeypatch):
    """As on a machine where kernels are not interpreted."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


CPU_CALLS = [
    pytest.param({}, {}, SDPA, id="plain"),
    pytest.param({"q_len": 3, "k_len": 7}, {"causal": True}, SDPA, id="longer_keys"),
    pytest.param({"dtype": torch.float64, "d": 300, "dv": 300}, {}, SDPA, id="wide_double"),
    pytest.param({}, {"return_lse": True}, TILED, id="log_sum_exp"),
    pytest.param({"q_len": 7, "k_len": 3}, {"causal": True}, TILED, id="blind_rows"),
    pytest.param({"q_len": 7, "k_len": 3}, {"causal": "top_left"}, SDPA, id="no_blind_rows"),
    pytest.param({"k_len": 0}, {}, TILED, id="no_keys"),
    pytest.param({"q_len": 0}, {}, TILED, id="no_queries"),
    pytest.param({"leading": (0, 3)}, {}, TILED, id="no_batch"),
]


@pytest.mark.parametrize(("sizes", "settings", "choice"), CPU_CALLS)
def test_what_is_explained_is_what_runs(ran, sizes, settings, choice):
    q, k, v = tensors(**sizes)
    explanation = explain(q, k, v, **settings)
    assert explanation.choice is choice
    assert set(explanation.passed_over) == set(Implementation) - {choice}
    for _ in range(2):  # chosen, then remembered
        attention(q, k, v, **settings)
        Attention(causal=settings.get("causal", False))(q, k, v, return_lse=settings.get("return_lse", False))
    assert ran == [choice] * 4


@pytest.mark.parametrize("impl", [*Implementation, *(implementation.value for implementation in Implementation)])
def test_the_implementation_asked_for_runs(ran, monkeypatch, impl):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    attention(*tensors(), impl=impl)
    assert ran == [Implementation(impl)]
    assert explain(*tensors(), impl=impl).choice is Implementation(impl)


NEVER = [
    pytest.param(
        "flash", {"dtype": torch.float64}, {}, "it computes in float16, bfloat16 and float32; got float64", id="double"
    ),
    pytest.param("flash", {"d": 1025}, {}, "its head dimensions go up to 1024; got 1025", id="wide_keys"),
    pytest.param(
        "flash",
        {"d": 16},
        {"dropout_p": 0.99995, "seed": 0},
        "in float32 its dropout_p goes up to 0.9999, or is 1; got 0.99995",
        id="dropout",
    ),
    pytest.param("flash", {"dv": 1300}, {}, "its head dimensions go up to 1024; got 1300", id="wide_values"),
    pytest.param(
        "sdpa",
        {},
        {"return_lse": True},
        "torch's scaled_dot_product_attention does not return the log-sum-exp",
        id="log_sum_exp",
    ),
    pytest.param("sdpa", {"k_len": 0}, {}, "torch's kernels disagree on empty inputs", id="no_keys"),
    pytest.param("sdpa", {"q_len": 0}, {}, "torch's kernels disagree on empty inputs", id="no_queries"),
    pytest.param("sdpa", {"leading": (0,)}, {}, "torch's kernels disagree on empty inputs", id="no_batch"),
    pytest.param(
        "sdpa",
        {"q_len": 6},
        {"causal": True},
        "torch's kernels disagree on queries that see no key",
        id="blind_rows",
    ),
]


@pytest.mark.parametrize("call", [attention, explain])
@pytest.mark.parametrize(("impl", "sizes", "settings", "reason"), NEVER)
def test_the_implementation_asked_for_never_falls_back(ran, call, impl, sizes, settings, reason):
    with pytest.raises(ValueError, match=r"^impl=") as raised:
        call(*tensors(**sizes), impl=impl, **settings)
    assert str(raised.value) == f"impl='{impl}' cannot compute this call: {reason}"
    assert ran == []
    assert explain(*tensors(**sizes), **settings).passed_over[Implementation(impl)] == reason


def test_reasons_of_those_that_could(compiled_kernels):
    needs_a_gpu = "it needs tensors on a CUDA GPU (or TRITON_INTERPRET=1 to run on a CPU, slowly); got cpu"
    later = "'sdpa' comes before it on cpu"
    assert explain(*tensors()) == Explanation(SDPA, {FLASH: needs_a_gpu, COMPILED: later, TILED: later, NAIVE: later})
    asked = "'naive' was asked for"
    assert explain(*tensors(), impl="naive") == Explanation(
        NAIVE, {FLASH: needs_a_gpu, SDPA: asked, COMPILED: asked, TILED: asked}
    )


def test_an_explanation_prints_one_line_each(compiled_kernels):
    lines = str(explain(*tensors(), return_lse=True)).splitlines()
    assert lines == [
        "tiled: chosen",
        "flash: it needs tensors on a CUDA GPU (or TRITON_INTERPRET=1 to run on a CPU, slowly); got cpu",
        "sdpa: torch's scaled_dot_product_attention does not return the log-sum-exp",
        "compiled: 'tiled' comes before it on cpu",
        "naive: 'tiled' comes before it on cpu",
    ]


def test_explaining_computes_nothing(ran):
    explain(*tensors())
    assert ran == []


def on_gpu(monkeypatch, capability=(9, 0), **changes):
    """A call with tensors on a GPU of this compute capability, which need not be there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    return replace(check(*tensors(dtype=torch.float16), False, None, False), device=torch.device("cuda", 0), **changes)


@pytest.mark.parametrize(
    ("changes", "choice"),
    [({}, FLASH), ({"dtype": torch.float64}, SDPA), ({"head_dim": 1025}, SDPA), ({"k_len": 0}, FLASH)],
)
def test_on_a_gpu_flash_comes_first(monkeypatch, compiled_kernels, changes, choice):
    explanation = choose.explain(on_gpu(monkeypatch, **changes))
    assert explanation.choice is choice
    assert explanation.passed_over[NAIVE] == f"'{choice.value}' comes before it on cuda"


def test_an_old_gpu_has_no_flash(monkeypatch, compiled_kernels):
    explanation = choose.explain(on_gpu(monkeypatch, capability=(7, 5)))
    assert explanation.choice is SDPA
    assert explanation.passed_over[FLASH] == "it needs a GPU of compute capability 8.0 or newer; cuda:0 has 7.5"


def test_interpreted_kernels_take_no_gpu_tensors(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    reason = choose.explain(on_gpu(monkeypatch)).passed_over[FLASH]
    assert reason == "TRITON_INTERPRET is set, so its kernels run on CPU tensors alone; got cuda"


def test_interpreted_kernels_take_no_bfloat16(monkeypatch):
    """The interpreter multiplies bit patterns: if its products become right, the refusal can go, and tests can run."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert explain(*tensors()).passed_over[FLASH] == "'sdpa' comes before it on cpu"
    reason = explain(*tensors(dtype=torch.bfloat16)).passed_over[FLASH]
    assert reason == "Triton's interpreter computes wrong bfloat16 products"


def test_without_triton_there_is_no_flash(monkeypatch, compiled_kernels):
    monkeypatch.setattr(choose, "TRITON_IS_INSTALLED", False)
    explanation = choose.explain(on_gpu(monkeypatch))
    assert explanation.choice is SDPA
    assert explanation.passed_over[FLASH] == "it needs the package triton, which is not installed"


@pytest.mark.parametrize(
    ("value", "expected"), [(None, False), ("0", False), ("false", False), ("1", True), ("True", True), ("on", True)]
)
def test_triton_is_asked_to_interpret_by_its_own_rule(monkeypatch, value, expected):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if value is not None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert choose.interpreting() is expected
    triton = pytest.importorskip("triton")
    assert triton.knobs.runtime.interpret is expected


def test_tensors_without_data_are_as_those_of_the_cpu():
    q, k, v = (x.to("meta") for x in tensors(dv=3))
    assert explain(q, k, v).choice is SDPA
    out, lse = attention(q, k, v, impl="naive", return_lse=True)
    assert (out.shape, lse.shape, out.device.type) == ((2, 5, 3), (2, 5), "meta")


def test_calls_that_differ_in_one_setting_are_remembered_apart(monkeypatch):
    monkeypatch.setattr(api, "_remembered", {})
    q, k, v = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    changes = [
        {},
        {"causal": True},
        {"causal": "top_left"},
        {"scale": 0.1},
        {"scale": -0.1},
        {"impl": "naive"},
        {"impl": "tiled", "scale": 0.2},
        {"dtype": torch.float32},
        {"k_len": 3, "causal": True},
        {"dv": 2},
    ]
    fresh = []
    for change in changes:
        api._remembered.clear()
        fresh.append(call_with(q, k, v, **change))
    api._remembered.clear()
    for _ in range(2):
        for change, expected in zip(changes, fresh, strict=True):
            assert torch.equal(call_with(q, k, v, **change), expected), change
    assert len(api._remembered) == len(changes)


def call_with(q, k, v, *, dtype=torch.float64, k_len=4, dv=4, **settings):
    """`attention` of a part of these tensors, in a dtype."""
    return attention(q.to(dtype), k[:, :k_len].to(dtype), v[:, :k_len, :dv].to(dtype), **settings)


def test_no_more_calls_are_remembered_than_allowed(monkeypatch):
    monkeypatch.setattr(api, "_remembered", {})
    monkeypatch.setattr(api, "MOST_REMEMBERED", 3)
    for length in range(1, 12):
        q = torch.randn(1, length, 4)
        torch.testing.assert_close(attention(q, q, q), attention(q, q, q, impl="naive"))
        assert len(api._remembered) <= 3
