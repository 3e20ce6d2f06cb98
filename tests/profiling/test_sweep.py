"""Statuses, and a store that outlasts interruptions."""

from __future__ import annotations

import csv
import json

import pytest
import torch

from cs336_systems.profiling.sweep import (
    EARLIER,
    ConfigurationMismatchError,
    DeathLog,
    RowStore,
    Status,
    outcome_of,
    read_configuration,
    write_csv,
)


def test_memory_that_ran_out_is_a_status_of_its_own():
    outcome = outcome_of(torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate"))
    assert outcome.status is Status.OUT_OF_MEMORY
    assert str(outcome) == "oom: CUDA out of memory. Tried to allocate"


def test_a_refusal_is_unsupported_and_all_else_an_error():
    assert str(outcome_of(NotImplementedError("no bias"))) == "unsupported: no bias"
    assert str(outcome_of(ValueError("no bias"), refusals=(ValueError,))) == "unsupported: no bias"
    assert str(outcome_of(ValueError("no bias"))) == "error: ValueError: no bias"
    assert str(outcome_of(RuntimeError())) == "error: RuntimeError: no message"


def test_an_error_that_was_raised_says_where():
    with pytest.raises(ValueError, match="complex") as raised:
        int("complex")
    line = raised.traceback[-1].lineno + 1
    assert outcome_of(raised.value).reason.endswith(f" (test_sweep.py:{line})")
    assert outcome_of(raised.value, refusals=(ValueError,)).reason.endswith("'complex'")


def test_a_long_reason_is_cut():
    assert len(outcome_of(RuntimeError("word " * 1000)).reason) < 330


def test_rows_are_there_again_when_the_folder_is_opened_again(tmp_path):
    configuration = {"lengths": (1, 2), "dtype": "float32"}
    store = RowStore.open(tmp_path, configuration)
    store.append("a", [{"ms": 1.5}, {"ms": None}])
    store.append("b", [{"ms": 2.0}])
    again = RowStore.open(tmp_path, configuration)
    assert again.rows == [{"ms": 1.5}, {"ms": None}, {"ms": 2.0}]
    assert again.rows_of("b") == [{"ms": 2.0}]
    assert again.is_finished("a")
    assert not again.is_finished("c")
    assert read_configuration(tmp_path) == {"lengths": [1, 2], "dtype": "float32"}


def test_a_new_sweep_puts_aside_what_an_earlier_one_left(tmp_path):
    for number in (1, 2):
        store = RowStore.begin(tmp_path, {"rounds": number})
        assert store.rows == []
        store.append("a", [{"x": number}])
    assert RowStore.begin(tmp_path, {"rounds": 5}).rows == []
    assert RowStore.open(tmp_path, {"rounds": 5}).rows == []
    assert RowStore.open(tmp_path / EARLIER, {"rounds": 2}).rows == [{"x": 2}]


def test_a_sweep_without_rows_does_not_take_the_place_of_the_earlier_one(tmp_path):
    RowStore.begin(tmp_path, {"rounds": 1}).append("a", [{"x": 1}])
    for _ in range(2):
        RowStore.begin(tmp_path, {"rounds": 2})
    assert RowStore.open(tmp_path / EARLIER, {"rounds": 1}).rows == [{"x": 1}]


def test_a_cell_is_stored_once(tmp_path):
    store = RowStore.open(tmp_path, {})
    store.append("a", [])
    with pytest.raises(ValueError, match="got 'a' again"):
        store.append("a", [])


def test_numbers_that_json_has_not_are_refused_before_anything_is_written(tmp_path):
    store = RowStore.open(tmp_path, {})
    with pytest.raises(ValueError, match="JSON compliant"):
        store.append("a", [{"ms": float("nan")}])
    assert not RowStore.open(tmp_path, {}).is_finished("a")


def test_another_configuration_is_an_error_that_names_each_difference(tmp_path):
    RowStore.open(tmp_path, {"lengths": [1], "seed": 0, "gone": 1})
    with pytest.raises(ConfigurationMismatchError) as caught:
        RowStore.open(tmp_path, {"lengths": [1, 2], "seed": 0, "new": True})
    message = str(caught.value)
    assert "lengths was [1] and is now [1, 2]" in message
    assert "gone was 1 and is now 'nothing'" in message
    assert "new was 'nothing' and is now True" in message
    assert "seed" not in message


def test_a_line_that_was_cut_off_is_measured_again(tmp_path):
    store = RowStore.open(tmp_path, {})
    store.append("a", [{"ms": 1}])
    store.append("b", [{"ms": 2}])
    journal = tmp_path / "journal.jsonl"
    journal.write_text(journal.read_text()[:-10])
    again = RowStore.open(tmp_path, {})
    assert again.is_finished("a")
    assert not again.is_finished("b")
    again.append("b", [{"ms": 3}])
    assert RowStore.open(tmp_path, {}).rows == [{"ms": 1}, {"ms": 3}]
    assert [json.loads(line)["cell"] for line in journal.read_text().splitlines()] == ["a", "b"]


def test_a_journal_cut_off_in_its_first_line_is_empty(tmp_path):
    RowStore.open(tmp_path, {})
    (tmp_path / "journal.jsonl").write_text('{"cell": "a", "ro')
    assert RowStore.open(tmp_path, {}).rows == []


def test_a_journal_without_its_configuration_is_an_error(tmp_path):
    (tmp_path / "journal.jsonl").write_text("")
    with pytest.raises(ConfigurationMismatchError, match=r"no configuration\.json"):
        RowStore.open(tmp_path, {})


def test_there_must_be_a_sweep_to_resume(tmp_path):
    with pytest.raises(FileNotFoundError, match="no sweep to resume"):
        read_configuration(tmp_path)


def test_csv(tmp_path):
    path = tmp_path / "rows.csv"
    write_csv(path, [{"a": 1, "b": None, "c": [1.5, 2]}, {"a": "x,y", "b": False}], ("a", "b", "c"))
    with path.open(newline="") as file:
        assert list(csv.reader(file)) == [["a", "b", "c"], ["1", "", "1.5;2"], ["x,y", "False", ""]]


def test_what_was_under_way_when_a_process_died_is_remembered(tmp_path):
    DeathLog(tmp_path).begin("a")
    log = DeathLog(tmp_path)  # another process: the first one died in "a"
    assert (log.deaths("a"), log.deaths("b")) == (1, 0)
    log.begin("b")
    log.begin("a")
    assert DeathLog(tmp_path).deaths("a") == 2
    assert DeathLog(tmp_path).deaths("b") == 0


def test_what_ended_is_no_death_and_leaves_nothing(tmp_path):
    log = DeathLog(tmp_path)
    log.begin("a")
    log.end()
    assert list(tmp_path.iterdir()) == []
    assert DeathLog(tmp_path).deaths("a") == 0
