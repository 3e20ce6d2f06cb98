"""The search for tile configurations, as far as it goes without a GPU."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from benchmarks import tune
from benchmarks.lib import harness
from benchmarks.lib.comparison import Context
from benchmarks.lib.isolation import Finished
from benchmarks.parts.tune_candidates import TableRow, candidates, tiles
from benchmarks.tune import RAGGED, check, measure, parse, rows_of, scores, table_of, tables, time_candidates
from cs336_systems.kernels.launching import INTERPRETED
from cs336_systems.profiling.timing import TimingMethod

HOPPER, KIB, CPU = (9, 0), 1024, torch.device("cpu")
TileConfig, TABLE = tiles().TileConfig, tiles().TABLES["sm_90"]
ROW = TableRow("forward", "half", 64, batch=4, heads=32, length=4096)
SMALL = TableRow("forward", "float32", 16, batch=1, heads=1, length=32)  # Triton interprets no bfloat16
NOW, TILE = TileConfig(64, 64, 4, 3), TileConfig(32, 16, 4, 1)
interpreted = pytest.mark.skipif(not INTERPRETED, reason="the kernels are not interpreted")


def row_of(kernel, precision, head_dim):
    return dataclasses.replace(ROW, kernel=kernel, precision=precision, head_dim=head_dim)


@pytest.mark.parametrize(
    ("key", "config", "compiled_kib"),
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
def test_the_bound_of_shared_memory(key, config, compiled_kib):
    bound = row_of(*key).shared_bytes(TileConfig(*config), HOPPER)
    assert bound <= compiled_kib * KIB
    if config[3] > 1 and config[2] >= 4 and key[0] == "forward":
        assert bound >= 0.9 * compiled_kib * KIB


@pytest.mark.parametrize("key", TABLE)
def test_candidates(key):
    row, now = row_of(*key), TABLE[key]
    found = candidates(row, now, HOPPER, 227 * KIB)
    assert found[0] == now
    assert len(set(found)) == len(found) > 20
    less = candidates(row, now, HOPPER, 32 * KIB)
    assert set(less[1:]) < set(found)
    assert all(row.shared_bytes(config, HOPPER) <= 32 * KIB for config in less[1:])
    for config in found:
        assert row.shared_bytes(config, HOPPER) <= 227 * KIB
        assert row.numbers_per_thread(config) <= 288
    assert any(row.kept(config) == 16 for config in found)  # for grids that would leave SMs idle
    forward = row.kernel == "forward"
    assert any(config.num_stages == 1 for config in found[1:]) != forward
    assert {config.ahead for config in found} == ({False, True} if forward else {False})
    assert not any(c.ahead for c in candidates(dataclasses.replace(row, mods=True), now, HOPPER, 227 * KIB)[1:])


def test_scores_one_step_ahead_take_registers():
    ahead = dataclasses.replace(NOW, ahead=True)
    assert ROW.numbers_per_thread(ahead) - ROW.numbers_per_thread(NOW) == 64 * 64 / 128


@interpreted
@pytest.mark.parametrize("row", [SMALL, dataclasses.replace(SMALL, kernel="dkdv", mods=True)])
def test_a_right_configuration(row):
    check(TILE, row, {}, (1, 1, 32, 32), CPU)


@interpreted
def test_wrong_results_are_an_error_of_the_configuration_that_is_tried(monkeypatch):
    used = []

    def wrong(q, k, v, causal, impl):
        used.append([tiles().lookup(kernel, "float32", 16, CPU) for kernel in ("forward", "dq")])
        return 1.1 * torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=bool(causal))

    monkeypatch.setattr(tune, "attention", wrong)
    with pytest.raises(AssertionError, match="beyond the budget"):
        check(TILE, SMALL, {"dq": NOW}, (1, 1, 32, 32), CPU)
    assert used == [[TILE, NOW]]


@pytest.mark.parametrize("size", [16384, 1000, 100, 128, 25, 1])
def test_checked_sizes_compile_like_timed_ones(size):
    for enough in (512, 16):
        found = tune.reduced(size, enough)
        assert found % 16 == size % 16
        assert found <= size
        assert (found == 1) == (size == 1)


@interpreted
def test_candidates_are_timed_in_turns():
    options = SimpleNamespace(device=CPU)
    method = TimingMethod(rounds=1, warmup_ms=0, repetitions_ms=0, pause_ms=0)
    context = Context(options, excluded={f"{NOW} full": "crashed"})
    for row in (SMALL, dataclasses.replace(SMALL, kernel="dq")):
        rows = time_candidates(row, [TILE, NOW], {}, method, float("inf"), context)
        assert [(r["mask"], r["status"]) for r in rows] == [
            *(("causal", "ok"), ("full", "ok"), ("causal", "ok"), ("full", "error"))
        ]
        assert [*scores(rows)] == [str(dataclasses.astuple(TILE))]
    rows = time_candidates(SMALL, [TILE], {}, method, -1.0, context)
    assert {r["reason"].partition(" (")[0] for r in rows} == {"TimeoutError: no time was left"}


@pytest.fixture
def gpu(monkeypatch):
    """A GPU on which tile_q is the time; `wrong` and `ragged` say why a check fails, `times` what a time is."""
    properties = SimpleNamespace(shared_memory_per_block_optin=227 * KIB, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: HOPPER)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(tiles(), "lookup", lambda *row: NOW)
    state = SimpleNamespace(wrong=lambda config: "", ragged=lambda config: "", times=lambda config: config.tile_q)
    state.others, state.sizes = [], []

    def map_isolated(function, jobs, **limits):
        for job in jobs:
            state.sizes.append(job[3])
            yield job, Finished(failure=state.wrong(job[0]))

    def run_isolated(function, *arguments, **limits):
        if function is check:
            return Finished(failure=state.ragged(arguments[0]))
        row, configs, others, *_, context = arguments
        state.others.append(dict(others))
        return state.timing(row, configs, context)

    def timing(row, configs, context):
        crashing = [c for c in configs if state.times(c) is None and f"{c} full" not in context.excluded]
        if crashing:
            return Finished(failure="the process crashed", provider=f"{crashing[0]} full")
        known = [(c, mask) for c in configs for mask in ("causal", "full") if state.times(c) is not None]
        figures = [{"median_ms": state.times(c), "speedup": 64 / c.tile_q} for c, _ in known]
        pairs = zip(known, figures, strict=True)
        return Finished([{"mask": mask, **tune.vars_of(c, row), "status": "ok", **f} for (c, mask), f in pairs])

    state.timing = timing
    monkeypatch.setattr(tune, "map_isolated", map_isolated)
    monkeypatch.setattr(tune, "run_isolated", run_isolated)
    monkeypatch.setattr(harness, "run_isolated", run_isolated)
    return state


def search(row=ROW, rows=(), *arguments):
    options = parse(["--device", "cpu", "--candidates", "40", "--finalists", "3", *arguments])
    return pd.DataFrame(
        [{"case": row.name, **row.columns, "status": "ok", **r} for r in measure(row, Context(options, rows))]
    )


def test_the_fastest_right_configuration_wins(gpu):
    gpu.wrong = lambda config: "AssertionError: beyond the budget" if config.tile_q == 16 else ""
    frame = search()
    (winner,) = frame[frame["stage"] == "winner"].to_dict("records")
    assert winner["tile_q"] == 32
    assert winner["table"] == "TABLES"
    assert set(frame[frame["stage"] == "check"]["tile_q"]) == {16}
    assert 16 not in set(frame[frame["stage"] == "first"]["tile_q"])
    final = frame[frame["stage"] == "final"]
    assert len(final) == (3 + 1) * 2
    assert str(dataclasses.astuple(NOW)) in set(final["tiles"])
    assert set(gpu.sizes) == {(4, 16, 512, 512)}
    text = tables(frame)
    assert f'("forward", "half", 64): TileConfig{winner["tiles"]},' in text
    assert [line.split("|")[-2].strip() for line in text.splitlines()[-2:]] == ["2.00"] * 2


def test_a_winner_is_right_at_ragged_lengths(gpu):
    gpu.ragged = lambda config: "AssertionError: dq" if config.tile_q != 64 else ""
    frame = search()
    assert set(frame[frame["stage"] == "winner"]["tile_q"]) == {64}
    assert "AssertionError: dq" in set(frame[frame["stage"] == "ragged check"]["reason"])
    assert RAGGED[2] % 16
    assert RAGGED[2] != RAGGED[3]


def test_a_candidate_that_ends_the_process_is_excluded(gpu):
    gpu.times = lambda config: None if config.tile_q == 16 else config.tile_q
    frame = search()
    assert set(frame[frame["stage"] == "winner"]["tile_q"]) == {32}
    gpu.timing = lambda row, configs, context: Finished(failure="the driver is gone")
    with pytest.raises(RuntimeError, match="the driver is gone"):
        search()


def test_nothing_right_and_no_time_left(gpu, monkeypatch):
    monkeypatch.setattr(tune.time, "monotonic", iter(range(0, 10**6, 400)).__next__)
    assert search(ROW, (), "--timeout", "900")["stage"].iloc[-1] == "winner"
    assert len(gpu.sizes) == 2
    gpu.wrong = lambda config: "OutOfResources: shared memory"
    frame = search()
    assert set(frame["stage"]) == {"check"}
    assert tables(frame) == f"## {ROW.name}"


def test_the_other_kernel_of_the_backward_runs_with_its_best_tiles(gpu):
    dq, dkdv = (dataclasses.replace(ROW, kernel=name) for name in ("dq", "dkdv"))
    found = search(dq).to_dict("records")
    search(dkdv, found)
    search(dataclasses.replace(dkdv, length=512), found)
    best = TileConfig(*(found[-1][name] for name in ("tile_q", "tile_k", "num_warps", "num_stages", "ahead")))
    assert gpu.others == [{}, {}, {"dq": best}, {"dq": best}, {}, {}]
    assert best.tile_q == 16


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("length", "table"), [(64 * 6, "TABLES"), (64 * 5, "SMALL_GRIDS")])
def test_rows_of_few_programs_are_for_small_grids(length, table):
    assert table_of(dataclasses.replace(ROW, batch=3, heads=4, length=length), torch.device("cuda")) == table


def test_rows_of_the_command_line(capsys):
    def shapes(*arguments):
        return [
            dataclasses.astuple(row) for row in rows_of(parse(["--device", "cpu", "--head-dims", "64", *arguments]))
        ]

    assert shapes("--kernels", "dq", "dkdv") == [
        ("dq", "half", 64, 4, 32, 4096, False),
        ("dkdv", "half", 64, 4, 32, 4096, False),
    ]
    given = ["--lengths", "512", "--batch", "8", "--heads", "1", "--kernels", "dq", "--dtypes", "fp32", "--with-mods"]
    assert shapes(*given) == [("dq", "float32", 64, 8, 1, 512, True)]
    for flag in ("--rounds", "--jobs", "--head-dims", "--kernels"):
        with pytest.raises(SystemExit):
            parse(["--device", "cpu", flag, "0"])
        assert flag in capsys.readouterr().err
    assert tune.main(["--device", "cpu"]) == 2
    assert "--device must be a CUDA GPU; got cpu" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_small_search_on_a_gpu(tmp_path):
    shape = ["--lengths", "256", "--batch", "1", "--heads", "2", "--head-dims", "64", "--kernels", "forward", "dkdv"]
    assert tune.main([*shape, "--candidates", "4", "--jobs", "2", "--timeout", "150", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "tables.md").read_text()
    assert '("forward", "half", 64): TileConfig(' in text
    assert '("dkdv", "half", 64): TileConfig(' in text
