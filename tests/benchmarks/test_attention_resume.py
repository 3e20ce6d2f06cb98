"""Sweeps that are interrupted, run out of time, lose their device or their process, and go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from benchmarks import attention as benchmark
from benchmarks import attention_cell
from benchmarks.attention_rows import rows_from_csv
from cs336_systems.profiling.sweep import Row

SWEEP = ["--lengths", "32", "64", "--dims", "8", "--batch", "1", "--heads", "2", "--rounds", "2", "--device", "cpu"]


def results(folder: Path) -> list[Row]:
    return rows_from_csv(folder / "results.csv")


SWEEP_THAT_DIES = """
import os, sys
from benchmarks import attention as benchmark
from benchmarks.attention_provider import Provider
import torch.nn.functional as F

def bind(name):
    def attend(q, k, v):
        if (name, q.shape[-2]) == ("other", 32):
            os._exit(11)
        return F.scaled_dot_product_attention(q, k, v)
    return lambda problem: attend

benchmark.all_providers = lambda device: [Provider(n, "ours", bind(n)) for n in ("naive", "other")]
sys.exit(benchmark.main(sys.argv[1:]))
"""


def test_an_interrupted_sweep_keeps_finished_cells_and_is_resumed(tmp_path, calls, capsys):
    def interrupt(name: str, length: int) -> None:
        if (name, length) == ("other", 64):
            raise KeyboardInterrupt

    calls.trouble = interrupt
    assert benchmark.main([*SWEEP, "--no-plots", "--output", str(tmp_path)]) == 130
    assert {row["length"] for row in results(tmp_path)} == {32}
    assert f"--resume {tmp_path}" in capsys.readouterr().err
    before = results(tmp_path)

    calls.trouble = lambda name, length: None
    calls.seen.clear()
    assert benchmark.main(["--resume", str(tmp_path), "--no-plots", "--device", "cpu"]) == 0
    assert {length for _, length in calls.seen} == {64}
    after = results(tmp_path)
    assert after[: len(before)] == before
    assert {row["length"] for row in after} == {32, 64}
    assert "[2/2]" in capsys.readouterr().err


def test_the_same_output_continues_and_a_finished_sweep_measures_nothing(tmp_path, calls):
    arguments = [*SWEEP, "--no-plots", "--output", str(tmp_path)]
    assert benchmark.main(arguments) == 0
    calls.seen.clear()
    assert benchmark.main(arguments) == 0
    assert calls.seen == []


def test_a_sweep_is_measured_in_parts(tmp_path, calls, capsys):
    arguments = [*SWEEP, "--causal", "--full", "--no-plots", "--output", str(tmp_path)]
    assert benchmark.main([*arguments, "--filter", "causal.* length 64$"]) == 0
    assert "[1/1]" in capsys.readouterr().err
    assert {(row["mask"], row["length"]) for row in results(tmp_path)} == {("causal", 64)}
    calls.seen.clear()
    assert benchmark.main(arguments) == 0
    assert {(row["mask"], row["length"]) for row in results(tmp_path)} == {
        (mask, length) for mask in ("causal", "full") for length in (32, 64)
    }
    assert sum(length == 32 for _, length in calls.seen) == 2 * sum(length == 64 for _, length in calls.seen)
    assert benchmark.main([*arguments, "--filter", "length 128"]) == 2
    assert "--filter must be found in the name of a cell, as in 'float32 causal" in capsys.readouterr().err


def test_another_configuration_in_the_same_folder_is_an_error(tmp_path, calls, capsys):
    assert benchmark.main([*SWEEP, "--no-plots", "--output", str(tmp_path)]) == 0
    assert benchmark.main([*SWEEP, "--no-plots", "--output", str(tmp_path), "--seed", "9"]) == 2
    assert "seed was 0 and is now 9" in capsys.readouterr().err
    assert benchmark.main(["--resume", str(tmp_path), "--impl", "other", "--device", "cpu"]) == 2
    assert "measured was ['naive', 'other'] and is now ['other']" in capsys.readouterr().err


def test_a_lost_device_stops_the_sweep_which_goes_on_with_the_next_cell(tmp_path, calls, monkeypatch, capsys):
    lost: list[int] = []

    def break_down(name: str, length: int) -> None:
        if (name, length) == ("other", 32):
            lost.append(length)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def synchronize(device: object) -> None:
        if lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    calls.trouble = break_down
    monkeypatch.setattr(attention_cell, "synchronize", synchronize)
    assert benchmark.main([*SWEEP, "--no-plots", "--output", str(tmp_path)]) == 3
    assert "--resume" in capsys.readouterr().err
    lost.clear()
    calls.seen.clear()
    assert benchmark.main(["--resume", str(tmp_path), "--no-plots", "--device", "cpu"]) == 0
    assert {length for _, length in calls.seen} == {64}


def test_a_provider_that_ends_the_process_is_given_up_after_the_second_time(tmp_path):
    command = [sys.executable, "-c", SWEEP_THAT_DIES, *SWEEP, "--full", "--rounds", "1", "--output", str(tmp_path)]
    root = Path(benchmark.__file__).parents[1]
    ends = [subprocess.run([*command, "--no-plots"], cwd=root, check=False).returncode for _ in range(3)]
    assert ends == [11, 11, 0]
    rows = results(tmp_path)
    assert len(rows) == 2 * 2 * 3
    failed = [row for row in rows if row["status"] != "ok"]
    assert {(row["implementation"], row["length"], row["status"]) for row in failed} == {("other", 32, "error")}
    assert failed[0]["reason"] == "2 processes ended while it ran here"


def test_a_time_limit_ends_the_sweep_as_an_interruption_does(tmp_path, calls):
    def terminate(name: str, length: int) -> None:
        if (name, length) == ("other", 64):
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    calls.trouble = terminate
    assert benchmark.main([*SWEEP, "--no-plots", "--output", str(tmp_path)]) == 130
    assert {row["length"] for row in results(tmp_path)} == {32}
    assert signal.getsignal(signal.SIGTERM) is before
