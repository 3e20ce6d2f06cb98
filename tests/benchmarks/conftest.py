"""Sweeps of two providers that do as they are told, measured in no time."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch.nn.functional as F

from benchmarks import attention as benchmark
from benchmarks import attention_rows
from benchmarks.attention_plan import Plan
from benchmarks.attention_presets import Problem
from benchmarks.attention_provider import Provider
from cs336_systems.profiling.timing import TimingMethod


@pytest.fixture
def short_measurements(monkeypatch):
    """Sweeps on a CPU that measure each call once."""
    quick = TimingMethod(rounds=2, warmup_ms=0, repetitions_ms=0, pause_ms=0)
    usual = TimingMethod(rounds=2)
    monkeypatch.setattr(Plan, "method", property(lambda plan: quick if plan.device.type == "cpu" else usual))
    monkeypatch.setattr(attention_rows, "_PLAUSIBLE_SPREAD", 1e9)  # whatever else runs beside the tests


@pytest.fixture
def calls(monkeypatch, short_measurements):
    """Two providers that compute attention in place of all others: who was called, and the trouble to make then."""
    seen: list[tuple[str, int]] = []

    hook = types.SimpleNamespace(seen=seen, trouble=lambda name, length: None, providers=[])

    def make(name: str) -> Provider:
        def bind(problem: Problem):
            def attend(q, k, v):
                seen.append((name, problem.length))
                hook.trouble(name, problem.length)
                return F.scaled_dot_product_attention(q, k, v, is_causal=problem.causal)

            return attend

        return Provider(name=name, group="ours", bind=bind)

    absent = dataclasses.replace(make("fa9"), group="peers", missing="not installed")
    hook.providers = [make("naive"), make("other"), absent]
    monkeypatch.setattr(benchmark, "all_providers", lambda device: hook.providers)
    return hook
