"""Measuring one case of the attention benchmark: every provider and pass, in time and in memory."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from benchmarks.attention import parse
from benchmarks.lib.attention_providers import Problem, Provider
from benchmarks.lib.comparison import Context, doubts, plausible_difference, relative_difference
from benchmarks.lib.flags import PASSES
from benchmarks.lib.results import Row, Status
from benchmarks.parts import attention_measure
from benchmarks.parts.attention_measure import Bound, CaseRun, random_tensors, series_outcome

from .small_models import CPU

SMALL = ["--device", "cpu", "--lengths", "32", "64", "--head-dims", "8", "--batch", "1", "--heads", "2"]
FAST = ["--rounds", "2", "--warmup", "0", "--rep", "0"]
PROBLEM = Problem("float32", "causal", batch=2, heads=4, kv_heads=4, head_dim=8, length=32)


def right(problem: Problem):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=problem.causal)


def failing(error: Callable[[], BaseException], when: Callable[[], bool] = lambda: True):
    def bind(problem: Problem):
        def attend(q, k, v):
            if when():
                raise error()
            return right(problem)(q, k, v)

        return attend

    return bind


def provider(name: str, bind=right, **fields: object) -> Provider:
    return Provider(name=name, group="peers", bind=bind, **fields)


def measured(
    *providers: Provider, problem: Problem = PROBLEM, rows=(), **changes: object
) -> dict[tuple[str, str], Row]:
    options = parse([*SMALL, *FAST, "--max-seconds", "5"])
    vars(options).update(changes)
    found = CaseRun(problem, Context(options, list(rows))).measure(providers)
    assert [(row["provider"], row["pass"]) for row in found] == [(p.name, w) for p in providers for w in PASSES]
    return {(row["provider"], row["pass"]): row for row in found}


def statuses(rows: dict[tuple[str, str], Row], name: str) -> list[str]:
    return [rows[name, which]["status"] for which in PASSES]


def test_every_pass_of_every_provider_is_measured():
    rows = measured(provider("naive"), provider("other"), provider("torch-flash"))
    for (name, which), row in rows.items():
        assert row["status"] == "ok"
        assert 0 < row["min_ms"] <= row["median_ms"] <= row["max_ms"]
        assert len(row["round_ms"]) == row["rounds"] == 2
        assert row["tflops"] == pytest.approx(PROBLEM.flops(which) / row["median_ms"] * 1e-9)
        assert (row["difference"], row["difference_from"]) == (0, "naive")
        assert (row["reference"], row["host_ms"], row["peak_mib"]) == ("torch-flash", None, None)
        assert row["speedup_over_naive"] == (1.0 if name == "naive" else pytest.approx(row["speedup_over_naive"]))
        held = 2 * 4 * 32 * 8 * 4 / 2**20  # the output at least
        assert row["held_mib"] is None if which == "forward" else row["held_mib"] >= held


@pytest.mark.parametrize("layout", ["as given", "heads first", "length first"])
@pytest.mark.parametrize("heads", [0, 1, 4])
def test_layouts_hold_the_same_values(layout, heads):
    problem, shapes = dataclasses.replace(PROBLEM, heads=heads, kv_heads=heads), set()

    def bind(problem: Problem):
        def attend(q, k, v):
            shapes.add(tuple(q.shape))
            assert q.is_contiguous()
            if layout != "length first":
                return right(problem)(q, k, v)
            return right(problem)(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

        return attend

    rows = measured(provider("naive"), provider("other", bind, layout=layout), problem=problem)
    assert statuses(rows, "other") == ["ok"] * 3
    assert rows["other", "forward"]["difference"] == pytest.approx(0, abs=1e-6)
    assert rows["other", "backward"]["difference"] == pytest.approx(0, abs=1e-6)
    axis = (2, 32, 8) if layout == "as given" and not heads else (2, max(1, heads), 32, 8)
    assert shapes == {(2, 32, max(1, heads), 8) if layout == "length first" else axis}


def test_wrong_results_are_refused():
    def unmasked(problem: Problem):
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v)

    def forgetful(problem: Problem):
        return lambda q, k, v: right(problem)(q, k.detach() + 0 * k, v)

    rows = measured(provider("naive"), provider("unmasked", unmasked), provider("forgetful", forgetful))
    assert statuses(rows, "unmasked") == ["error"] * 3
    assert statuses(rows, "forgetful") == ["ok", "error", "error"]
    assert rows["unmasked", "forward"]["reason"].startswith("the output differs from naive's by ")
    assert rows["forgetful", "both"]["reason"] == "the gradients differ from naive's by 1 of the norm"
    assert rows["unmasked", "forward"]["median_ms"] is None
    assert relative_difference([torch.tensor([float("nan")])], [torch.ones(1)]) == float("inf")
    assert plausible_difference("float32", gradients=True, tf32=True) == 1e-2


def test_memory_that_runs_out_is_a_status_and_the_others_go_on():
    def no_memory() -> Exception:
        return torch.OutOfMemoryError("CUDA out of memory")

    rows = measured(
        provider("naive", failing(no_memory)), provider("b"), provider("c", failing(no_memory, torch.is_grad_enabled))
    )
    assert statuses(rows, "naive") == ["oom"] * 3
    assert statuses(rows, "b") == ["ok"] * 3
    assert statuses(rows, "c") == ["ok", "oom", "oom"]
    assert rows["b", "forward"]["difference_from"] == "b"
    assert rows["b", "forward"]["speedup_over_naive"] is None
    assert rows["naive", "both"]["reason"] == "CUDA out of memory"


def test_inputs_that_do_not_fit_are_a_status_of_all(monkeypatch):
    def fail(*arguments: object, **options: object):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "randn", fail)
    rows = measured(provider("naive"), provider("tiled"))
    assert statuses(rows, "naive") == statuses(rows, "tiled") == ["oom"] * 3


def test_refusals():
    def warned(problem: Problem):
        def attend(q, k, v):
            for text in ("Flash kernel not used because:", "Expected dtype half.", "cuDNN has been runtime disabled."):
                warnings.warn(f"{text} (Triggered internally at a.cpp:1.)", stacklevel=1)
            raise RuntimeError("No available kernel. Aborting.\nmore")

        return attend

    refuses, phrases = failing(lambda: ValueError("it must have CUDA tensors")), ("No available kernel",)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = measured(
            provider("by type", refuses, refusals=(ValueError,)),
            provider("not said", refuses),
            provider("by phrase", warned, refusal_phrases=phrases),
            provider("with reasons", warned, refusal_phrases=phrases, warns_why=True),
            provider("before", refusal=lambda problem, which: None if which == "forward" else "no backward"),
        )
    assert statuses(rows, "by type") == ["unsupported"] * 3
    assert statuses(rows, "not said") == ["error"] * 3
    assert rows["by phrase", "both"]["reason"] == "No available kernel. Aborting."
    assert rows["with reasons", "both"]["reason"] == "Expected dtype half."
    assert statuses(rows, "before") == ["ok", "unsupported", "unsupported"]


def test_slow_calls_are_not_repeated():
    row = measured(provider("slow"), max_seconds=1e-9)["slow", "forward"]
    assert row["status"] == "skipped"
    assert "more than the 1e-09 s allowed" in row["reason"]
    assert row["median_ms"] is None
    assert row["probe_ms"] > 0


def earlier(length: int, **fields: object) -> Row:
    series = {"provider": "tiled", "pass": "forward", "dtype": "float32", "mask": "causal", "head_dim": 8}
    sizes = {"batch": 2, "heads": 4, "kv_heads": 4, "length": length}
    return {**series, **sizes, "status": "ok", "median_ms": None, "probe_ms": None, **fields}


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], None),
        ([earlier(16, status="unsupported")], None),
        ([earlier(8, status="oom"), earlier(16, status="oom")], "memory ran out at length 8 of the same series"),
        ([earlier(64, status="oom")], None),
        ([earlier(16, status="oom", mask="full")], None),
        ([earlier(16, status="oom", provider="naive")], None),
        ([earlier(8, median_ms=1), earlier(16, median_ms=300.0)], "about 1.2 s, estimated from length 16: more than"),
        ([earlier(16, batch=4, median_ms=300.0)], None),  # at this many tokens, time grows with the length alone
        ([earlier(16, status="skipped", probe_ms=1500.0)], "about 6.0 s"),
    ],
)
def test_shorter_lengths_decide_what_is_skipped(rows, reason):
    outcome = series_outcome(PROBLEM, "tiled", "forward", rows, 1.0)
    assert (outcome is None) == (reason is None)
    if outcome is not None:
        assert outcome.status is Status.SKIPPED
        assert reason in outcome.reason
        assert statuses(measured(provider("tiled"), rows=rows, max_seconds=1.0), "tiled")[0] == "skipped"


@pytest.mark.parametrize(("mebibytes", "fits"), [(None, True), (1000, True), (0.05, False)])
def test_score_matrices_that_would_not_fit_are_not_tried(monkeypatch, mebibytes, fits):
    assert PROBLEM.quadratic_bytes("forward") == 3 * 2 * 4 * 32**2 * 4
    monkeypatch.setattr(attention_measure, "available_bytes", lambda: mebibytes and mebibytes * 2**20)
    rows = measured(provider("naive", quadratic=True), provider("tiled"))
    assert statuses(rows, "naive") == (["ok"] if fits else ["skipped"]) * 3
    assert statuses(rows, "tiled") == ["ok"] * 3
    assert attention_measure.would_not_fit(PROBLEM, "both", torch.device("cuda")) is None


def test_passes_are_what_they_say():
    modes: list[bool] = []

    def bind(problem: Problem):
        def attend(q, k, v):
            modes.append(torch.is_grad_enabled())
            return right(problem)(q, k, v)

        return attend

    tensors = random_tensors(dataclasses.replace(PROBLEM, kv_heads=2), CPU, 0)
    assert [x.shape[1] for x in tensors] == [4, 2, 2, 4]
    of_other_width = random_tensors(dataclasses.replace(PROBLEM, v_head_dim=6), CPU, 0)
    assert [x.shape[-1] for x in of_other_width] == [8, 8, 6, 6]
    assert torch.equal(tensors[0], random_tensors(PROBLEM, CPU, 0)[0])
    assert not torch.equal(tensors[0], random_tensors(PROBLEM, CPU, 1)[0])
    bound = Bound(provider("p", bind), PROBLEM, random_tensors(PROBLEM, CPU, 0), CPU)
    for which, expected in (("forward", [False] * 2), ("backward", [True]), ("both", [True] * 2)):
        modes.clear()
        with bound.ready(which) as call:
            call()
            call()
        assert modes == expected
    assert all(x.grad is None for x in bound._inputs)


def test_doubts():
    row = {"median_ms": 1.0, "min_ms": 0.9, "max_ms": 1.1, "tflops": 1.0, "dtype": "float32", "tf32": False}
    assert doubts(row, "NVIDIA H200") == []
    assert "above the 67 TFLOP/s" in doubts(row | {"tflops": 100.0}, "NVIDIA H200")[0]
    assert "3.0 times the fastest" in doubts(row | {"max_ms": 2.7}, "CPU")[0]
    assert doubts(row | {"median_ms": None}, "CPU") == []
