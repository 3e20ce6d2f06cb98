"""Lists of blocks found before are returned for equal content, and for nothing else."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from cs336_systems.attention import attention
from cs336_systems.attention.blocks import lists
from cs336_systems.attention.blocks.content_cache import ContentCache, content_of
from cs336_systems.attention.mods import mask_mod
from cs336_systems.attention.variants import block_local, document, prefix, visible_where

from ..helpers import blocks_of


@pytest.fixture(autouse=True)
def _nothing_found():
    lists.cache.clear()
    yield
    lists.cache.clear()


def ids():
    return (torch.arange(300) // 90)[None]


def cached(mask, **asked):
    return blocks_of(mask, cache=True, **asked)


def test_equal_content_is_found_once():
    first = cached(document(ids()))
    assert cached(document(ids())) is first
    assert cached(document(ids().mT.contiguous().mT)) is first
    assert blocks_of(document(ids())) is not first
    assert all(map(torch.equal, blocks_of(document(ids()))[:2], first[:2]))


def test_the_same_function_made_again_is_found():
    def made(tags, width):
        return mask_mod(lambda b, h, q, k: (q - k < width) & (tags[0, q] == tags[0, k]))

    first = cached(made(ids(), 40))
    assert cached(made(ids(), 40)) is first
    assert cached(made(ids(), 41)) is not first
    assert cached(made(ids() + 1, 40)) is not first


@pytest.mark.parametrize("place", [0, 150, 299])
def test_a_change_in_place_is_seen(place):
    tags = ids()
    mask = document(tags)
    first = cached(mask)
    tags[0, place] = 77
    second = cached(mask)
    assert second is not first
    assert torch.equal(second.rows, blocks_of(document(tags.clone())).rows)
    q = torch.randn(1, 2, 300, 16)
    listed = replace(mask, blocks=second)
    torch.testing.assert_close(*(attention(q, q, q, mask=x, impl="tiled") for x in (listed, mask)))
    tags[0, place] = ids()[0, place]
    assert cached(mask) is first


OTHERS = {
    "dtype": lambda: cached(document(ids().int())),
    "shape": lambda: cached(document(ids().repeat(2, 1))),
    "rule": lambda: cached(~document(ids())),
    "order": lambda: cached(document(ids(), ids() + 1)),
    "causal": lambda: cached(document(ids()), causal=True),
    "alignment": lambda: cached(document(ids()), causal="top_left"),
    "window": lambda: cached(document(ids()), window=(5, 5)),
    "lengths": lambda: cached(document(ids()), k_len=299),
    "batch": lambda: cached(document(ids()), batch=3),
}


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_else_is_taken_for_it(name):
    assert cached(document(ids())) is not OTHERS[name]()
    assert OTHERS[name]() is OTHERS[name]()


def test_equal_numbers_of_other_types_are_others():
    """Also where they are bytes alone: 0.0 and -0.0."""
    contents = [torch.zeros(1, 1, 1, 1), -torch.zeros(1, 1, 1, 1)]
    assert content_of(contents[:1]) != content_of(contents[1:])
    assert content_of([torch.zeros(0)]) != content_of([torch.zeros(1, 0)])
    assert content_of([torch.full((2,), torch.nan)]) == content_of([torch.full((2,), torch.nan)])
    for dtype in (torch.bool, torch.bfloat16, torch.int8, torch.float64):
        assert content_of([torch.ones((), dtype=dtype)]) == content_of([torch.ones((), dtype=dtype)])
    one, two = (mask_mod(lambda b, h, q, k, number=number: k > number * q) for number in (1, 1.0))
    assert cached(one) is not cached(two)


def test_arguments_are_checked_all_the_same():
    cached(block_local(3), causal=True)
    with pytest.raises(TypeError, match="causal must be"):
        cached(block_local(3), causal=1)
    with pytest.raises(ValueError, match="what mask captured must have shape"):
        cached(document(ids()), q_len=301)


def test_lists_found_in_inference_mode_are_not_for_training():
    mask = prefix(torch.tensor([40]))
    with torch.inference_mode():
        found = cached(mask)
        assert cached(mask) is found
    assert found.rows.is_inference()
    q = torch.randn(1, 1, 300, 8, requires_grad=True)
    listed = mask.with_blocks(300, 300, cache=True)
    attention(q, q, q, mask=listed, impl="tiled").sum().backward()
    assert q.grad is not None


def test_the_last_ones_stay():
    kept = ContentCache[int](2)
    found = [kept.get(key, lambda place=place: place) for place, key in enumerate("abacab")]
    assert found == [0, 1, 0, 3, 0, 5]
    kept.clear()
    assert kept.get("a", lambda: 7) == 7


def test_threads_share_it():
    results, start = [], threading.Barrier(8)

    def run(number):
        start.wait()
        results.append((number % 2, cached(visible_where(torch.full((1, 1, 1, 300), number % 2)))))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        assert len({id(found) for own, found in results if own == number}) == 1
        assert all(bool(found.rows[..., :2].any()) == bool(own) for own, found in results)
