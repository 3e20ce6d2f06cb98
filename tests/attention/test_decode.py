"""Attention over a KV cache: values for any lengths and splits, layouts, torch.compile and CUDA graphs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.attention import attention_with_cache
from cs336_systems.kernels.triton import tiles as tuning
from cs336_systems.kernels.triton.tiles import TileConfig
from cs336_systems.testing import TF32_EPS, assert_cached_within_budget, make_cache, poisoned_memory

from .helpers import COMPILES, DOUBLE, FLOAT, FLOATS, HALF, Record, each_dtype, named, one_graph

SMALL_TILES = TileConfig(16, 16, 4, 2)
"""Of which even short sequences have several, and groups of 17 queries two."""
each_implementation = pytest.mark.parametrize("impl", ["flash", "naive"])


@pytest.fixture
def many_sms(monkeypatch):
    """So many that sequences are split, with `SMALL_TILES`."""
    monkeypatch.setattr("cs336_systems.kernels.launching.num_sms", lambda device: 64)
    with tuning.pin(decode=SMALL_TILES):
        yield


def check(impl, cache, *, scale=None, eps=None, **features):
    with poisoned_memory():
        out, lse = attention_with_cache(*cache, impl=impl, scale=scale, return_lse=True, **features)
    assert_cached_within_budget(out, lse, cache, scale=scale, eps=eps, features=features)


CASES = {
    "one_query": ({"q_heads": 4, "kv_heads": 2, "d": 64}, {}),
    "grouped": ({"q_heads": 8, "kv_heads": 1, "d": 32, "new": 3}, {}),
    "window": ({"q_heads": 2, "kv_heads": 2, "d": 16, "new": 2}, {"window": (20, None)}),
    "itself_alone": ({"q_heads": 2, "kv_heads": 2, "d": 16, "new": 2}, {"window": (0, 0)}),
    "far_window": ({"q_heads": 2, "kv_heads": 1, "d": 16, "new": 2}, {"window": (2**31, 2**63)}),
    "softcap": ({"q_heads": 4, "kv_heads": 2, "d": 20, "dv": 40}, {"softcap": 2.0}),
    "scale": ({"q_heads": 4, "kv_heads": 2, "d": 128, "new": 4}, {"scale": -0.2, "softcap": 5.0}),
    "no_scale": ({"q_heads": 2, "kv_heads": 2, "d": 16}, {"scale": 0.0}),
    "wide": ({"q_heads": 2, "kv_heads": 1, "d": 300, "dv": 264}, {"scale": -0.05}),
}


@pytest.mark.parametrize(
    "name", named(CASES, ["grouped", "window", "softcap"], every_triton=["grouped", "window", "softcap", "wide"])
)
@each_dtype(flash=FLOATS, naive=(FLOAT, DOUBLE))
def test_values_are_within_the_budget(impl, dtype, device, name, many_sms):
    sizes, features = CASES[name]
    capacity = 75 if impl == "flash" else 80
    check(impl, make_cache([75, 0, 1, 33, 64], capacity=capacity, **sizes, dtype=dtype, device=device), **features)


@pytest.mark.parametrize("lengths", [[75, 0, 1, 33, 64], [40, 40], [2]])
@pytest.mark.parametrize(("new", "window"), [(1, None), (3, None), (1, (20, None)), (1, (0, 0)), (1, (2**63, None))])
@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_torch_reads_one_cache_after_another_on_a_cpu(lengths, new, window, dtype):
    cache = make_cache(lengths, capacity=80, q_heads=4, kv_heads=2, d=16, new=new, dtype=dtype)
    for _ in range(2):  # planned, then found again
        out = attention_with_cache(*cache, impl="sdpa", window=window)
        assert_cached_within_budget(out, None, cache, features={"window": window})


@st.composite
def calls(draw):
    kv_heads = draw(st.integers(1, 3))
    capacity = draw(st.integers(1, 90))
    sizes = {
        "lengths": draw(st.lists(st.integers(0, capacity), min_size=1, max_size=4)),
        "capacity": capacity,
        "q_heads": kv_heads * draw(st.integers(1, 9)),
        "kv_heads": kv_heads,
        "d": draw(st.sampled_from([16, 17, 40, 64, 80, 128])),
        "dv": draw(st.sampled_from([None, None, 8, 48])),
        "new": draw(st.integers(1, 4)),
        "dtype": draw(st.sampled_from([HALF, FLOAT])),
    }
    window = draw(st.sampled_from([None, None, (0, None), (7, None), (60, 0)]))
    return sizes, {"window": window, "scale": draw(st.sampled_from([None, 0.3, -1.5]))}


@pytest.mark.slow
@settings(max_examples=15)
@given(call=calls(), seed=st.integers(0, 2**32 - 1), sms=st.sampled_from([1, 40]))
def test_any_call(flash_device, call, seed, sms):
    sizes, features = call
    torch.manual_seed(seed)
    with pytest.MonkeyPatch.context() as patched, tuning.pin(decode=SMALL_TILES):
        patched.setattr("cs336_systems.kernels.launching.num_sms", lambda device: sms)
        check("flash", make_cache(**sizes, device=flash_device), **features)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("d", "heads"),
    [
        (16, (8, 8, 1)),
        (32, (16, 1, 2)),
        (64, (32, 8, 1)),
        (64, (32, 1, 2)),
        (80, (8, 8, 3)),
        (128, (32, 8, 1)),
        (128, (32, 1, 2)),
        (256, (8, 2, 1)),
    ],
)
def test_loops_over_many_tiles(d, dtype, heads):
    """With the tiles of the table, and the splits of this device."""
    sizes = dict(zip(("q_heads", "kv_heads", "new"), heads, strict=True)) | {"d": d, "dtype": dtype, "device": "cuda"}
    check("flash", make_cache([3001, 1, 700, 2048], capacity=3001, **sizes))
    check("flash", make_cache([3001, 1, 700], capacity=4096, **sizes), window=(512, None))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS[:2])
def test_one_long_sequence(dtype):
    check("flash", make_cache([131_000], capacity=131_072, q_heads=8, kv_heads=2, d=128, dtype=dtype, device="cuda"))


@pytest.mark.parametrize("matmul_precision", ["high"], indirect=True)
def test_tf32_where_torch_allows_it(flash_device, matmul_precision):
    check("flash", make_cache([60, 9], capacity=64, q_heads=4, kv_heads=2, d=64, device=flash_device), eps=TF32_EPS)


@pytest.mark.parametrize("dtype", [FLOAT, torch.bfloat16])
def test_values_whose_sum_is_near_the_largest(flash_device, dtype):
    cache = make_cache([100, 64], capacity=100, q_heads=2, kv_heads=1, d=16, dtype=dtype, device=flash_device)
    check("flash", cache._replace(v=cache.v.clamp(-2, 2) * (torch.finfo(dtype).max / 200)))


@each_implementation
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_out_of_range_count_as_the_nearest_where_nobody_looks(device, impl, dtype):
    """Asking a GPU for them would stop it. On a CPU nobody looks under a dispatch mode."""
    cache = make_cache([40, 0, 0, 40], capacity=40, q_heads=2, kv_heads=1, d=16, device=device)
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    wrong = torch.tensor([most, least, -3, min(2**32 + 3, most)], dtype=dtype, device=device)
    with Record():
        results = attention_with_cache(*cache[:3], wrong, impl=impl, return_lse=True)
    expected = attention_with_cache(*cache, impl=impl, return_lse=True)
    torch.testing.assert_close(results, expected, rtol=0, atol=0)


@each_implementation
def test_nothing_to_see(device, impl):
    for batch, capacity, new in ((0, 8, 1), (2, 0, 1), (2, 8, 0)):
        cache = make_cache([0] * batch, capacity=capacity, q_heads=4, kv_heads=2, d=16, new=new, device=device)
        out, lse = attention_with_cache(*cache, impl=impl, return_lse=True)
        assert out.shape == (batch, 4, new, 16)
        assert (out == 0).all()
        assert (lse == -math.inf).all()


@each_implementation
def test_queries_and_lengths_may_have_any_strides(device, impl):
    cache = make_cache([30, 12], capacity=32, q_heads=6, kv_heads=2, d=16, new=3, device=device)
    by_token = cache.q.transpose(1, 2).contiguous().transpose(1, 2)
    lengths = torch.stack([cache.lengths, cache.lengths], 1)[:, 0]
    results = attention_with_cache(by_token, *cache[1:3], lengths, impl=impl)
    torch.testing.assert_close(results, attention_with_cache(*cache, impl=impl))


def test_sequences_are_split_among_sms():
    from cs336_systems.kernels.triton.decode_launch import (
        MAX_SPLITS,
        PROGRAMS_PER_SM,
        RESIDENT,
        TILES_PER_SPLIT,
        num_splits,
    )

    assert num_splits(1, 1, 132) == 1  # there is one tile
    assert num_splits(10_000, 1000, 132) == 1  # whole sequences keep all SMs busy
    assert num_splits(8, 2048, 132) == PROGRAMS_PER_SM * 132 // 8
    assert num_splits(8, 64, 132) == 64 // TILES_PER_SPLIT
    assert num_splits(1, 1 << 20, 132) == MAX_SPLITS
    # Four programs more than are resident at a time would run by themselves; more splits leave less for the end.
    assert num_splits(RESIDENT * 132, 1000, 132) == 1
    assert num_splits(RESIDENT * 132 + 4, 1000, 132) > 1


def test_autocast_computes_in_its_dtype(device):
    cache = make_cache([9, 20], capacity=20, q_heads=2, kv_heads=1, d=16, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        out = attention_with_cache(*cache)
        # A cache is kept in the dtype of autocast, in which queries come then.
        kept = attention_with_cache(cache.q, cache.k.bfloat16(), cache.v.bfloat16(), cache.lengths)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(kept, out, rtol=0, atol=0)


class TestCompiled:
    pytestmark = COMPILES

    @pytest.mark.parametrize("impl", named(["auto", "naive", "flash"], []))
    def test_one_graph(self, device, impl):
        def attend(q, k, v, lengths):
            return attention_with_cache(q, k, v, lengths, window=(12, None), softcap=4.0, impl=impl)

        compiled = one_graph(attend)
        for capacity in (32, 48):
            cache = make_cache([30, 7], capacity=capacity, q_heads=4, kv_heads=2, d=16, device=device)
            torch.testing.assert_close(compiled(*cache), attend(*cache))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, FLOAT])
def test_a_recorded_call_follows_the_lengths(dtype):
    sizes = {"capacity": 3000, "q_heads": 8, "kv_heads": 2, "d": 64, "dtype": dtype, "device": "cuda"}
    cache = make_cache([3000, 3000, 3000], **sizes)
    attention_with_cache(*cache, impl="flash")  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attention_with_cache(*cache, impl="flash", return_lse=True)
    for lengths in ([1, 2000, 64], [3000, 17, 0]):
        cache.lengths.copy_(torch.tensor(lengths))
        graph.replay()
        assert_cached_within_budget(out, lse, cache)


@pytest.mark.gpu
@each_implementation
def test_nothing_waits_for_the_device(impl, waiting_forbidden):
    cache = make_cache([100, 7], capacity=128, q_heads=8, kv_heads=2, d=64, dtype=torch.bfloat16, device="cuda")
    attention_with_cache(*cache, impl=impl)
    with waiting_forbidden():
        attention_with_cache(*cache, impl=impl)
