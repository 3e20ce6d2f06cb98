"""Who computes attention in the benchmark: ours, torch's backends, and peers that may be installed."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types
import warnings

import pytest
import torch
import torch.nn.functional as F

from benchmarks.lib.attention_providers import (
    Problem,
    Provider,
    _bind_flex,
    add_peers,
    all_providers,
    chosen_providers,
    peer_providers,
    reference_name,
)
from benchmarks.parts.attention_measure import Bound, random_tensors

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PROBLEM = Problem("float32", "causal", batch=2, heads=4, kv_heads=4, head_dim=16, length=32)
BFLOAT16 = dataclasses.replace(PROBLEM, dtype="bfloat16")
PEER_MODULES = ("flash_attn_interface", "fa3_fwd_interface", "flash_attn", "flash_attn.cute")


def output_of(provider: Provider, problem: Problem = PROBLEM) -> torch.Tensor:
    return Bound(provider, problem, random_tensors(problem, CPU, 0), CPU).results("forward")[0]


def named(name: str, device: torch.device = CPU) -> Provider:
    return next(provider for provider in all_providers(device) if provider.name == name)


@pytest.mark.parametrize(("heads", "kv_heads"), [(0, 0), (4, 4), (4, 2)])
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_our_implementations_and_torchs_agree(heads, kv_heads, mask):
    problem = dataclasses.replace(PROBLEM, mask=mask, heads=heads, kv_heads=kv_heads)
    expected = output_of(named("naive"), problem)
    assert expected.shape == (2, max(1, heads), 32, 16)
    for name in ("tiled", "sdpa", "torch-math"):
        torch.testing.assert_close(output_of(named(name), problem), expected)


def test_choosing_by_name_group_or_all():
    known = all_providers(CPU)
    assert [p.name for p in chosen_providers(known, ["flash", "naive"])] == ["naive", "flash"]
    assert {p.group for p in chosen_providers(known, ["torch", "flash"])} == {"torch", "ours"}
    assert chosen_providers(known, ["all"]) == known
    with pytest.raises(ValueError, match=r"--providers must be taken from naive, .*; got fast"):
        chosen_providers(known, ["fast"])


@pytest.mark.parametrize(("value", "missing"), [("1", True), ("0", False), (None, False)])
def test_the_interpreter_is_not_measured(monkeypatch, value, missing):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if value is not None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert bool(named("flash").missing) == missing
    assert named("naive").missing == ""


def test_the_reference_takes_the_problems_dtype():
    assert reference_name("bfloat16", CUDA) == reference_name("float32", CPU) == "torch-flash"
    assert reference_name("float32", CUDA) == "torch-efficient"


@pytest.fixture
def no_peers(monkeypatch):
    """A machine on which no peer is installed."""
    for module in PEER_MODULES:
        monkeypatch.setitem(sys.modules, module, None)  # importing it raises ModuleNotFoundError
    return monkeypatch


def install(monkeypatch, module: str, **contents: object) -> None:
    monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**contents))


def length_first(q, k, v, causal=False):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def test_peers_that_are_missing_say_why(no_peers, monkeypatch):
    assert {peer.missing for peer in peer_providers(CPU)} == {"measured on a CUDA device only"}
    assert [peer.missing for peer in peer_providers(CUDA)] == ["not installed", "not installed", ""]
    install(no_peers, "flash_attn", cute=None)
    install(no_peers, "flash_attn.cute")
    assert "flash_attn.cute cannot be imported: AttributeError" in named("fa4", CUDA).missing
    for error, reason in (
        (ModuleNotFoundError("No module", name="cutlass"), "flash_attn.cute needs cutlass, which is not installed"),
        (OSError("undefined symbol"), "flash_attn.cute cannot be imported: OSError: undefined symbol"),
    ):

        def import_module(name: str, error: Exception = error):
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(importlib, "import_module", import_module)
            assert named("fa4", CUDA).missing == reason


def test_peers_that_are_installed(no_peers):
    install(no_peers, "fa3_fwd_interface", flash_attn_func=length_first)
    install(no_peers, "flash_attn", cute=None)
    install(no_peers, "flash_attn.cute", flash_attn_func=lambda *a, **o: (length_first(*a, **o), "lse"))
    expected = output_of(named("naive"))
    for name in ("fa3", "fa4"):
        provider = named(name, CUDA)
        assert provider.missing == ""
        torch.testing.assert_close(output_of(provider), expected)
        assert provider.refusal(BFLOAT16, "both") is None
        assert provider.refusal(PROBLEM, "forward") == f"{name} takes bfloat16 and float16, not float32"
        narrow = dataclasses.replace(BFLOAT16, head_dim=20)
        assert "multiples of 8, not 20" in provider.refusal(narrow, "forward")
    install(no_peers, "flash_attn_interface", flash_attn_func=None)  # the whole build goes before fa3-fwd
    assert named("fa3", CUDA).bind.args == (None,)


def test_a_folder_of_peers_is_a_site_folder(tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner.pth").write_text("inner\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    add_peers(tmp_path)
    assert sys.path[-2:] == [str(tmp_path), str(tmp_path / "inner")]


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_flex_attention_computes_the_same(monkeypatch, mask):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    problem = dataclasses.replace(PROBLEM, mask=mask, kv_heads=2)
    q, k, v, _ = random_tensors(problem, CPU, 0)  # it has no gradients on a CPU
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        output = _bind_flex(CPU, problem)(q, k, v)
    torch.testing.assert_close(
        output, F.scaled_dot_product_attention(q, k, v, is_causal=problem.causal, enable_gqa=True)
    )
    narrow = dataclasses.replace(PROBLEM, head_dim=8)
    assert named("flex").refusal(PROBLEM, "both") is None
    assert named("flex").refusal(narrow, "forward") == "flex takes head dimensions from 16 on, not 8"
