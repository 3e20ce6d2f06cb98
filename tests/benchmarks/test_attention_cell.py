"""One cell of the attention benchmark, with providers that do as they are told."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from benchmarks import attention_cell
from benchmarks.attention_cell import CellResult, CellRun, CellSettings
from benchmarks.attention_guards import SeriesHistory
from benchmarks.attention_presets import Problem
from benchmarks.attention_provider import Provider
from cs336_systems.profiling.flops import PASSES
from cs336_systems.profiling.sweep import Status
from cs336_systems.profiling.timing import TimingMethod

CPU = torch.device("cpu")
PROBLEM = Problem("float32", "causal", batch=2, heads=4, kv_heads=4, length=32, head_dim=8)
SETTINGS = CellSettings(
    device=CPU,
    passes=PASSES,
    method=TimingMethod(rounds=3, warmup_ms=0, repetitions_ms=0, pause_ms=0),
    max_seconds=5.0,
    seed=0,
)


def right(problem: Problem):
    """Binds to attention as it should be."""
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=problem.causal)


def failing(error: Callable[[], BaseException], when: Callable[[torch.Tensor], bool] = lambda q: True):
    """Binds to a function that raises when it is called so."""

    def bind(problem: Problem):
        def attend(q, k, v):
            if when(q):
                raise error()
            return right(problem)(q, k, v)

        return attend

    return bind


def provider(name: str, bind=right, **fields) -> Provider:
    return Provider(name=name, group="peers", bind=bind, **fields)


def measured(
    *providers: Provider, problem: Problem = PROBLEM, settings: CellSettings = SETTINGS, rows=()
) -> CellResult:
    return CellRun(problem, settings, SeriesHistory(rows), lambda name, step: None).measure(providers)


def statuses(result: CellResult, name: str) -> list[str]:
    return [result.measurements[name, which].outcome.status.value for which in SETTINGS.passes]


def test_every_pass_of_every_provider_is_measured():
    result = measured(provider("naive"), provider("other"))
    assert set(result.measurements) == {(name, which) for name in ("naive", "other") for which in PASSES}
    for measurement in result.measurements.values():
        assert measurement.outcome.status is Status.OK
        assert measurement.times is not None
        assert len(measurement.times.milliseconds) == 3
        assert measurement.times.minimum > 0
        assert measurement.probe_ms is not None
    assert result.differences == dict.fromkeys(result.measurements, (0.0, "naive"))
    memory = result.measurements["other", "backward"].memory
    assert memory is not None
    assert memory.held_bytes is not None
    assert memory.held_bytes >= 2 * 4 * 32 * 8 * 4  # the output at least
    assert result.measurements["other", "both"].memory is memory


@pytest.mark.parametrize("layout", ["as given", "heads first", "length first"])
@pytest.mark.parametrize("heads", [0, 1, 4])
def test_layouts_hold_the_same_values(layout, heads):
    problem = dataclasses.replace(PROBLEM, heads=heads, kv_heads=heads)
    shapes = []

    def bind(problem: Problem):
        def attend(q, k, v):
            shapes.append(tuple(q.shape))
            assert q.is_contiguous()
            if layout != "length first":
                return right(problem)(q, k, v)
            return right(problem)(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

        return attend

    result = measured(provider("naive"), provider("other", bind, layout=layout), problem=problem)
    assert statuses(result, "other") == ["ok"] * 3
    assert result.differences["other", "forward"].value == pytest.approx(0, abs=1e-6)
    assert result.differences["other", "backward"].value == pytest.approx(0, abs=1e-6)
    count = max(1, heads)
    expected = {"as given": (2, 32, 8) if heads == 0 else (2, count, 32, 8), "heads first": (2, count, 32, 8)}
    assert set(shapes) == {expected.get(layout, (2, 32, count, 8))}


def test_a_provider_that_is_wrong_shows():
    def bind(problem: Problem):
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=not problem.causal)

    result = measured(provider("naive"), provider("unmasked", bind))
    for which in PASSES:
        assert result.differences["unmasked", which].value > 0.1


def test_wrong_gradients_show():
    def bind(problem: Problem):
        return lambda q, k, v: right(problem)(q, k.detach() + 0 * k, v)

    result = measured(provider("naive"), provider("forgetful", bind))
    assert result.differences["forgetful", "forward"].value == 0
    assert result.differences["forgetful", "backward"].value == pytest.approx(1.0)
    assert result.differences["forgetful", "both"] == result.differences["forgetful", "backward"]


def test_the_first_that_can_is_what_others_are_compared_with():
    oom = failing(lambda: torch.OutOfMemoryError("CUDA out of memory"))
    result = measured(provider("naive", oom), provider("second"), provider("third"))
    assert {difference.provider for difference in result.differences.values()} == {"second"}
    assert {name for name, _ in result.differences} == {"second", "third"}


def test_running_out_of_memory_is_a_status_and_the_others_go_on():
    oom = failing(lambda: torch.OutOfMemoryError("CUDA out of memory"))
    result = measured(provider("naive"), provider("big", oom), provider("last"))
    assert statuses(result, "big") == ["oom"] * 3
    assert statuses(result, "naive") == statuses(result, "last") == ["ok"] * 3
    assert result.measurements["big", "forward"].outcome.reason == "CUDA out of memory"


def test_a_forward_may_fit_where_training_does_not():
    oom = failing(lambda: torch.OutOfMemoryError("no"), when=lambda q: torch.is_grad_enabled())
    assert statuses(measured(provider("big", oom)), "big") == ["ok", "oom", "oom"]


def test_a_failure_in_the_rounds_drops_that_pass():
    calls = {"n": 0}

    def counted(q: torch.Tensor) -> bool:
        # Three calls come before the rounds, and each round makes two: the sixth is in the second round.
        calls["n"] += not torch.is_grad_enabled()
        return not torch.is_grad_enabled() and calls["n"] >= 6

    result = measured(provider("tired", failing(lambda: RuntimeError("tired"), when=counted)))
    assert statuses(result, "tired") == ["error", "ok", "ok"]
    assert result.measurements["tired", "forward"].times is None
    assert result.measurements["tired", "forward"].outcome.reason == "RuntimeError: tired"


def test_a_refusal_by_exception_is_unsupported():
    refuses = failing(lambda: ValueError("impl 'flash' must have CUDA tensors; got cpu"))
    result = measured(provider("flash", refuses, refusals=(ValueError,)), provider("peer", refuses))
    assert statuses(result, "flash") == ["unsupported"] * 3
    assert statuses(result, "peer") == ["error"] * 3


def test_a_refusal_by_phrase_gives_the_warnings_as_its_reason():
    def bind(problem: Problem):
        def attend(q, k, v):
            warnings.warn("Flash attention kernel not used because: (Triggered internally at a.cpp:1.)", stacklevel=1)
            warnings.warn("Expected query to be of dtype half. (Triggered internally at a.cpp:2.)", stacklevel=1)
            warnings.warn("CuDNN attention has been runtime disabled. (Triggered internally at b.cpp:3.)", stacklevel=1)
            raise RuntimeError("No available kernel. Aborting execution.")

        return attend

    result = measured(provider("torch-flash", bind, refusal_phrases=("No available kernel",), warns_why=True))
    outcome = result.measurements["torch-flash", "both"].outcome
    assert outcome.status is Status.UNSUPPORTED
    assert outcome.reason == "Expected query to be of dtype half."


def test_a_refusal_by_phrase_without_warnings_gives_the_message():
    refuses = failing(lambda: RuntimeError("No available kernel. Aborting execution.\nmore"))
    result = measured(provider("torch-flash", refuses, refusal_phrases=("No available kernel",)))
    assert result.measurements["torch-flash", "forward"].outcome.reason == "No available kernel. Aborting execution."


def test_a_refusal_by_phrase_in_any_exception():
    """FlashAttention-4 asserts what it can do, and warns of things that have nothing to do with it."""

    def bind(problem: Problem):
        def attend(q, k, v):
            warnings.warn("Argument aux_data cannot be converted", stacklevel=1)
            raise AssertionError("(head_dim, head_dim_v)=(20, 20) is not supported on SM90.")

        return attend

    result = measured(provider("fa4", bind, refusal_phrases=("not supported",)), provider("other", bind))
    outcome = result.measurements["fa4", "backward"].outcome
    assert (outcome.status, outcome.reason) == (
        Status.UNSUPPORTED,
        "(head_dim, head_dim_v)=(20, 20) is not supported on SM90.",
    )
    assert statuses(result, "other") == ["error"] * 3


def test_a_provider_that_would_end_the_process_is_not_called():
    called: list[str] = []
    fatal = provider("fatal", failing(KeyboardInterrupt, lambda q: bool(called.append("fatal")) or True))
    reasons = {"fatal": "2 processes ended while it ran here"}
    run = CellRun(PROBLEM, SETTINGS, SeriesHistory([]), lambda name, step: None, reasons.get)
    result = run.measure([provider("naive"), fatal])
    assert called == []
    assert statuses(result, "fatal") == ["error"] * 3
    assert result.measurements["fatal", "forward"].outcome.reason == reasons["fatal"]
    assert statuses(result, "naive") == ["ok"] * 3


def test_a_refusal_in_advance_is_for_its_pass_alone():
    def refusal(problem, which):
        return None if which == "forward" else "has the forward pass alone"

    result = measured(provider("fa3", refusal=refusal))
    assert statuses(result, "fa3") == ["ok", "unsupported", "unsupported"]


def test_warnings_of_what_works_are_kept_once():
    def bind(problem: Problem):
        def attend(q, k, v):
            warnings.warn("TF32 is off", stacklevel=1)
            warnings.warn("soon gone", DeprecationWarning, stacklevel=1)
            return right(problem)(q, k, v)

        return attend

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in the rounds they are the user's to filter
        result = measured(provider("a", bind), provider("b", bind))
    assert result.warnings == ["TF32 is off"]


def test_a_call_that_takes_too_long_is_not_repeated():
    result = measured(provider("slow"), settings=dataclasses.replace(SETTINGS, max_seconds=1e-9))
    measurement = result.measurements["slow", "forward"]
    assert measurement.outcome.status is Status.SKIPPED
    assert "more than the 1e-09 s allowed" in measurement.outcome.reason
    assert measurement.times is None
    assert measurement.probe_ms is not None


def test_longer_lengths_of_a_series_that_ran_out_of_memory_are_skipped():
    series = {"implementation": "big", "pass": "backward", "dtype": "float32", "mask": "causal", "head_dim": 8}
    result = measured(provider("naive"), provider("big"), rows=[{**series, "length": 16, "status": "oom"}])
    assert statuses(result, "big") == ["ok", "skipped", "ok"]
    assert result.measurements["big", "backward"].outcome.reason == "memory ran out at length 16 of the same series"


def test_what_would_not_fit_is_not_tried(monkeypatch):
    monkeypatch.setattr("benchmarks.attention_guards.available_bytes", lambda device: 1)
    result = measured(provider("naive", quadratic=True), provider("tiled"))
    assert statuses(result, "naive") == ["skipped"] * 3
    assert statuses(result, "tiled") == ["ok"] * 3


def test_inputs_that_do_not_fit_are_the_outcome_of_all(monkeypatch):
    def fail(*arguments, **options):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch, "randn", fail)
    result = measured(provider("naive"), provider("tiled"))
    assert statuses(result, "naive") == statuses(result, "tiled") == ["oom"] * 3


def test_a_lost_device_ends_the_cell_and_says_whose_failure_it_was(monkeypatch):
    def synchronize(device):
        if lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    lost: list[bool] = []

    def error() -> Exception:
        lost.append(True)
        return RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(attention_cell, "synchronize", synchronize)
    result = measured(provider("naive"), provider("wild", failing(error)), provider("last"))
    assert result.device_lost
    assert statuses(result, "wild") == ["error"] * 3
    assert statuses(result, "naive") == statuses(result, "last") == ["skipped"] * 3
    assert "after wild failed" in result.measurements["last", "both"].outcome.reason


def test_an_interruption_passes_through():
    with pytest.raises(KeyboardInterrupt):
        measured(provider("naive", failing(KeyboardInterrupt)))


def test_steps_are_told():
    steps: list[str] = []
    told = CellRun(PROBLEM, SETTINGS, SeriesHistory([]), lambda name, step: steps.append(f"{name}: {step}"))
    told.measure([provider("naive"), provider("other")])
    assert steps[:4] == ["naive: first call", "naive: first forward", "naive: first backward", "naive: first both"]
    assert "other: forward, round 1/3" in steps
    rounds = [step.partition(":")[0] for step in steps if "forward, round" in step]
    assert rounds == ["naive", "other", "other", "naive", "naive", "other"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_cell_on_a_gpu():
    from benchmarks.attention_providers import all_providers

    device = torch.device("cuda", torch.cuda.current_device())
    problem = Problem("bfloat16", "causal", batch=2, heads=4, kv_heads=4, length=512, head_dim=64)
    settings = dataclasses.replace(SETTINGS, device=device, method=TimingMethod(rounds=2))
    providers = [p for p in all_providers(device) if p.name in ("naive", "flash", "torch-flash")]
    result = CellRun(problem, settings, SeriesHistory([]), lambda name, step: None).measure(providers)
    for measurement in result.measurements.values():
        assert str(measurement.outcome) == "ok"
        assert measurement.memory is not None
        assert measurement.memory.peak_bytes is not None
        assert measurement.memory.peak_bytes > 0
    output = 2 * 4 * 512 * 64 * 2
    flash = result.measurements["flash", "backward"].memory
    assert flash is not None
    assert flash.held_bytes is not None
    assert output <= flash.held_bytes <= output + 2 * 4 * 512 * 4 + 4096  # the output, the log-sum-exp, and rounding
    assert result.differences["flash", "forward"].value < 0.04
    assert result.differences["flash", "backward"].value < 0.08
