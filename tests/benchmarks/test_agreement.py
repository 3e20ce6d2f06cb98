"""Two runs agree where their intervals overlap."""

from __future__ import annotations

import pandas as pd
import pytest

from benchmarks.agreement import main


def write(folder, part, *times, providers=("flash", "naive")):
    (folder / part).mkdir(parents=True)
    rows = [
        {"case": "length=1", "provider": name, "status": "ok", "median_ms": mid, "low_ms": low, "high_ms": high}
        for name, (low, mid, high) in zip(providers, times, strict=False)
    ]
    pd.DataFrame(rows).to_csv(folder / part / "results.csv", index=False)


@pytest.mark.parametrize(
    ("second", "status", "text"),
    [
        ((1.2, 1.3, 1.4), 0, "2 of 2 times agree"),
        ((0.6, 0.7, 0.8), 0, "2 of 2 times agree"),
        ((1.21, 1.3, 1.4), 1, "1 of 2 times agree"),
        ((0.6, 0.7, 0.79), 1, "1 of 2 times agree"),
    ],
)
def test_times_agree_where_their_intervals_have_a_point_in_common(tmp_path, capsys, second, status, text):
    write(tmp_path / "one", "a/b", (0.8, 1.0, 1.2), (4.0, 5.0, 6.0))
    write(tmp_path / "two", "a/b", second, (4.0, 4.0, 4.0))
    assert main([str(tmp_path / "one"), str(tmp_path / "two")]) == status
    out = capsys.readouterr().out
    assert text in out
    assert ("flash" in out, "naive" in out) == (status == 1, False)


def test_what_only_one_run_has_is_not_compared(tmp_path, capsys):
    write(tmp_path / "one", "a", (1.0, 1.0, 1.0))
    write(tmp_path / "one", "b", (1.0, 1.0, 1.0))
    write(tmp_path / "two", "a", (1.0, 1.0, 1.0), providers=("naive",))
    assert main([str(tmp_path / "one"), str(tmp_path / "two")]) == 2
    assert "no times of the same cases" in capsys.readouterr().err


def test_visits_of_a_run_are_one_time(tmp_path, capsys):
    for name, medians in (("one", (1.0, 2.0)), ("two", (1.5, 1.5))):
        write(tmp_path / name, "a", (1.0, 1.0, 1.0))
        rows = [
            {
                "case": "x",
                "provider": "flash",
                "status": "ok",
                "visit": visit,
                "median_ms": ms,
                "low_ms": ms,
                "high_ms": ms,
            }
            for visit, ms in enumerate(medians, 1)
        ]
        pd.DataFrame(rows).to_csv(tmp_path / name / "a/results.csv", index=False)
    assert main([str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    assert "1 of 1 times agree" in capsys.readouterr().out
