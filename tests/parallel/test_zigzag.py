"""Shards of sequences: every token once, the same work for every process, and padding that does not count."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.parallel import zigzag_shard
from cs336_systems.parallel.zigzag import chunks_of, gathered_order


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_process_has_the_same_number_of_pairs(size):
    assert sorted(gathered_order(size)) == list(range(2 * size))
    # Queries of chunk c attend to c whole chunks and, on average, half of their own.
    assert {sum(2 * chunk + 1 for chunk in chunks_of(rank, size)) for rank in range(size)} == {4 * size}


@pytest.mark.parametrize(("size", "length"), [(1, 7), (2, 8), (2, 11), (3, 12), (3, 13), (4, 8), (4, 9)])
def test_every_token_is_in_one_shard(size, length):
    tokens = torch.arange(2 * length).view(2, length)
    shards = [zigzag_shard(tokens, tokens + 100, rank, size) for rank in range(size)]
    assert len({shard.tokens.shape for shard in shards}) == 1
    targets = torch.cat([shard.targets for shard in shards], dim=1)
    assert targets[targets != -100].sort().values.tolist() == (tokens + 100).flatten().tolist()
    for shard in shards:
        real = shard.targets != -100
        positions = shard.positions.expand_as(shard.tokens)
        assert torch.equal(shard.tokens[real], shard.targets[real] - 100)
        assert torch.equal(positions[real], shard.tokens[real] % length)
        assert positions.max() < length


def test_padding_comes_last_so_that_no_token_attends_to_it():
    shard = zigzag_shard(torch.zeros(1, 9, dtype=torch.long), torch.ones(1, 9, dtype=torch.long), 0, 2)
    assert shard.targets.tolist() == [[1, 1, 1, -100, -100, -100]]
    assert shard.positions.tolist() == [[0, 1, 2, 8, 8, 8]]
    short = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="tokens must have a length of at least 2 · 2 for 2 processes; got 3"):
        zigzag_shard(short, short, 0, 2)
