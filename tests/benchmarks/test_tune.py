"""The search for tile configurations, as far as it goes without a GPU."""

from __future__ import annotations

import csv
import math
from types import SimpleNamespace

import pytest
import torch

from benchmarks import tune, tune_trial
from benchmarks.processes import Finished
from benchmarks.tune_candidates import Row, candidates, numbers_a_thread, shared_bytes_at_least
from benchmarks.tune_trial import MASKS, RULES, Problem, Trial, check, check_ragged
from cs336_systems.kernels import tuning
from cs336_systems.kernels.launching import INTERPRETED
from cs336_systems.kernels.tuning import TABLES, TileConfig
from cs336_systems.profiling.timing import RoundTimes

HOPPER, KIB = (9, 0), 1024
ROW = Row("forward", "half", 64)
NOW = TileConfig(64, 64, 4, 3)


@pytest.mark.parametrize(
    ("row", "tiles", "compiled_kib"),
    [  # what Triton 3.7 takes for sm_90
        (("forward", "half", 128), (128, 128, 8, 2), 160),
        (("forward", "half", 128), (64, 128, 4, 3), 208),
        (("forward", "float32", 128), (64, 32, 8, 3), 132),
        (("forward", "half", 128), (128, 128, 8, 1), 64),
        (("forward", "float32", 64), (64, 64, 2, 5), 144),
        (("forward", "half", 32), (64, 64, 2, 5), 36),
        (("dq", "half", 128), (128, 64, 8, 4), 192),
        (("dq", "float32", 128), (64, 64, 8, 2), 196),
        (("dq", "float32", 128), (64, 16, 2, 3), 100),
        (("dq", "float32", 16), (32, 16, 4, 3), 8),
        (("dkdv", "half", 128), (128, 64, 8, 4), 291),
        (("dkdv", "half", 256), (16, 64, 8, 5), 144),
        (("dkdv", "float32", 128), (64, 32, 8, 3), 169),
        (("dkdv", "float32", 128), (64, 64, 8, 1), 132),
    ],
)
def test_the_bound_of_shared_memory_is_one(row, tiles, compiled_kib):
    bound = shared_bytes_at_least(Row(*row), TileConfig(*tiles), HOPPER)
    assert bound <= compiled_kib * KIB
    if tiles[3] > 1 and tiles[2] >= 4 and row[0] == "forward":
        assert bound >= 0.9 * compiled_kib * KIB  # and close, where the tile is Hopper's


@pytest.mark.parametrize("key", TABLES["sm_90"])
def test_the_tables_row_comes_first_and_each_candidate_may_fit(key):
    row, now = Row(*key), TABLES["sm_90"][key]
    configs = candidates(row, now, HOPPER, 227 * KIB)
    assert configs[0] == now
    assert len(set(configs)) == len(configs) > 20
    assert shared_bytes_at_least(row, now, HOPPER) <= 227 * KIB
    for config in configs[1:]:
        assert shared_bytes_at_least(row, config, HOPPER) <= 227 * KIB
        assert numbers_a_thread(row, config) <= 288
    # Small tiles are there for grids that would otherwise leave multiprocessors idle.
    assert any(row.kept(config) == 16 for config in configs)


def test_less_shared_memory_leaves_fewer():
    row = Row("dq", "half", 256)
    assert len(candidates(row, NOW, (8, 6), 99 * KIB)) < len(candidates(row, NOW, HOPPER, 227 * KIB))


def test_the_forward_is_tried_with_a_pipeline_alone_on_hopper():
    stages = {
        (name, capability): {
            config.num_stages for config in candidates(Row(name, "half", 64), NOW, capability, 160 * KIB)
        }
        for name in ("forward", "dq")
        for capability in (HOPPER, (8, 0))
    }
    assert 1 not in stages["forward", HOPPER]
    assert all(1 in found for key, found in stages.items() if key != ("forward", HOPPER))


def test_scores_a_step_ahead_are_tried_in_the_forward_alone():
    assert {config.ahead for config in candidates(ROW, NOW, HOPPER, 227 * KIB)} == {False, True}
    assert not any(config.ahead for config in candidates(Row("dq", "half", 64), NOW, HOPPER, 227 * KIB))
    usual, ahead = TileConfig(64, 128, 4, 2), TileConfig(64, 128, 4, 2, ahead=True)
    assert numbers_a_thread(ROW, ahead) - numbers_a_thread(ROW, usual) == 64 * 128 / 128


@pytest.mark.skipif(not INTERPRETED, reason="the kernels are not interpreted")
@pytest.mark.parametrize("name", ["forward", "dkdv"])
def test_a_configuration_that_is_right(name):
    problem = Problem(Row(name, "float32", 16), batch=1, heads=1, length=48)  # Triton interprets no bfloat16
    assert check(Trial(problem, TileConfig(32, 16, 4, 1), device="cpu")) == ""


@pytest.mark.skipif(not INTERPRETED, reason="the kernels are not interpreted")
def test_a_configuration_for_rules_that_is_right():
    problem = Problem(Row("dq", "float32", 16), batch=1, heads=2, length=48, with_rules=True)
    assert problem.cases == RULES
    assert check(Trial(problem, TileConfig(32, 16, 4, 1), device="cpu")) == ""


@pytest.mark.skipif(not INTERPRETED, reason="the kernels are not interpreted")
def test_wrong_results_are_told(monkeypatch):
    used = []

    def wrong(q, k, v, causal, impl):
        used.append(tuning.lookup("forward", "half", 16, torch.device("cpu")))
        return 1.1 * torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=bool(causal))

    monkeypatch.setattr(tune_trial, "attention", wrong)
    trial = Trial(Problem(Row("forward", "half", 16), 1, 1, 32), TileConfig(32, 16, 4, 1), device="cpu")
    assert "wrong results: " in check(trial)
    assert used == [trial.config]


@pytest.mark.parametrize("message", ["an illegal memory access was encountered", "PassManager::run failed"])
def test_what_breaks_the_device_breaks_the_process(monkeypatch, message):
    def broken(q, k, v, causal, impl):
        raise RuntimeError(message)

    monkeypatch.setattr(tune_trial, "attention", broken)
    trial = Trial(Problem(Row("forward", "half", 16), 1, 1, 32), NOW, device="cpu")
    if message.startswith("Pass"):
        assert check_ragged(trial) == f"RuntimeError: {message}"
    else:
        with pytest.raises(RuntimeError, match=message):
            check(trial)


def test_checked_sizes_are_compiled_as_timed_ones_are():
    for size, enough in ((16384, 512), (1000, 512), (100, 512), (128, 16), (25, 16), (1, 16)):
        reduced = tune_trial._reduced(size, enough)
        assert reduced % 16 == size % 16
        assert reduced <= size
        assert (reduced == 1) == (size == 1)


def test_a_batch_of_many_is_checked_as_a_batch(monkeypatch):
    sizes = []
    monkeypatch.setattr(tune_trial, "_wrong", lambda trial, *given: sizes.append(given) or "")
    check(Trial(Problem(Row("forward", "half", 16), batch=8, heads=1, length=1024), NOW, device="cpu"))
    assert sizes == [(8, 1, 512, 512)]


@pytest.fixture
def gpu(monkeypatch):
    """A GPU on which tile_q decides the time, and on which some configurations fail."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: HOPPER)
    properties = SimpleNamespace(shared_memory_per_block_optin=227 * KIB, name="NVIDIA H200", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(tuning, "lookup", lambda *row: NOW)
    monkeypatch.setattr(tuning, "processors_of", lambda device: properties.multi_processor_count)
    monkeypatch.setattr(tune, "inputs_of", lambda problem, device: ())
    monkeypatch.setattr(tune.time, "sleep", lambda seconds: None)
    state = SimpleNamespace(checks=lambda trial: "", ragged=lambda trial: "", times=lambda trial: trial.config.tile_q)

    def run_jobs(function, trials, **options):
        for trial in trials:
            answer = state.ragged(trial) if function is check_ragged else state.checks(trial)
            yield Finished(trial, answer, "")

    monkeypatch.setattr(tune, "run_jobs", run_jobs)
    monkeypatch.setattr(tune, "milliseconds", lambda trial, tensors, mask, method: state.times(trial))
    return state


def searched(tmp_path, *arguments: str, deadline: float = math.inf):
    options = tune.parse(["--rounds", "2", "--most", "40", "--finalists", "3", *arguments])
    log = tune.Log(tmp_path / "measurements.csv")
    best = tune.search(tune.problem_of(ROW, options), {}, options, log, deadline)
    with (tmp_path / "measurements.csv").open(newline="") as file:
        return best, list(csv.DictReader(file))


def test_the_fastest_right_configuration_wins(tmp_path, gpu, capsys):
    gpu.checks = lambda trial: "wrong results: out" if trial.config.tile_q == 16 else ""
    best, rows = searched(tmp_path, deadline=tune.time.monotonic() + 600)
    assert best is not None
    assert best.tile_q == 32
    printed = capsys.readouterr().out
    assert f'("forward", "half", 64): TileConfig(32, {best.tile_k}, ' in printed
    assert "2.000 × the table's row" in printed
    assert "(now)" in printed
    by_stage = {stage: [row for row in rows if row["stage"] == stage] for stage in ("check", "first", "final")}
    assert {row["status"] for row in by_stage["check"]} == {"ok", "wrong results: out"}
    assert not any(row["tile_q"] == "16" for row in by_stage["first"])
    assert len(by_stage["final"]) == (3 + 1) * len(MASKS) * 2
    assert float(by_stage["final"][0]["milliseconds"]) > 0


def test_a_winner_that_is_wrong_on_ragged_lengths_is_out(tmp_path, gpu, capsys):
    gpu.ragged = lambda trial: "wrong results: dq" if trial.config.tile_q != 64 else ""
    best, rows = searched(tmp_path, deadline=tune.time.monotonic() + 600)
    assert best == NOW
    assert "is out: wrong results: dq" in capsys.readouterr().out
    assert [row["status"] for row in rows if row["stage"] == "check ragged"][-1] == "ok"


def test_a_configuration_that_fails_while_it_is_timed_is_left_out(tmp_path, gpu):
    def times(trial):
        if trial.config.tile_q < 64:
            raise RuntimeError("Triton Error [CUDA]: misaligned address")
        return trial.config.tile_q

    gpu.times = times
    best, rows = searched(tmp_path, deadline=tune.time.monotonic() + 600)
    assert best is not None
    assert best.tile_q == 64
    assert any("misaligned" in row["status"] for row in rows)


def test_no_time_and_nothing_right(tmp_path, gpu):
    assert searched(tmp_path, deadline=tune.time.monotonic() - 1)[0] is None
    gpu.checks = lambda trial: "OutOfResources: shared memory"
    assert searched(tmp_path, deadline=tune.time.monotonic() + 600)[0] is None


def test_rows_share_the_time_and_stop_with_it(monkeypatch, capsys):
    options = tune.parse(["--dims", "64", "128", "--passes", "dq", "dkdv", "--time-limit", "40"])
    clock, seen = [0.0], []
    monkeypatch.setattr(tune.time, "monotonic", lambda: clock[0])

    def search_one(problem, others, options, log, deadline):
        seen.append((problem.row.name, problem.row.head_dim, problem.heads, dict(others), deadline))
        clock[0] += 25
        return NOW

    found = tune.search_all(options, None, search_one)
    assert seen == [("dq", 64, 32, {}, 10.0), ("dkdv", 64, 32, {"dq": NOW}, 30.0)]
    assert list(found) == [Row("dq", "half", 64), Row("dkdv", "half", 64)]
    assert 'no time was left for ("dq", "half", 128), ("dkdv", "half", 128)' in capsys.readouterr().out


def test_the_problem_follows_tokens_and_channels_or_is_given():
    assert tune.problem_of(ROW, tune.parse([])).shape == (4, 32, 4096, 64)
    given = tune.parse(["--length", "512", "--batch", "8", "--heads", "1"])
    assert tune.problem_of(ROW, given).shape == (8, 1, 512, 64)


def test_a_score_counts_both_masks_alike():
    assert tune.score({"bottom_right": RoundTimes((1.0,)), "none": RoundTimes((4.0,))}) == 2.0


def test_what_cannot_be_searched(capsys):
    with pytest.raises(SystemExit):
        tune.parse(["--rounds", "0"])
    assert "--rounds must be positive; got 0" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert tune.main([]) == 2
        assert "needs a CUDA GPU" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_small_search_on_a_gpu(tmp_path, capsys):
    shape = ["--length", "256", "--batch", "1", "--heads", "2", "--dims", "64", "--passes", "forward", "dkdv"]
    assert tune.main([*shape, "--most", "4", "--jobs", "2", "--time-limit", "300", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert '("forward", "half", 64): TileConfig(' in printed
    assert '("dkdv", "half", 64): TileConfig(' in printed
    assert (tmp_path / "measurements.csv").read_text().count(",final,") >= 2 * len(MASKS)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("length", "table"), [(64 * 6, "TABLES"), (64 * 5, "SMALL_GRIDS")])
def test_rows_found_on_few_programs_are_for_small_grids(length, table):
    assert tune.table_of(Problem(ROW, batch=3, heads=4, length=length), torch.device("cuda", 0)) == table
