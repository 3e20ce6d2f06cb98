"""The order of the data: every window once in an epoch, a function of the step, shared by processes without overlap."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from cs336_systems.training.data import Windows, split, validation_starts

LENGTH = 8


@pytest.fixture
def windows():
    return Windows(np.arange(203, dtype=np.uint16), LENGTH, seed=3)


def test_an_epoch_has_every_window_once(windows):
    assert windows.count == 24
    for epoch in range(5):
        starts = windows.starts(epoch * windows.count, windows.count)
        first = windows.offset(epoch)
        assert sorted(starts) == list(range(first, first + windows.count * LENGTH, LENGTH))
        # The last target is there.
        assert max(starts) + LENGTH < 203


def test_epochs_and_seeds_have_orders_and_offsets_of_their_own(windows):
    orders = [tuple(windows.starts(epoch * windows.count, windows.count)) for epoch in range(4)]
    # Less the offset of their epoch, which differs too.
    assert len({tuple(np.array(order) - windows.offset(epoch)) for epoch, order in enumerate(orders)}) == 4
    assert len({windows.offset(epoch) for epoch in range(30)}) > 3
    other = Windows(windows.tokens, LENGTH, seed=4)
    assert tuple(other.starts(0, windows.count)) not in orders
    assert list(orders[0]) != sorted(orders[0])


def test_targets_follow_tokens(windows):
    tokens, targets = windows.batch(0, 6, 6, 0)
    assert tokens.shape == targets.shape == (6, LENGTH)
    assert tokens.dtype == torch.int64
    # The tokens count up.
    assert torch.equal(targets, tokens + 1)
    assert tokens[:, 0].tolist() == windows.starts(0, 6).tolist()


def test_a_step_is_the_same_whoever_computes_it_and_however(windows):
    """Also step 3 of 7 sequences, which spans two epochs of 24."""
    for step in (0, 3):
        whole = windows.starts(step * 12, 12).tolist()
        for micro_batch, world_size in ((12, 1), (3, 1), (2, 2), (1, 4), (6, 2)):
            parts = 12 // (micro_batch * world_size)
            seen = [
                windows.batch(step, 12, micro_batch, part, rank, world_size)[0][:, 0].tolist()
                for part in range(parts)
                for rank in range(world_size)
            ]
            assert list(itertools.chain(*seen)) == whole


def test_ranks_share_no_window(windows):
    starts = [
        set(windows.batch(step, 12, 3, part, rank, 2)[0][:, 0].tolist())
        for step in range(2)
        for part in range(2)
        for rank in range(2)
    ]
    assert sum(map(len, starts)) == len(set.union(*starts)) == windows.count


def test_a_counter_is_enough_to_go_on(windows):
    straight = [windows.batch(step, 5, 5, 0)[0] for step in range(12)]
    resumed = Windows(windows.tokens, LENGTH, seed=3)
    for step in range(7, 12):
        assert torch.equal(resumed.batch(step, 5, 5, 0)[0], straight[step])


def test_fewer_windows_than_a_batch():
    windows = Windows(np.arange(2 * LENGTH, dtype=np.uint16), LENGTH, seed=0)
    assert windows.count == 1
    tokens, _ = windows.batch(0, 4, 4, 0)
    assert tokens[:, 0].tolist() == [windows.offset(epoch) for epoch in range(4)]


def test_errors(windows):
    with pytest.raises(ValueError, match="at least 16 tokens to train on, twice the context length; got 15"):
        Windows(np.arange(15, dtype=np.uint16), LENGTH, seed=0)
    with pytest.raises(ValueError, match="multiple of micro_batch × world_size, 4 × 2; got 12"):
        windows.batch(0, 12, 4, 0, 0, 2)
    with pytest.raises(ValueError, match="got rank 2, part 0"):
        windows.batch(0, 12, 3, 0, 2, 2)
    with pytest.raises(ValueError, match="got rank 0, part 4"):
        windows.batch(0, 12, 3, 4)
    with pytest.raises(ValueError, match="more tokens than the context length, 8; got 8"):
        validation_starts(np.arange(8, dtype=np.uint16), LENGTH, 4)


def test_validation_is_the_end_of_the_tokens():
    train, validation = split(np.arange(100, dtype=np.uint16), 0.05)
    assert validation.tolist() == list(range(95, 100))
    assert len(train) == 95
    starts = validation_starts(np.arange(81, dtype=np.uint16), LENGTH, 4)
    assert starts.tolist() == [0, 24, 48, 72]
    assert validation_starts(np.arange(81, dtype=np.uint16), LENGTH, 99).tolist() == list(range(0, 80, 8))
