"""Attention over a cache: values for any lengths and parts, choice, errors, torch.compile and CUDA graphs."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from cs336_systems.attention import Implementation, attention_with_cache, cached, explain_with_cache
from cs336_systems.kernels.triton import tiles as tuning
from cs336_systems.kernels.triton.tiles import TileConfig
from cs336_systems.testing import TF32_EPS, assert_cached_within_budget, make_cache, poisoned_memory

SMALL_TILES = TileConfig(16, 16, 4, 2)
"""Of which even short sequences have several, and groups of 17 queries two."""


@pytest.fixture
def many_processors(monkeypatch):
    """So many that sequences are divided into parts, with `SMALL_TILES`."""
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
    "softcap": ({"q_heads": 4, "kv_heads": 2, "d": 20, "dv": 40}, {"softcap": 2.0}),
    "scale": ({"q_heads": 4, "kv_heads": 2, "d": 128, "new": 4}, {"scale": -0.2, "softcap": 5.0}),
    "no_scale": ({"q_heads": 2, "kv_heads": 2, "d": 16}, {"scale": 0.0}),
    "wide": ({"q_heads": 2, "kv_heads": 1, "d": 300, "dv": 264}, {"scale": -0.05}),
}
LENGTHS = [75, 0, 1, 33, 64]


@pytest.mark.every_triton
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("impl", ["flash"])
def test_values_are_within_the_budget(impl, device, dtype, name, many_processors):
    sizes, features = CASES[name]
    check(impl, make_cache(LENGTHS, capacity=75, **sizes, dtype=dtype, device=device), **features)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_of_naive_are_within_the_budget(device, dtype, name):
    sizes, features = CASES[name]
    check("naive", make_cache(LENGTHS, capacity=80, **sizes, dtype=dtype, device=device), **features)


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
        "dtype": draw(st.sampled_from([torch.float16, torch.float32])),
    }
    window = draw(st.sampled_from([None, None, (0, None), (7, None), (60, 0)]))
    return sizes, {"window": window, "scale": draw(st.sampled_from([None, 0.3, -1.5]))}


@settings(max_examples=15)
@given(call=calls(), seed=st.integers(0, 2**32 - 1), processors=st.sampled_from([1, 40]))
def test_any_call(flash_device, call, seed, processors):
    sizes, features = call
    torch.manual_seed(seed)
    with pytest.MonkeyPatch.context() as patched, tuning.pin(decode=SMALL_TILES):
        patched.setattr("cs336_systems.kernels.launching.num_sms", lambda device: processors)
        check("flash", make_cache(**sizes, device=flash_device), **features)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
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
    """As the table says that they are tiled, and as the device's processors divide them."""
    sizes = dict(zip(("q_heads", "kv_heads", "new"), heads, strict=True)) | {"d": d}
    check("flash", make_cache([3001, 1, 700, 2048], capacity=3001, **sizes, dtype=dtype, device="cuda"))
    window = {"window": (512, None)}
    check("flash", make_cache([3001, 1, 700], capacity=4096, **sizes, dtype=dtype, device="cuda"), **window)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_long_sequence(dtype):
    cache = make_cache([131_000], capacity=131_072, q_heads=8, kv_heads=2, d=128, dtype=dtype, device="cuda")
    check("flash", cache)


@pytest.mark.parametrize("matmul_precision", ["high"], indirect=True)
def test_tf32_where_torch_allows_it(flash_device, matmul_precision):
    check("flash", make_cache([60, 9], capacity=64, q_heads=4, kv_heads=2, d=64, device=flash_device), eps=TF32_EPS)


@pytest.mark.parametrize("impl", ["flash", "naive"])
def test_lengths_out_of_range_count_as_the_nearest_where_nobody_looks(device, impl):
    cache = make_cache([40, 0], capacity=40, q_heads=2, kv_heads=2, d=16, device=device)
    expected = attention_with_cache(*cache, impl=impl, return_lse=True)
    lengths = torch.tensor([77, -3], dtype=torch.int32, device=device)
    compute = cached._flash if impl == "flash" else cached._naive  # the public function looks, on a CPU
    torch.testing.assert_close(compute(*cache[:3], lengths, 0.25, None, None), expected, rtol=0, atol=0)


@pytest.mark.parametrize("impl", ["flash", "naive"])
def test_nothing_to_see(device, impl):
    for batch, capacity, new in ((0, 8, 1), (2, 0, 1), (2, 8, 0)):
        cache = make_cache([0] * batch, capacity=capacity, q_heads=4, kv_heads=2, d=16, new=new, device=device)
        out, lse = attention_with_cache(*cache, impl=impl, return_lse=True)
        assert out.shape == (batch, 4, new, 16)
        assert (out == 0).all()
        assert (lse == -math.inf).all()


@pytest.mark.parametrize("impl", ["flash", "naive"])
def test_queries_laid_out_as_a_projection_leaves_them(device, impl):
    cache = make_cache([30, 12], capacity=32, q_heads=6, kv_heads=2, d=16, new=3, device=device)
    by_token = cache.q.transpose(1, 2).contiguous().transpose(1, 2)
    lengths = torch.stack([cache.lengths, cache.lengths], 1)[:, 0]
    results = attention_with_cache(by_token, *cache[1:3], lengths, impl=impl)
    torch.testing.assert_close(results, attention_with_cache(*cache, impl=impl))


def test_parts_are_divided_among_processors():
    from cs336_systems.kernels.triton.decode_launch import (
        MAX_SPLITS as MOST_PARTS,
        PROGRAMS_PER_SM as WANTED,
        RESIDENT as AT_A_TIME,
        TILES_PER_SPLIT as TILES_A_PART,
        num_splits as parts_of,
    )

    assert parts_of(1, 1, 132) == 1  # there is one tile
    assert parts_of(10_000, 1000, 132) == 1  # whole sequences keep all processors busy
    assert parts_of(8, 2048, 132) == WANTED * 132 // 8
    assert parts_of(8, 64, 132) == 64 // TILES_A_PART
    assert parts_of(1, 1 << 20, 132) == MOST_PARTS
    # Four programs more than run at a time would run by themselves; in more parts there is less left at the end.
    assert parts_of(AT_A_TIME * 132, 1000, 132) == 1
    assert parts_of(AT_A_TIME * 132 + 4, 1000, 132) > 1


def test_what_auto_chooses(device, monkeypatch):
    if device.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # else the kernels cannot be asked for, where there is a GPU
    cache = make_cache([9], capacity=16, q_heads=2, kv_heads=1, d=16, device=device)
    explanation = explain_with_cache(*cache)
    expected = Implementation.FLASH if device.type == "cuda" else Implementation.NAIVE
    assert explanation.choice is expected
    assert set(explanation.passed_over) == set(Implementation) - {expected}
    assert explanation.passed_over[Implementation.SDPA] == "it takes no lengths that the device alone knows"
    named = explain_with_cache(*cache, impl="naive")
    assert named.choice is Implementation.NAIVE
    assert named.passed_over[Implementation.FLASH] == "'naive' was asked for"
    double = explain_with_cache(*[x.double() for x in cache[:3]], cache.lengths)
    assert double.choice is Implementation.NAIVE
    assert "float64" in double.passed_over[Implementation.FLASH]


Q, K, LENGTH = torch.zeros(2, 4, 1, 16), torch.zeros(2, 2, 8, 16), torch.tensor([3, 8])
NUMBERS = "lengths must be (batch,) int32 or int64 numbers"
REFUSED = {
    "q_axes": (
        (Q[0], K.flatten(0, 1), K.flatten(0, 1), LENGTH),
        {},
        ValueError,
        "q must have shape (batch, q_heads, new, d); got (4, 1, 16)",
    ),
    "k_dim": (
        (Q, K[..., :8], K, LENGTH),
        {},
        ValueError,
        "k must have shape (2, kv_heads, *, 16) to match q; got (2, 2, 8, 8)",
    ),
    "list": ((Q, K, K, [3, 8]), {}, TypeError, f"{NUMBERS}; got list"),
    "floats": ((Q, K, K, LENGTH.float()), {}, TypeError, f"{NUMBERS}; got torch.float32"),
    "count": ((Q, K, K, LENGTH[:1]), {}, ValueError, "lengths must have shape (2,) to match q; got (1,)"),
    "device": ((Q, K, K, LENGTH.to("meta")), {}, ValueError, "lengths must be on cpu to match q; got meta"),
    "softcap": ((Q, K, K, LENGTH), {"softcap": 0.0}, ValueError, "softcap must be above 0 and finite; got 0.0"),
    "window": (
        (Q, K, K, LENGTH),
        {"window": 3},
        TypeError,
        "window must be (before, after), each None or an integer from 0 on; got 3",
    ),
    "impl": (
        (Q, K, K, LENGTH),
        {"impl": "sdpa"},
        ValueError,
        "impl='sdpa' cannot compute this call: it takes no lengths that the device alone knows",
    ),
    "gradients": (
        (Q, K.clone().requires_grad_(), K, LENGTH),
        {},
        ValueError,
        "q, k and v must need no gradients: attention over a cache has no backward pass; call it under "
        "torch.no_grad(), or attention()",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    arguments, options, error, message = REFUSED[name]
    for _ in range(2):  # nothing that is refused is remembered as good
        with pytest.raises(error, match=f"^{re.escape(message)}$"):
            attention_with_cache(*arguments, **options)


def test_tensors_that_need_gradients_are_taken_where_none_are_kept():
    with torch.no_grad():
        attention_with_cache(Q, K.clone().requires_grad_(), K, LENGTH)


def test_autocast_computes_in_its_dtype(device):
    cache = make_cache([9, 20], capacity=20, q_heads=2, kv_heads=1, d=16, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        out = attention_with_cache(*cache)
    assert out.dtype == torch.bfloat16


def operator_arguments(cache):
    return (*cache, 0.25, 9, None)


def test_the_operator_is_sound(flash_device):
    for new in (1, 2):
        cache = make_cache([30, 7], capacity=32, q_heads=4, kv_heads=2, d=16, dv=8, new=new, device=flash_device)
        checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        cache.k.nan_to_num_()
        cache.v.nan_to_num_()
        operator = torch.ops.cs336_systems.flash_with_cache.default
        torch.library.opcheck(operator, operator_arguments(cache), test_utils=checks)
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(x) for x in cache]
            made = operator(*fake, *operator_arguments(cache)[4:])
        real = operator(*operator_arguments(cache))
        assert [(x.shape, x.stride(), x.dtype) for x in made] == [(x.shape, x.stride(), x.dtype) for x in real]


@pytest.mark.usefixtures("compile_afresh")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch")
@pytest.mark.parametrize("impl", ["auto", "naive", "flash"])
def test_one_graph(device, impl):
    def attend(q, k, v, lengths):
        return attention_with_cache(q, k, v, lengths, window=(12, None), softcap=4.0, impl=impl)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for capacity in (32, 48):
        cache = make_cache([30, 7], capacity=capacity, q_heads=4, kv_heads=2, d=16, device=device)
        torch.testing.assert_close(compiled(*cache), attend(*cache))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
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
@pytest.mark.parametrize("impl", ["flash", "naive"])
def test_nothing_waits_for_the_device(impl, waiting_forbidden):
    cache = make_cache([100, 7], capacity=128, q_heads=8, kv_heads=2, d=64, dtype=torch.bfloat16, device="cuda")
    attention_with_cache(*cache, impl=impl)
    with waiting_forbidden():
        attention_with_cache(*cache, impl=impl)
