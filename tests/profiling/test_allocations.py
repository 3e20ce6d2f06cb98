"""Allocations out of snapshots that were made by hand."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.profiling.allocations import BEFORE, Phase, origin_of, read_history
from cs336_systems.profiling.recording import END, GRADIENT

from .snapshots import alloc, frame, free, mark, origin, recording


def test_events_are_numbered_and_markers_are_none():
    history = read_history(
        recording(
            mark("forward"),
            alloc(16, 100),
            alloc(32, 50),
            free(16),
            mark("backward"),
            alloc(16, 30),
            mark(END),
            before=1000,
        )
    )
    first, second, third = history.allocations
    assert (first.bytes, first.begin, first.end, first.phase) == (100, 0, 2, "forward")
    assert (second.begin, second.end) == (1, None)
    assert (third.bytes, third.begin, third.phase) == (30, 3, "backward")
    assert history.phases == (Phase("forward", 0, 3), Phase("backward", 3, 4))
    assert history.curve() == [1100, 1150, 1050, 1080]
    assert history.peak() == (1, 1150)
    assert [first.lives_at(event) for event in range(3)] == [True, True, False]
    assert second.lives_at(3)


def test_what_was_there_before_can_be_freed():
    history = read_history(recording(mark("forward"), alloc(16, 100), free(64, 400), mark(END), before=1000))
    freed = history.allocations[1]
    assert (freed.bytes, freed.begin, freed.end, freed.phase) == (400, -1, 1, BEFORE)
    assert history.standing_bytes == 600
    assert history.standing_before == 1000
    assert history.curve() == [1100, 700]


def test_owners_are_those_of_what_lives_when_a_phase_ends():
    early, late = alloc(16, 4), alloc(16, 8)
    history = read_history(
        recording(mark("backward"), early, free(16), late, mark(END), owners=[{16: "nobody"}, {16: GRADIENT, 99: "x"}])
    )
    assert [each.owner for each in history.allocations] == ["", GRADIENT]


def test_what_came_before_the_first_phase():
    history = read_history(recording(alloc(16, 4), mark("forward"), alloc(32, 4)))
    assert [each.phase for each in history.allocations] == [BEFORE, "forward"]
    with pytest.raises(KeyError, match=r"must be a phase of \['forward'\]; got 'backward'"):
        history.phase("backward")


def test_the_last_phase_of_a_name_counts():
    history = read_history(recording(mark("forward"), alloc(16, 4), mark("forward"), alloc(32, 4), alloc(48, 4)))
    assert history.phase("forward") == Phase("forward", 1, 3)


def test_segments_and_oom_are_no_events():
    segment = {"action": "segment_alloc", "addr": 0, "size": 2**21, "stream": 0, "frames": []}
    history = read_history(recording(mark("forward"), segment, alloc(16, 4), {"action": "oom", "size": 5}))
    assert history.events == 1


def test_nothing_recorded_has_no_peak():
    assert read_history(recording(before=7)).peak() == (0, 7)


class TestOrigin:
    TORCH = frame(torch.__file__, 3, "linear")
    MINE = frame("/home/model.py", 12, "forward")

    def test_an_origin_in_the_stack_goes_first(self):
        written = origin("layers.0", "aten.add")
        assert origin_of([self.TORCH, written.frame(), self.MINE]) == written

    def test_without_one_it_is_the_innermost_statement_outside_of_torch(self):
        found = origin_of([frame("??", 0, "unwind"), self.TORCH, self.MINE, frame("/home/main.py", 1, "main")])
        assert found is not None
        assert (found.place, found.module, found.operation) == ("model.py:12 forward", "", "")

    def test_an_origin_without_a_statement_borrows_it(self):
        bare = origin("", "aten.add", filename="", line=0, function="")
        found = origin_of([bare.frame(), self.TORCH, self.MINE])
        assert found is not None
        assert (found.place, found.operation) == ("model.py:12 forward", "aten.add")
        assert origin_of([bare.frame()]) == bare

    def test_nothing_is_known_of_no_frames(self):
        assert origin_of([]) is None
        assert origin_of([self.TORCH]) is None
