"""The benchmark of generation: rates follow from bytes and times, and what fails is a row."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

from benchmarks import generation
from benchmarks.generation import GenerationCase, cases_of, measure, parse, tables, weight_bytes
from benchmarks.lib.comparison import Context
from cs336_systems.transformer import Transformer, TransformerConfig

from .small_models import run_here

TINY = {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 40}
QUICK = ["--device", "cpu", "--rounds", "2", "--warmup", "0", "--rep", "0", "--lengths", "12", "--steps", "2"]


@pytest.fixture(autouse=True)
def tiny_model(monkeypatch):
    monkeypatch.setattr(generation, "preset", lambda name, **changes: TransformerConfig(**TINY | changes))


def measured(*arguments):
    options = parse([*QUICK, *arguments])
    return [row | case.columns for case in cases_of(options) for row in measure(case, Context(options))]


def test_steps():
    rows = measured("--batches", "1", "3", "--modes", "eager", "graph")
    assert [(row["batch"], row["provider"], row["status"]) for row in rows] == [
        *((1, "eager", "ok"), (1, "graph", "unsupported"), (1, "copy", "ok")),
        *((3, "eager", "ok"), (3, "graph", "unsupported"), (3, "copy", "ok")),
    ]
    assert rows[1]["reason"].startswith("graph must be None or False here")
    for row, copy in ((rows[0], rows[2]), (rows[3], rows[5])):
        # Two layers of keys and values (2 heads of 8), of 12 prompt tokens, 2 untimed steps and 2 · 2 / 2 timed ones.
        assert row["cache_bytes"] == 2 * 2 * row["batch"] * 16 * 2 * 8 * 4
        assert row["gb_per_s"] == pytest.approx((row["weight_bytes"] + row["cache_bytes"]) / row["median_ms"] / 1e6)
        assert row["of_copy"] == pytest.approx(row["gb_per_s"] / copy["gb_per_s"])
        assert row["tokens_per_s"] == pytest.approx(row["batch"] / row["median_ms"] * 1e3)
        assert row["ready_s"] is not None
        assert copy["tokens_per_s"] is None
    lines = tables(pd.DataFrame(rows)).splitlines()
    assert [line.split("|")[6].strip() for line in lines[2:]] == ["eager", "copy"] * 2


def test_attention(monkeypatch):
    monkeypatch.setattr(generation, "SMALL_SHAPES", [(2, 40, 4, 2, 16)])
    rows = measured("--attention")
    assert [row["provider"] for row in rows] == ["torch", "attention_with_cache", "copy"]
    for row in rows[:2]:
        assert row["status"] == "ok"
        assert row["difference"] < 1e-5
        assert row["cache_bytes"] == 2 * 2 * 2 * 40 * 16 * 4
        assert row["gb_per_s"] == pytest.approx(row["cache_bytes"] / row["median_ms"] / 1e6)
        assert row["tokens_per_s"] is None
    assert tables(pd.DataFrame(rows)).count("| attention ") == 3


def test_a_run_and_its_continuation(monkeypatch, tmp_path, capsys):
    arguments = ["--device", "cpu", "--attention", "--rounds", "1"]
    run_here(monkeypatch, generation.main, tmp_path, *arguments, "--filter", "batch=1")
    rows = run_here(monkeypatch, generation.main, tmp_path, *arguments, "--resume")
    assert [row["batch"] for row in rows] == ["1"] * 3 + ["4"] * 3
    assert generation.main([*arguments, "--out", str(tmp_path), "--resume", "--steps", "3"]) == 2
    assert "steps was 4 and is now 3" in capsys.readouterr().err


def test_what_fails_while_it_is_timed_is_a_row(monkeypatch):
    def fail(*arguments, **options):
        raise ArithmeticError("no time")

    monkeypatch.setattr(generation, "call_milliseconds", fail)
    row, copy = measured("--batches", "1")
    assert (row["status"], copy["status"]) == ("error", "ok")
    assert "ArithmeticError: no time" in row["reason"]
    assert tables(pd.DataFrame([{"model": "small", "status": "oom"}])) == ""


def test_bytes_that_a_step_reads():
    config = TransformerConfig(**TINY, context_length=64)
    untied, tied = Transformer(config), Transformer(TransformerConfig(**TINY, context_length=64, tie_embeddings=True))
    # A head that is the embedding is read whole, and an embedding that is none is not.
    assert weight_bytes(untied) == weight_bytes(tied) == 4 * (config.parameters() - 40 * 32)
    case = GenerationCase("tiny", 2, "bfloat16", batch=3, length=10, heads=4, kv_heads=2, head_dim=8)
    assert case.cache_bytes(10) == 2 * 2 * 3 * 10 * 16 * 2
    assert case.cache_bytes(10, window=4) == 2 * 2 * 3 * 4 * 16 * 2


@pytest.mark.parametrize("flag", ["--steps", "--lengths", "--rounds", "--layers", "--modes", "--models"])
def test_invalid_flags(flag, capsys):
    with pytest.raises(SystemExit):
        parse(["--device", "cpu", flag, "0"])
    assert flag in capsys.readouterr().err


def test_defaults_with_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = parse([])
    assert (options.models, options.lengths, options.batches) == (["large"], [2048], [1, 32])
    assert (options.modes, options.dtypes) == (["eager", "graph", "graph+compile"], ["bfloat16"])


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    common = ["--device", "cuda", "--rounds", "2"]
    arguments = ["--batches", "2", "--lengths", "40", "--modes", "eager", "graph", "--out", str(tmp_path / "steps")]
    assert generation.main([*common, *arguments]) == 0
    assert set(pd.read_csv(tmp_path / "steps/results.csv")["status"]) == {"ok"}
    assert generation.main([*common, "--attention", "--out", str(tmp_path / "attention")]) == 0
    frame = pd.read_csv(tmp_path / "attention/results.csv")
    ours = frame[frame["provider"] == generation.OURS]
    assert len(ours) == len(generation.SHAPES)
    assert set(ours["status"]) == {"ok"}
    assert (ours["difference"] < 0.02).all()
