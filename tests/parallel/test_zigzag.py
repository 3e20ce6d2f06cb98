"""Which tokens a process has: each exactly once, the same work for all, and nothing that was added counts."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.parallel import share_of
from cs336_systems.parallel.zigzag import chunks_of, owners


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_process_has_the_same_number_of_pairs(size):
    assert sorted(owners(size)) == list(range(2 * size))
    # Each query of chunk c sees c whole chunks and, on average, half of its own.
    assert {sum(2 * chunk + 1 for chunk in chunks_of(rank, size)) for rank in range(size)} == {4 * size}


@pytest.mark.parametrize(("size", "length"), [(1, 7), (2, 8), (2, 11), (3, 12), (3, 13), (4, 8), (4, 9)])
def test_each_token_is_there_once(size, length):
    tokens = torch.arange(2 * length).view(2, length)
    shares = [share_of(tokens, tokens + 100, rank, size) for rank in range(size)]
    assert len({share.tokens.shape for share in shares}) == 1
    counted = torch.cat([share.targets for share in shares], dim=1)
    real = counted != -100
    assert real.sum() == 2 * length
    assert counted[real].sort().values.tolist() == (tokens + 100).flatten().tolist()
    for share in shares:
        mine = share.targets != -100
        assert torch.equal(share.tokens[mine], share.targets[mine] - 100)
        positions = share.positions.expand_as(share.tokens)
        assert torch.equal(positions[mine], share.tokens[mine] % length)
        assert positions.max() < length


def test_what_is_added_comes_last():
    """So that no real token sees it."""
    share = share_of(torch.zeros(1, 9, dtype=torch.long), torch.ones(1, 9, dtype=torch.long), 0, 2)
    assert share.targets.tolist() == [[1, 1, 1, -100, -100, -100]]
    assert share.positions.tolist() == [[0, 1, 2, 8, 8, 8]]


def test_too_short_a_sequence():
    tokens = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="tokens must have a length of at least 2 · 2 to be shared by 2; got 3"):
        share_of(tokens, tokens, 0, 2)
