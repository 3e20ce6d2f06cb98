"""The benchmark of features: every library computes the same, and what was measured is in rows and tables."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
import types
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks import features
from benchmarks.features import PLAIN, FeatureCase, cases_of, first_call, measure, parse, tables
from benchmarks.lib.attention_providers import add_peers, block_mask
from benchmarks.lib.comparison import Context, relative_difference
from benchmarks.parts import feature_providers
from benchmarks.parts.feature_cases import FEATURES, Feature, Sizes, sequence_lengths
from benchmarks.parts.feature_providers import PEERS, bind
from cs336_systems.profiling.torch_names import without_donated_buffers

from .small_models import run_here

CPU = torch.device("cpu")
SIZES = Sizes(2, 2, 96, 16, torch.float32, CPU)
CASE = FeatureCase("causal", "forward", "float32", *dataclasses.astuple(SIZES)[:4])
QUICK = ["--device", "cpu", "--rounds", "1", "--warmup", "0", "--rep", "0", "--max-seconds", "60"]
PASSES = ("forward", "backward")


def results(provider, name, sizes, which):
    torch.manual_seed(0)
    shape = (sizes.batch, sizes.heads, sizes.length, sizes.head_dim)
    tensors = [sizes.random(*shape, dtype=sizes.dtype) for _ in range(4)]
    feature = FEATURES[name](sizes)
    if feature.random or provider in feature.refusals:
        pytest.skip("there is nothing to compare")
    return first_call(provider, feature, sizes, which, tensors).results


def rows_of(case, *arguments):
    return {row["provider"]: row for row in measure(case, Context(parse([*QUICK, *arguments])))}


def test_every_feature_is_measured(monkeypatch, tmp_path):
    sizes = ["--lengths", "32", "--head-dims", "8", "--passes", "backward"]
    run_here(monkeypatch, features.main, tmp_path, *QUICK, *sizes, "--providers", "tiled", "torch", "flex")
    frame = pd.read_csv(tmp_path / "results.csv")
    ours = frame[frame["provider"] == "tiled"]
    assert list(ours["feature"]) == [*FEATURES]
    assert set(ours["status"]) == {"ok"}
    assert (ours["median_ms"] > 0).all()
    assert frame["warning"].isna().all()
    refused = frame[frame["status"] == "unsupported"]
    assert set(refused["feature"]) == {"document_unlisted", "softcap", "alibi", "relative_bias", "sinks"}
    assert set(frame[frame["feature"] == "sinks"]["provider"]) == {"tiled", "torch", PLAIN}
    text = (tmp_path / "tables.md").read_text()
    assert all(f"| {name} " in text for name in FEATURES)
    assert "- not measured: flex (measured on a CUDA device only)" in text


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("provider", ["flex", "torch"])
@pytest.mark.parametrize("name", FEATURES)
def test_peers_compute_the_same(monkeypatch, name, provider, which):
    """FlexAttention as plain PyTorch: on a CPU its kernels have no backward pass, which it would refuse."""
    monkeypatch.setattr(sys.modules[flex_attention.__module__], "_validate_device", lambda *x: None, raising=False)
    monkeypatch.setattr(feature_providers, "compiled_flex", lambda: feature_providers.flex)
    torch.compiler.reset()  # it is traced, once for each feature, which would be too often
    expected = results("naive", name, SIZES, which)
    assert relative_difference(results(provider, name, SIZES, which), expected) < 1e-5


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of other libraries' compilers
@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("provider", PEERS)
@pytest.mark.parametrize("name", FEATURES)
def test_peers_compute_the_same_on_a_gpu(name, provider, which):
    if folder := os.environ.get("PEERS"):  # as for --peers
        add_peers(Path(folder))
    if provider == "fa4" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("FlashAttention-4 is not installed")
    sizes = Sizes(2, 2, 512, 64, torch.bfloat16, torch.device("cuda"))
    torch.compiler.reset()
    with without_donated_buffers():
        expected = results("flash", name, sizes, which)
        try:
            found = results(provider, name, sizes, which)
        except RuntimeError as error:
            if "No valid triton configs" in str(error):
                pytest.skip("FlexAttention finds no tile for this feature that fits")
            raise
        assert relative_difference(found, expected) < 0.03


BY_MASK = [
    "window_4096",
    "window_quarter",
    "window_sixteenth",
    "document",
    "block_local",
    "dilated",
    "prefix",
    "prefix_tree",
    "dense_mask",
]


@pytest.mark.parametrize("name", ["causal", *BY_MASK])
def test_the_visible_share_is_that_of_the_mask(name):
    feature, index = FEATURES[name](SIZES), torch.arange(SIZES.length)
    mask = feature.mask(index[:, None], index) if feature.mask else torch.ones(96, 96).tril()
    assert feature.visible(SIZES) == pytest.approx(mask.float().mean().item())


def test_packed_sequences_fill_the_batch():
    lengths = sequence_lengths(SIZES)
    assert sum(lengths) == SIZES.tokens
    assert max(lengths) <= SIZES.length
    pairs = sum(torch.ones(length, length).tril().sum().item() for length in lengths)
    assert FEATURES["packed"](SIZES).visible(SIZES) == pytest.approx(pairs / (SIZES.batch * SIZES.length**2))


@pytest.mark.parametrize("length", [1, 500, 512])
def test_block_masks_made_in_strips_equal_torchs(length):
    def mask(query, key):
        return (query >= key) & (key >= query - 130)

    found = block_mask(mask, length, CPU, rows=256)
    expected = create_block_mask(lambda b, h, q, k: mask(q, k), None, None, length, length, device="cpu")
    assert found.shape == expected.shape
    for part in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        for name in (part, part.replace("kv", "q")):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_flash_attention_4_takes_its_own_arguments(monkeypatch):
    calls = []

    def fake(q, k, v, **named):
        calls.append((tuple(q.shape), named))
        return q * 1, None

    module = types.SimpleNamespace(flash_attn_func=fake, flash_attn_varlen_func=fake)
    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(cute=module))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    for name in ("causal", "window_quarter", "softcap", "sinks", "packed", "document"):
        (output,) = results("fa4", name, SIZES, "forward")
        assert output.shape == (SIZES.tokens, 2, 16)
    shapes, named = zip(*calls[::2], strict=True)
    assert shapes == ((2, 96, 2, 16),) * 4 + ((192, 2, 16),) * 2
    assert all(keywords.pop("causal") is True for keywords in named)
    assert named[:3] == ({}, {"window_size": (24, 0)}, {"softcap": 30.0})
    assert named[3]["learnable_sink"].shape == (2,)
    for keywords in named[4:]:
        assert keywords["cu_seqlens_q"].dtype == torch.int32
        assert keywords["cu_seqlens_q"][-1] == SIZES.tokens
        assert keywords["max_seqlen_k"] == keywords["cu_seqlens_k"].diff().max()


def test_the_backward_pass_reaches_what_is_learned():
    feature = FEATURES["learned_bias"](SIZES)
    tensors = [SIZES.random(2, 2, 96, 16) for _ in range(4)]
    gradients = first_call("naive", feature, SIZES, "backward", tensors).call()
    assert [tuple(x.shape) for x in gradients] == [(2, 2, 96, 16)] * 3 + [(2, 96, 96)]


def test_what_fails_or_is_slow_is_a_row_and_the_others_are_measured(monkeypatch):
    def exhausted(feature, sizes):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(feature_providers, "_bind_flex", exhausted)
    rows = rows_of(CASE, "--providers", "naive", "flex", "torch")
    assert [row["status"] for row in rows.values()] == ["ok", "oom", "ok"]
    assert rows["naive"]["of_plain"] == 1
    assert rows["torch"]["speedup_of_first"] == pytest.approx(rows["torch"]["median_ms"] / rows["naive"]["median_ms"])
    slow = rows_of(CASE, "--max-seconds", "1e-9")
    assert {row["status"] for row in slow.values()} == {"skipped"}
    assert "one call takes" in slow["tiled"]["reason"]


def test_results_that_differ_are_a_warning(monkeypatch):
    def wrong(feature, sizes):
        attend, layout = bind("naive", Feature(), sizes)
        return lambda q, k, v: 1.5 * attend(q, k, v), layout

    monkeypatch.setattr(feature_providers, "_bind_torch", wrong)
    row = rows_of(CASE)["torch"]
    assert row["difference"] == pytest.approx(0.5)
    assert row["warning"] == "results differ from tiled's by 0.5 of their norm"


def test_kernels_are_compiled_beforehand(tmp_path, capsys):
    sizes = ["--lengths", "16", "--features", "causal", "sinks", "--passes", "forward", "--out", str(tmp_path)]
    assert features.main([*QUICK, *sizes, "--jobs", "2", "--filter", "causal"]) == 0
    assert "compiled 1/1: feature=causal" in capsys.readouterr().err
    assert features.main([*QUICK, *sizes, "--jobs", "2", "--resume"]) == 0
    assert "compiled 1/1: feature=sinks" in capsys.readouterr().err


def test_the_table_names_the_fastest_peer():
    def row(name, median, speedup=None):
        sizes = {"feature": "sinks", "which": "forward", "dtype": "bfloat16", "head_dim": 64, "batch": 1, "length": 8}
        figures = {"median_ms": median, "speedup_of_first": speedup, "of_plain": 1.25, "visible": 0.5, "peak_mib": None}
        figures |= {
            "speedup_of_first_low": speedup and speedup - 0.5,
            "speedup_of_first_high": speedup and speedup + 0.5,
        }
        figures |= {"of_plain_low": 1.2, "of_plain_high": 1.3}
        return {**sizes, "provider": name, **figures}

    rows = [row("flash", 2.0), row("flex", 6.0, 3.0), row("fa4", 4.0, 2.0), row("torch", None), row(PLAIN, 1.6)]
    line = tables(pd.DataFrame(rows)).splitlines()[-1]
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells[6:] == ["50", "2.00", "6.00", "4.00", "–", "2.00 (1.50 to 2.50)", "fa4", "1.25 (1.20 to 1.30)", "–"]
    assert tables(pd.DataFrame([{"feature": "sinks", "status": "oom"}])) == ""


def test_sizes_of_the_command_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    arguments = ["--features", "causal", "window_4096", "--head-dims", "64", "--passes", "forward"]
    sizes = [(case.feature, case.batch, case.length) for case in cases_of(parse(arguments))]
    assert sizes == [("causal", 2, 8192), ("window_4096", 1, 16384), ("window_4096", 1, 65536)]
    given = cases_of(parse([*arguments, "--lengths", "32768", "--batch", "3"]))
    assert [(case.batch, case.length) for case in given] == [(3, 32768)] * 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [("--features none", "--features must be"), ("--passes both", "--passes must be"), ("--providers flex", "begin")],
)
def test_invalid_flags(arguments, text, capsys):
    with pytest.raises(SystemExit):
        parse(["--device", "cpu", *arguments.split()])
    assert text in capsys.readouterr().err
