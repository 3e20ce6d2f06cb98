"""The benchmark of features: every case runs, rows and tables say what was measured, and failures are rows too."""

from __future__ import annotations

import csv
import functools
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks import feature_cells, feature_flex, feature_peers, features
from benchmarks.comparison import DeviceLostError, relative_difference
from benchmarks.feature_cases import CASES, OURS, PEERS
from benchmarks.feature_cells import PASSES, Cell, CellRun, Conditions, first_call, prepared
from benchmarks.feature_report import COLUMNS, lines_of, report
from benchmarks.feature_setting import Sizes, lengths_of, sequence_starts
from cs336_systems.kernels.torch_names import without_donated_buffers
from cs336_systems.profiling.sweep import Outcome, Status
from cs336_systems.profiling.timing import TimingMethod

SMALL = Conditions(torch.device("cpu"), torch.float32, "naive", rounds=1)
SIZES = Sizes(2, 2, 96, 16)


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch):
    quick = functools.partial(TimingMethod, warmup_ms=0, repetitions_ms=0, pause_ms=0)
    monkeypatch.setattr(feature_cells, "TimingMethod", quick)


@pytest.fixture
def eager_flex(monkeypatch):
    """FlexAttention as plain PyTorch, which is what its kernels are held to."""
    # It would refuse the backward pass on a CPU, where only its kernels have none.
    monkeypatch.setattr(
        sys.modules[flex_attention.__module__], "_validate_device", lambda *tensors: None, raising=False
    )
    torch.compiler.reset()  # it is traced, once for each case, which would be too often
    monkeypatch.setattr(feature_flex, "compiled", lambda: flex_attention)
    monkeypatch.setattr(feature_flex, "compiled_with_sinks", lambda: feature_flex.with_sinks)


@pytest.fixture
def benchmark(tmp_path):
    """Runs the command with these arguments; returns the rows of the CSV file and the text of the tables."""

    def run(*arguments):
        common = ("--device", "cpu", "--rounds", "1", "--heads", "2", "--batch", "1", "--dtype", "fp32", "--jobs", "0")
        assert features.main([*common, "--against", "sdpa", "--output", str(tmp_path), *arguments]) == 0
        with (tmp_path / "results.csv").open() as file:
            return [*csv.DictReader(file)], (tmp_path / "tables.md").read_text()

    return run


def test_every_case_is_measured(benchmark):
    rows, tables = benchmark("--length", "48", "--dims", "8", "--impl", "tiled")
    ours = [row for row in rows if row["implementation"] == OURS]
    assert [(row["case"], row["pass"]) for row in ours] == [(case, which) for case in CASES for which in PASSES]
    assert {row["status"] for row in ours} == {"ok"}
    assert all(float(row["median_ms"]) > 0 for row in ours)
    assert not [row for row in rows if row["warning"]]
    assert {row["implementation"] for row in rows if row["case"] == "window_4096"} == {OURS, "sdpa", "plain"}
    refused = {row["case"] for row in rows if row["status"] == "unsupported"}
    assert refused == {"softcap", "alibi", "relative_bias", "sinks"}
    for case in CASES:
        assert f"| {case}, forward" in tables


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("name", ["flex", "sdpa"])
@pytest.mark.parametrize("case", CASES)
def test_peers_compute_the_same(eager_flex, case, name, which):
    """Documents and packed sequences above all, which each library describes in another way."""
    if not callable(CASES[case].makers.get(name)) or CASES[case].random:
        pytest.skip("there is nothing to compare")
    cell = Cell(case, SIZES, which)
    expected = prepared(cell, OURS, SMALL).results()
    assert relative_difference(prepared(cell, name, SMALL).results(), expected) < 1e-5


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # other libraries' compilers have much to say
@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("case", CASES)
def test_peers_compute_the_same_on_a_gpu(case, name, which):
    """What is compared in time is one and the same function."""
    if not callable(CASES[case].makers.get(name)) or CASES[case].random:
        pytest.skip("there is nothing to compare")
    if folder := os.environ.get("PEERS"):  # as for the benchmark's --peers
        feature_cells.add_peers(Path(folder))
    if name == "fa4" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("FlashAttention-4 is not installed")
    cell = Cell(case, Sizes(2, 2, 512, 64), which)
    conditions = Conditions(torch.device("cuda"), torch.bfloat16, "flash")
    with without_donated_buffers():
        expected = prepared(cell, OURS, conditions).results()
        try:
            found = prepared(cell, name, conditions).results()
        except RuntimeError as error:
            if "No valid triton configs" in str(error):
                pytest.skip("FlexAttention finds no tile for this case that fits")
            raise
        assert relative_difference(found, expected) < 0.03


def test_the_visible_share_is_what_the_masks_show():
    """Counted in what torch's function is given as a mask, or as lengths."""
    setting = SMALL.setting(SIZES)
    for case in ("window_quarter", "window_sixteenth", "document"):
        attend: Any = CASES[case].makers["sdpa"](setting).attend
        mask = attend.keywords["attn_mask"]
        assert CASES[case].visible(SIZES) == pytest.approx(mask.float().mean().item())
    lengths = lengths_of(sequence_starts(SIZES))
    assert sum(lengths) == SIZES.tokens
    assert max(lengths) <= SIZES.length
    pairs = sum(torch.ones(length, length).tril().sum().item() for length in lengths)
    assert CASES["packed"].visible(SIZES) == pytest.approx(pairs / (SIZES.batch * SIZES.length**2))
    assert CASES["window_4096"].visible(SIZES) == CASES["causal"].visible(SIZES) == pytest.approx(0.5 + 0.5 / 96)


@pytest.mark.parametrize("length", [512, 500])
def test_block_masks_are_made_in_strips_of_rows(monkeypatch, length):
    """Of what `create_block_mask` makes, nothing differs."""
    monkeypatch.setattr(feature_flex, "_ROWS", 256)

    def visible(batch, head, row, column):
        return (row >= column) & (column >= row - 130)

    mask = feature_flex.block_mask(visible, length, SMALL.device)
    expected = create_block_mask(visible, None, None, length, length, device="cpu")
    assert mask.shape == expected.shape
    for part in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        for name in (part, part.replace("kv", "q")):
            assert torch.equal(getattr(mask, name), getattr(expected, name)), name
    assert torch.equal(mask.to_dense(), expected.to_dense())


def test_the_backward_reaches_what_was_learned():
    """Else a bias with a gradient would cost what one without does."""
    gradients = prepared(Cell("learned_bias", SIZES, "backward"), OURS, SMALL).call()
    assert [tuple(x.shape) for x in gradients] == [tuple(SIZES)] * 3 + [(2, 96, 96)]


def test_flash_attention_4_is_given_its_own_arguments(monkeypatch):
    """Length first, or packed, with a window and with sinks; it returns the log-sum-exp too."""
    calls = []

    def fake(q, k, v, **named):
        calls.append((tuple(q.shape), named))
        return q * 1, None

    module = types.SimpleNamespace(flash_attn_func=fake, flash_attn_varlen_func=fake)
    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(cute=module))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    for case in ("causal", "window_quarter", "softcap", "sinks", "packed", "document"):
        (result,) = prepared(Cell(case, SIZES, "forward"), "fa4", SMALL).results()
        assert result.shape == (SIZES.tokens, 2, 16)
    shapes, named = zip(*calls, strict=True)
    assert shapes == ((2, 96, 2, 16),) * 4 + ((192, 2, 16),) * 2
    assert all(keywords.pop("causal") is True for keywords in named)
    assert named[:3] == ({}, {"window_size": (24, 0)}, {"softcap": 30.0})
    assert named[3]["learnable_sink"].shape == (2,)
    for keywords in named[4:]:
        assert keywords["cu_seqlens_q"].dtype == torch.int32
        assert keywords["cu_seqlens_q"][-1] == SIZES.tokens
        assert keywords["max_seqlen_k"] == keywords["cu_seqlens_k"].diff().max()


def test_what_cannot_be_measured_is_a_row_with_the_reason(benchmark, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    rows, tables = benchmark(
        *("--cases", "softcap", "--passes", "forward", "--length", "16", "--impl", "flash", "--against")
    )
    assert [(row["implementation"], row["median_ms"], row["status"]) for row in rows] == [
        (OURS, "", "error"),
        ("plain", "", "error"),
    ]
    assert "impl='flash' cannot compute this call" in rows[0]["reason"]
    assert "- ours softcap, forward, d 64, length 16: error: ValueError: impl='flash' cannot compute" in tables


def test_slow_ones_and_those_that_ran_out_of_memory_are_rows(monkeypatch):
    def exhausted(setting):
        raise torch.OutOfMemoryError("CUDA out of memory")

    makers = {**CASES["causal"].makers, "flex": exhausted}
    monkeypatch.setitem(CASES, "causal", CASES["causal"]._replace(makers=makers))
    cell = Cell("causal", SIZES, "forward")
    measured = CellRun(cell, SMALL).measure([OURS, "flex", "sdpa"])
    assert [(name, m.outcome.status) for name, m in measured.items()] == [
        (OURS, Status.OK),
        ("flex", Status.OUT_OF_MEMORY),
        ("sdpa", Status.OK),
    ]
    late = Conditions(SMALL.device, SMALL.dtype, SMALL.impl, rounds=1, limit=0)
    outcome = CellRun(cell, late).measure([OURS])[OURS].outcome
    assert outcome.status is Status.SKIPPED
    assert "its first call took" in outcome.reason
    slow = Conditions(SMALL.device, SMALL.dtype, SMALL.impl, rounds=1, max_seconds=0)
    assert "one call takes" in CellRun(cell, slow).measure([OURS])[OURS].outcome.reason
    known = {OURS: Outcome(Status.ERROR, "it ended its process")}
    measured = CellRun(cell, SMALL, known=known).measure([OURS, "sdpa"])
    assert measured[OURS].outcome == known[OURS]
    assert measured["sdpa"].times is not None


def test_a_lost_device_ends_the_run_and_says_who_lost_it(monkeypatch, tmp_path, capsys):
    def broken(setting):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def lost(device, name):
        raise DeviceLostError(f"the device no longer answered after {name} failed")

    makers = {OURS: CASES["sinks"].makers[OURS], "sdpa": broken}
    monkeypatch.setitem(CASES, "sinks", CASES["sinks"]._replace(makers=makers))
    monkeypatch.setattr(feature_cells, "release_memory_of_failure", lost)
    arguments = ["--device", "cpu", "--length", "16", "--cases", "sinks", "--passes", "forward", "--impl", "naive"]
    arguments += ["--output", str(tmp_path), "--jobs", "0"]
    assert features.main(arguments) == 3
    with (tmp_path / "results.csv").open() as file:
        rows = {row["implementation"]: (row["status"], row["reason"]) for row in csv.DictReader(file)}
    assert [status for status, _ in rows.values()] == ["skipped", "error", "skipped"]
    assert "illegal memory access" in rows["sdpa"][1]
    assert "after sdpa failed" in rows[OURS][1]
    capsys.readouterr()
    assert features.main([*arguments, "--resume"]) == 0
    assert "sinks forward" not in capsys.readouterr().out


def test_first_calls_in_other_processes(capsys, tmp_path, monkeypatch):
    """They say how long it took; what fails is tried again by the process that measures."""
    assert first_call((Cell("causal", SIZES, "backward"), OURS, SMALL)) > 0
    wrong = Conditions(SMALL.device, SMALL.dtype, "none", rounds=1)
    assert str(first_call((Cell("causal", SIZES, "forward"), OURS, wrong))).startswith("error: ValueError")
    arguments = ["--device", "cpu", "--length", "16", "--cases", "causal", "--passes", "forward", "--impl", "naive"]
    assert features.main([*arguments, "--rounds", "1", "--jobs", "1", "--output", str(tmp_path)]) == 0
    assert "[1/1, " in capsys.readouterr().out


def test_a_run_goes_on_where_it_stopped(benchmark, tmp_path, capsys):
    arguments = ("--length", "16", "--impl", "naive", "--passes", "forward")
    first, _ = benchmark(*arguments, "--cases", "causal")
    both, tables = benchmark(*arguments, "--cases", "causal", "sinks", "--resume")
    assert [row for row in both if row["case"] == "causal"] == first
    assert "| sinks, forward" in tables
    assert features.main(["--device", "cpu", "--impl", "tiled", "--resume", "--output", str(tmp_path)]) == 2
    assert "impl was 'naive'" in capsys.readouterr().err
    anew, _ = benchmark(*arguments, "--cases", "sinks")
    assert {row["case"] for row in anew} == {"sinks"}


def test_what_ended_its_process_is_not_tried_again(benchmark, tmp_path):
    arguments = ("--length", "16", "--impl", "naive", "--passes", "forward", "--cases", "causal")
    rows, _ = benchmark(*arguments)
    (tmp_path / "journal.jsonl").write_text("")
    key = "causal forward batch 1 heads 2 length 16 d 64"
    (tmp_path / "under-way.json").write_text(f'{{"under_way": "{key}: sdpa", "deaths": {{}}}}')
    rows, _ = benchmark(*arguments, "--resume")
    assert [(row["implementation"], row["status"]) for row in rows] == [(OURS, "ok"), ("sdpa", "error")]


def test_the_table_names_the_best_peer():
    def row(name, median, **more):
        empty = dict.fromkeys(COLUMNS, "")
        facts = {"case": "sinks", "pass": "forward", "head_dim": 64, "batch": 1, "length": 8, "visible": 0.5}
        timed = {"status": "ok", "median_ms": median, "speedup_of_ours": None, "of_plain": 1.25}
        return {**empty, **facts, "implementation": name, **timed, **more}

    rows = [row("ours", 2.0), row("flex", 6.0, speedup_of_ours=3.0), row("fa4", 4.0, speedup_of_ours=2.0)]
    rows += [row("sdpa", None, status="oom", reason="too much"), row("plain", 1.6)]
    (line,) = lines_of(rows)
    names = ("sinks, forward", "64", "1", "8", "50")
    assert line == [*names, "2.00", "6.00", "4.00", "–", "2.00", "fa4", "1.25"]
    assert "- sdpa sinks, forward, d 64, length 8: oom: too much" in report(rows, [])


def test_sizes_of_the_command_line():
    def lengths(*arguments):
        cells = features.cells_of(features.parse(["--dims", "64", "--passes", "forward", *arguments]))
        return [(cell.case, cell.sizes.batch, cell.sizes.length) for cell in cells]

    options = features.parse(["--cases", "causal", "window_4096"])
    options.length = options.batch = None
    sizes = {(cell.case, *cell.sizes[::2]) for cell in features.cells_of(options)}
    assert sizes == {("causal", 2, 8192), ("window_4096", 1, 16384), ("window_4096", 1, 65536)}
    assert lengths("--cases", "window_4096", "--length", "32768", "--batch", "3") == [("window_4096", 3, 32768)]
    with pytest.raises(SystemExit):
        features.parse(["--peers", "no/such/folder"])
    assert feature_peers.why_no_fa4(torch.device("cpu")) is not None
