"""The benchmark of generation: both kinds of cells are measured, rates follow from bytes, and failures are rows too."""

from __future__ import annotations

import csv
import functools

import pytest
import torch

from benchmarks import generation, generation_cells
from benchmarks.comparison import DeviceLostError
from benchmarks.generation_cells import Shape, cache_bytes, weight_bytes
from cs336_systems.profiling.timing import TimingMethod
from cs336_systems.transformer import Transformer, TransformerConfig

TINY = {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 40}


@pytest.fixture(autouse=True)
def small_measurements(monkeypatch):
    """Each call once, on a model of a few thousand parameters."""
    quick = functools.partial(TimingMethod, warmup_ms=0, repetitions_ms=0, pause_ms=0)
    monkeypatch.setattr(generation, "TimingMethod", quick)
    monkeypatch.setattr(
        generation, "preset", lambda name, **changes: TransformerConfig(**{"context_length": 8} | TINY | changes)
    )


@pytest.fixture
def benchmark(tmp_path):
    """Runs the command with these arguments; returns the rows of the CSV file and the text of the tables."""

    def run(*arguments, status=0):
        common = ("--device", "cpu", "--rounds", "2", "--dtype", "fp32", "--context", "12", "--new-tokens", "2")
        assert generation.main([*common, "--output", str(tmp_path), *arguments]) == status
        with (tmp_path / "results.csv").open() as file:
            return [*csv.DictReader(file)], (tmp_path / "tables.md").read_text()

    return run


def test_steps(benchmark):
    rows, tables = benchmark("--preset", "small", "--batch", "1", "3", "--modes", "eager", "graph")
    assert [(row["batch"], row["contender"], row["status"]) for row in rows] == [
        ("1", "eager", "ok"),
        ("1", "graph", "unsupported"),
        ("3", "eager", "ok"),
        ("3", "graph", "unsupported"),
    ]
    for row in rows[::2]:
        batch = int(row["batch"])
        # Two layers of keys and values (2 heads of 8), of 12 prompt tokens, 2 untimed steps and 2 · 2 / 2 timed ones.
        assert int(row["cache_bytes"]) == 2 * 2 * batch * 16 * 2 * 8 * 4
        read, took = int(row["weight_bytes"]) + int(row["cache_bytes"]), float(row["median_ms"])
        assert float(row["gb_per_s"]) == pytest.approx(read / took / 1e6)
        assert float(row["of_copy"]) == pytest.approx(float(row["gb_per_s"]) / float(row["copy_gb_per_s"]))
        assert float(row["tokens_per_s"]) == pytest.approx(batch / took * 1e3)
    assert tables.count("| small ") == 2
    assert "small, batch 3, context 12, graph: unsupported: graph must be None or False here" in tables


def test_attention(benchmark, monkeypatch):
    monkeypatch.setattr(generation, "SMALL_SHAPES", (Shape(2, 40, 4, 2, 16),))
    rows, tables = benchmark("--attention")
    assert [row["contender"] for row in rows] == ["torch", "ours"]
    for row in rows:
        assert row["status"] == "ok"
        assert float(row["difference"]) < 1e-5
        assert int(row["cache_bytes"]) == 2 * 2 * 2 * 40 * 16 * 4
        assert float(row["gb_per_s"]) == pytest.approx(int(row["cache_bytes"]) / float(row["median_ms"]) / 1e6)
        assert row["tokens_per_s"] == ""
    assert tables.count("| attention ") == 2


def test_what_is_measured_already_is_kept(benchmark, monkeypatch):
    first, _ = benchmark("--batch", "1")
    both, _ = benchmark("--batch", "1", "2", "--resume")
    assert both[0] == first[0]
    assert [row["batch"] for row in both] == ["1", "2"]
    benchmark("--batch", "1", "--new-tokens", "3", "--resume", status=2)


def test_what_fails_while_it_is_timed_is_a_row(benchmark, monkeypatch):
    def fail(*arguments, **options):
        raise ArithmeticError("no time")

    monkeypatch.setattr(generation_cells, "call_milliseconds", fail)
    rows, tables = benchmark("--batch", "1")
    assert [(row["status"], row["reason"]) for row in rows] == [("error", "ArithmeticError: no time")]
    assert "## Without a figure" in tables


def test_a_lost_device_ends_the_run(benchmark, monkeypatch):
    def lose(*arguments):
        raise DeviceLostError("gone")

    benchmark("--batch", "1")
    monkeypatch.setattr(generation, "measure_steps", lose)
    benchmark("--batch", "2", "--resume", status=3)


def test_bytes_that_a_step_reads():
    config = TransformerConfig(**TINY, context_length=64)
    untied, tied = Transformer(config), Transformer(TransformerConfig(**TINY, context_length=64, tie_embeddings=True))
    # A head that is the embedding is read whole, and an embedding that is none is not.
    assert weight_bytes(untied) == weight_bytes(tied) == 4 * (config.parameters() - 40 * 32)
    assert cache_bytes(config, 3, 10, torch.bfloat16) == 2 * 2 * 3 * 10 * 16 * 2
    windowed = TransformerConfig(**TINY, context_length=64, window=4)
    assert cache_bytes(windowed, 1, 10, torch.bfloat16) == 2 * 2 * 4 * 16 * 2


@pytest.mark.parametrize("name", ["context", "new-tokens", "rounds", "layers"])
def test_numbers_that_make_no_sense(name, capsys):
    with pytest.raises(SystemExit):
        generation.parse([f"--{name}", "0"])
    assert f"--{name} must be at least 1; got 0" in capsys.readouterr().err


def test_with_a_gpu_more_is_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = generation.parse([])
    assert (options.preset, options.context, options.batch, options.dtype) == ("large", 2048, [1, 32], torch.bfloat16)
    assert options.modes == ["eager", "graph", "graph+compile"]


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    common = ["--device", "cuda", "--rounds", "2", "--output", str(tmp_path)]
    assert generation.main([*common, "--batch", "2", "--context", "40", "--modes", "eager", "graph"]) == 0
    with (tmp_path / "results.csv").open() as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["ok", "ok"]
    assert generation.main([*common, "--attention"]) == 0
    with (tmp_path / "results.csv").open() as file:
        rows = [*csv.DictReader(file)]
    ours = [row for row in rows if row["contender"] == "ours"]
    assert len(ours) == len(generation.SHAPES)
    assert all(row["status"] == "ok" and float(row["difference"]) < 0.02 for row in ours)
