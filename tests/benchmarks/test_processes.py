"""Jobs in processes of their own."""

from __future__ import annotations

import os
import time

from benchmarks.processes import run_jobs


def job(what: str) -> str:
    if what == "raise":
        raise ValueError("no")
    if what == "die":
        os._exit(11)
    if what == "hang":
        time.sleep(600)
    return f"did {what}"


def test_a_failure_is_that_jobs_alone():
    jobs = ["a", "raise", "b", "die", "c", "hang", "d"]
    # The limit has room for the start of a process, on a machine that is busy.
    over = {finished.job: finished for finished in run_jobs(job, jobs, processes=2, seconds_each=15)}
    assert set(over) == set(jobs)
    assert [over[name].result for name in "abcd"] == [f"did {name}" for name in "abcd"]
    assert {over[name].failure for name in "abcd"} == {""}
    assert over["raise"].failure == "ValueError: no"
    assert over["die"].failure == "ended its process, with status 11"
    assert over["hang"].failure == "took longer than 15 s"


def test_everything_stops_at_the_deadline():
    start = time.monotonic()
    assert list(run_jobs(job, ["hang"] * 3, processes=2, seconds_each=600, deadline=start + 1)) == []
    assert time.monotonic() - start < 60


def test_nothing_to_do():
    assert list(run_jobs(job, [], processes=2, seconds_each=1)) == []
