"""Who is measured: ours, torch's backends, and peers that may be installed."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import types
import warnings

import pytest
import torch
import torch.nn.functional as F

from benchmarks import attention_peers
from benchmarks.attention_contender import Contender, Tensors
from benchmarks.attention_peers import peer_providers
from benchmarks.attention_plan import Plan, dry_run, headline, method_notes
from benchmarks.attention_presets import PRESETS, Problem
from benchmarks.attention_provider import Provider
from benchmarks.attention_providers import all_providers, chosen_providers, reference_name

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PROBLEM = Problem("bfloat16", "causal", batch=2, heads=4, kv_heads=4, length=32, head_dim=16)
FLOAT32 = dataclasses.replace(PROBLEM, dtype="float32")
FLASH_ATTENTION_3 = ("flash_attn_interface", "flash_attn_config", "fa3_fwd_interface", "fa3_fwd_config")
MODULES = (*FLASH_ATTENTION_3, "flash_attn", "flash_attn.cute")


def output_of(provider: Provider, problem: Problem) -> torch.Tensor:
    tensors = Tensors.random(problem, CPU, 0).laid_out(provider.layout, head_axis=problem.heads > 0)
    return Contender(provider, problem, tensors, CPU).output()


@pytest.mark.parametrize("heads", [0, 4])
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_our_implementations_and_torchs_agree(heads, mask):
    problem = dataclasses.replace(FLOAT32, mask=mask, heads=heads, kv_heads=heads)
    by_name = {provider.name: provider for provider in all_providers(CPU)}
    expected = output_of(by_name["naive"], problem)
    assert expected.shape == (2, max(1, heads), 32, 16)
    for name in ("tiled", "sdpa", "torch-math", "torch-flash"):
        torch.testing.assert_close(output_of(by_name[name], problem), expected)


def test_fewer_key_heads():
    problem = dataclasses.replace(FLOAT32, kv_heads=2)
    by_name = {provider.name: provider for provider in all_providers(CPU)}
    torch.testing.assert_close(output_of(by_name["torch-math"], problem), output_of(by_name["naive"], problem))


def test_the_baseline_comes_first_and_names_are_unique():
    names = [provider.name for provider in all_providers(CPU)]
    assert names[0] == "naive"
    assert len(set(names)) == len(names)


def test_choosing_by_name_group_or_all():
    known = all_providers(CPU)
    assert [p.name for p in chosen_providers(known, ("flash", "naive"))] == ["naive", "flash"]
    assert {p.group for p in chosen_providers(known, ("torch", "flash"))} == {"torch", "ours"}
    assert chosen_providers(known, ("all",)) == known
    with pytest.raises(ValueError, match=r"--impl must be taken from naive, .*; got fast"):
        chosen_providers(known, ("fast",))


@pytest.mark.parametrize(("value", "missing"), [("1", True), ("0", False), (None, False)])
def test_the_interpreter_is_not_measured(monkeypatch, value, missing):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if value is not None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    by_name = {provider.name: provider for provider in all_providers(CPU)}
    assert bool(by_name["flash"].missing) == missing
    assert by_name["naive"].missing == ""


def test_the_reference_takes_the_problems_dtype():
    assert reference_name(PROBLEM, CUDA) == "torch-flash"
    assert reference_name(FLOAT32, CUDA) == "torch-efficient"
    assert reference_name(FLOAT32, CPU) == "torch-flash"


def test_peers_are_not_measured_on_a_cpu():
    assert {peer.missing for peer in peer_providers(CPU)} == {"measured on a CUDA device only"}


@pytest.fixture
def no_peers(monkeypatch):
    """A machine on which no peer is installed."""
    for module in MODULES:
        monkeypatch.setitem(sys.modules, module, None)  # importing it raises ModuleNotFoundError
    on_capability(monkeypatch, 9, 0)
    return monkeypatch


def on_capability(monkeypatch, *capability: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


def peer(name: str) -> Provider:
    return next(provider for provider in peer_providers(CUDA) if provider.name == name)


def test_missing_peers_are_not_installed(no_peers):
    assert peer("fa3").missing == "not installed"
    assert peer("fa4").missing == "not installed"
    assert peer("flex").missing == ""


def install(monkeypatch, module: str, **contents) -> None:
    monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**contents))


def length_first_attention(q, k, v, causal=False):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def test_the_forward_only_wheel_is_found_under_its_own_name(no_peers):
    flags = {"FLASHATTENTION_DISABLE_BACKWARD": True, "FLASHATTENTION_DISABLE_FP16": True}
    install(no_peers, "fa3_fwd_interface", flash_attn_func=length_first_attention)
    install(no_peers, "fa3_fwd_config", CONFIG={"build_flags": flags})
    provider = peer("fa3")
    assert provider.missing == ""
    assert provider.refusal(PROBLEM, "forward") is None
    assert provider.refusal(PROBLEM, "both") == "fa3 has the forward pass alone in this build"
    half = dataclasses.replace(PROBLEM, dtype="float16")
    assert provider.refusal(half, "forward") == "fa3 has no float16 kernels in this build"
    assert provider.refusal(FLOAT32, "forward") == "fa3 takes bfloat16 and float16, not float32"
    narrow = dataclasses.replace(PROBLEM, head_dim=20)
    assert "multiples of 8, not 20" in (provider.refusal(narrow, "forward") or "")
    naive = next(p for p in all_providers(CPU) if p.name == "naive")
    torch.testing.assert_close(output_of(provider, FLOAT32), output_of(naive, FLOAT32))


def refused(name: str, which: str, **fields) -> bool:
    return peer(name).refusal(dataclasses.replace(PROBLEM, **fields), which) is not None


def test_flash_attention_3_has_the_kernels_of_its_build(no_peers):
    flags = {"FLASHATTENTION_DISABLE_HDIM256": True, "FLASHATTENTION_DISABLE_SM8x": True}
    install(no_peers, "flash_attn_interface", flash_attn_func=length_first_attention)
    install(no_peers, "flash_attn_config", CONFIG={"build_flags": flags})
    assert not refused("fa3", "backward", head_dim=192)
    assert refused("fa3", "backward", head_dim=200)
    for capability in ((8, 0), (10, 0), (12, 0)):
        on_capability(no_peers, *capability)
        assert refused("fa3", "forward")


def test_flash_attention_4_has_what_each_architecture_has(no_peers):
    install(no_peers, "flash_attn", cute=None)
    install(no_peers, "flash_attn.cute", flash_attn_func=length_first_attention)
    for head_dim in (8, 16, 32, 64, 128, 192, 256):
        assert not refused("fa4", "backward", head_dim=head_dim)
    assert refused("fa4", "forward", head_dim=264)
    assert refused("fa4", "forward", dtype="float32")
    on_capability(no_peers, 8, 0)
    assert not refused("fa4", "forward")
    assert refused("fa4", "backward")
    on_capability(no_peers, 10, 0)
    assert [refused("fa4", "both", head_dim=head_dim) for head_dim in (128, 192, 256)] == [False, True, False]
    on_capability(no_peers, 7, 5)
    assert refused("fa4", "forward")


def test_the_whole_build_is_preferred(no_peers):
    install(no_peers, "flash_attn_interface", flash_attn_func=length_first_attention)
    install(no_peers, "fa3_fwd_interface", flash_attn_func=None)
    assert peer("fa3").refusal(PROBLEM, "backward") is None


def test_a_peer_that_returns_more_than_its_output(no_peers):
    install(no_peers, "flash_attn", cute=None)
    install(no_peers, "flash_attn.cute", flash_attn_func=lambda *a, **o: (length_first_attention(*a, **o), "lse"))
    provider = peer("fa4")
    assert provider.missing == ""
    assert output_of(provider, FLOAT32).shape == (2, 4, 32, 16)


def test_a_peer_that_lacks_something_says_so(no_peers, monkeypatch):
    def import_module(name: str):
        raise ModuleNotFoundError("No module named 'cutlass'", name="cutlass")

    monkeypatch.setattr("importlib.import_module", import_module)
    assert peer("fa4").missing == "flash_attn.cute needs cutlass, which is not installed"


def test_a_peer_that_cannot_be_imported_says_so(no_peers, monkeypatch):
    def import_module(name: str):
        raise OSError("undefined symbol")

    monkeypatch.setattr("importlib.import_module", import_module)
    assert peer("fa4").missing == "flash_attn.cute cannot be imported: OSError: undefined symbol"


def test_a_peer_of_another_shape_says_so(no_peers):
    install(no_peers, "flash_attn", cute=None)
    install(no_peers, "flash_attn.cute")
    assert "cannot be imported: AttributeError" in peer("fa4").missing


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_flex_attention_computes_the_same(monkeypatch, mask):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    problem = dataclasses.replace(FLOAT32, mask=mask, kv_heads=2)
    tensors = Tensors.random(problem, CPU, 0)
    inputs = (tensors.query, tensors.key, tensors.value)  # it has no gradients on a CPU
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        output = attention_peers._bind_flex(CPU, problem)(*inputs)
    expected = F.scaled_dot_product_attention(*inputs, is_causal=problem.causal, enable_gqa=True)
    torch.testing.assert_close(output, expected)


def test_flex_attention_starts_at_sixteen_dimensions():
    assert peer("flex").refusal(PROBLEM, "both") is None
    narrow = dataclasses.replace(PROBLEM, head_dim=8)
    assert peer("flex").refusal(narrow, "forward") == "flex takes head dimensions from 16 on, not 8"


@pytest.mark.parametrize("length", [1, 100, 128, 512, 1000])
def test_a_causal_block_mask_is_what_create_block_mask_makes(length):
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(batch, head, query, key):
        return query >= key

    expected = create_block_mask(visible, None, None, length, length, device="cpu")
    found = attention_peers.causal_block_mask(length, CPU)
    assert found.seq_lengths == expected.seq_lengths
    for kind, name in itertools.product(("kv", "full_kv", "q", "full_q"), ("num_blocks", "indices")):
        torch.testing.assert_close(getattr(found, f"{kind}_{name}"), getattr(expected, f"{kind}_{name}"))


def test_a_plan_leaves_out_who_is_missing():
    plan = Plan.make(PRESETS["cpu"], CPU, all_providers(CPU))
    assert "fa3" in plan.missing
    assert "fa3" not in [provider.name for provider in plan.providers]
    text = "\n".join(headline(plan))
    assert "No GPU is used" in text
    assert "not measured: fa3 (measured on a CUDA device only)" in text


def test_a_plan_needs_somebody():
    configuration = dataclasses.replace(PRESETS["cpu"], implementations=("peers",))
    with pytest.raises(ValueError, match="that can be measured here; got fa3: measured on a CUDA device only"):
        Plan.make(configuration, CPU, all_providers(CPU))


def test_a_dry_run_lists_the_cells_with_their_memory():
    plan = Plan.make(PRESETS["course"], CUDA, all_providers(CPU))
    lines = dry_run(plan)
    assert len(lines) == 40 + 1
    assert lines[4] == (
        "  float32 full d 16 length 16384, q (8, 16384, 16), up to about 40.00 GiB for those that keep the score matrix"
    )
    assert lines[-1].startswith("at least ")
    linear = dataclasses.replace(plan, providers=tuple(p for p in plan.providers if not p.quadratic))
    assert "GiB" not in "".join(dry_run(linear))
    assert "No GPU" not in "".join(headline(plan))


def test_the_method_is_told_as_it_is():
    plan = Plan.make(dataclasses.replace(PRESETS["cpu"], tf32=True, seed=7), CPU, all_providers(CPU))
    text = " ".join(method_notes(plan))
    assert "5 rounds" in text
    assert "by the wall clock" in text
    assert "may use TF32" in text
    assert "seed 7" in text
    assert "device events" in " ".join(method_notes(dataclasses.replace(plan, device=CUDA)))
    assert plan.method.repetitions_ms != dataclasses.replace(plan, device=CUDA).method.repetitions_ms
