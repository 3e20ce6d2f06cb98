"""Windows and lengths of any size: what reaches further than a sequence hides nothing, and nothing wraps around."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch

from cs336_systems.attention import attention, attention_varlen, attention_with_cache, explain
from cs336_systems.attention.rules import Mask
from cs336_systems.attention.spec import AttentionSpec, Causal
from cs336_systems.attention.tiled import TiledAttentionFunction
from cs336_systems.attention.validation import check
from cs336_systems.attention.variants import alibi, block_local, causal, dilated, window
from cs336_systems.kernels.settings import FAR, MOST_ROWS, within_lengths
from cs336_systems.testing import (
    Shapes,
    assert_cached_within_budget,
    assert_within_budget,
    evaluate,
    make_cache,
    make_inputs,
    starts_of,
)

FAR_SIDES = [2**29, 2**30, 2**31 - 1, 2**31, 2**32 + 3, 2**40, 2**62, 2**63, 2**200]
SOME = [2**30, 2**31 - 1, 2**31, 2**63]
CAUSALS = [False, True, "top_left"]


@pytest.mark.parametrize("causal_mask", CAUSALS)
@pytest.mark.parametrize("sides", [(2, 1), (1, 2)])
@pytest.mark.parametrize("impl", ["flash", "tiled", "naive"])
def test_a_far_side_hides_nothing(device, impl, causal_mask, sides):
    """The other side does, and the sides of different calls are different kernels' arguments."""
    dtype = torch.float32 if impl == "naive" else torch.float16  # naive's log-sum-exp has the inputs' dtype
    for side in SOME:
        chosen = tuple(side if number == 2 else 3 for number in sides)
        inputs = make_inputs(Shapes.of(1, q_len=20, k_len=37, d=16), dtype=dtype, device=device)
        attend = partial(attention, impl=impl, causal=causal_mask, window=chosen, return_lse=True)
        results = evaluate(attend, inputs)
        near = tuple(None if number == 2 else 3 for number in sides)
        assert_within_budget(results, inputs, causal=causal_mask, features={"window": near})


@pytest.mark.parametrize("side", FAR_SIDES)
@pytest.mark.parametrize("causal_mask", CAUSALS)
def test_a_window_that_hides_nothing_is_none(causal_mask, side):
    q, k = torch.zeros(1, 2, 20, 8), torch.zeros(1, 2, 37, 8)
    for asked in ((side, None), (side, side), (None, side)):
        assert check(q, k, k, causal_mask, None, False, asked).spec.window == (None, None)
    assert check(q, k, k, causal_mask, None, False, (3, side)).spec.window == (3, None)
    none_after = causal_mask is not False
    assert check(q, k, k, causal_mask, None, False, (side, 3)).spec.window == (None, None if none_after else 3)


@pytest.mark.parametrize("causal_mask", [member.value for member in Causal])
@pytest.mark.parametrize(("q_len", "k_len"), [(1, 1), (3, 5), (5, 3), (4, 4), (1, 7)])
def test_the_nearest_window_that_hides_nothing(causal_mask, q_len, k_len):
    """What is None hides no pair, and what hides none is None."""
    rows, columns = torch.arange(q_len)[:, None], torch.arange(k_len)
    for before in range(7):
        for after in range(7):
            found = within_lengths((before, after), causal_mask, q_len, k_len)
            distance = columns - rows - (k_len - q_len if causal_mask != "top_left" else 0)
            assert (found[0] is None) == bool((distance >= -before).all())
            hides = causal_mask == "none" and bool((distance > after).any())
            assert found[1] == (after if hides else None)


@pytest.mark.parametrize("causal_mask", [False, True])
@pytest.mark.parametrize("impl", ["flash", "tiled", "naive"])
def test_packed_sequences(device, impl, causal_mask):
    q_lens, k_lens = (5, 0, 9), (7, 3, 20)
    q, k = (torch.randn(sum(lens), 2, 16, device=device) for lens in (q_lens, k_lens))
    starts = starts_of(q_lens, device), starts_of(k_lens, device)
    attend = partial(attention_varlen, q, k, k, *starts, causal=causal_mask, impl=impl)
    for side in SOME:
        for asked, near in (((side, 2), (None, 2)), ((2, side), (2, None)), ((side, side), None)):
            assert torch.equal(attend(window=asked), attend(window=near))


@pytest.mark.parametrize("impl", ["flash", "naive"])
def test_caches(device, impl):
    cache = make_cache([40, 3, 0], capacity=40, q_heads=2, kv_heads=1, d=16, new=2, device=device)
    for side in FAR_SIDES:
        out, lse = attention_with_cache(*cache, window=(side, side), impl=impl, return_lse=True)
        assert_cached_within_budget(out, lse, cache)


def test_specs_made_by_hand(device):
    q = torch.randn(2, 9, 8, device=device)
    spec = AttentionSpec(Causal.NONE, 0.5, window=(2**63, 1))
    expected = attention(q, q, q, scale=0.5, window=(None, 1), impl="naive")
    torch.testing.assert_close(TiledAttentionFunction.apply(q, q, q, spec), expected)


FAR_MASKS: dict[str, tuple[Mask, Mask | None]] = {
    "window": (window(2**31 - 1, 2**31 - 1), None),
    "one_side": (window(2, 2**31 - 1), window(2, 100)),
    "shift": (window(2**31 + 1, 2**31 + 2, 2**31), window(1, 2**31)),
    "causal": (causal(2**31 - 1), None),
    "nothing": (causal(-(2**40)), causal(-100)),
    "dilated": (dilated(2**31), dilated(100)),
    "block_local": (block_local(2**63), None),
}


@pytest.mark.parametrize("name", FAR_MASKS)
@pytest.mark.parametrize("impl", ["flash", "tiled", "naive"])
def test_numbers_of_masks(device, impl, name):
    far, near = FAR_MASKS[name]
    q, k = torch.randn(1, 2, 20, 16, device=device), torch.randn(1, 2, 37, 16, device=device)
    expected = attention(q, k, k, mask=near, impl="naive")
    torch.testing.assert_close(attention(q, k, k, mask=far, impl=impl), expected)


def test_a_shift_of_distances_has_to_be_one_of_positions():
    with pytest.raises(ValueError, match=r"^shift must be from -1073741824 to 1073741824; got 2147483647$"):
        alibi(torch.ones(1, 2), 2**31 - 1)


def test_more_rows_than_kernels_count_are_refused():
    many, one = (torch.zeros(1, 1, 1, 16).expand(1, 1, rows, 16) for rows in (MOST_ROWS + 1, 1))
    reason = f"it counts rows in 32 bits, up to {MOST_ROWS}; got 1 of q and {MOST_ROWS + 1} of k"
    with pytest.raises(ValueError, match=re.escape(reason)):
        attention(one, many, many, impl="flash")
    with pytest.raises(ValueError, match=re.escape("it counts rows in 32 bits")):
        attention_with_cache(one, many, many, torch.tensor([3]), impl="flash")
    assert "32 bits" in str(explain(one, many, many, window=(3, 3)))
    numbers = (one, many, many, 1.0, "", [], [])
    with pytest.raises(ValueError, match=f"^q and k must have at most {MOST_ROWS} rows; got 1 and {MOST_ROWS + 1}$"):
        torch.ops.cs336_systems.flash_forward(*numbers)


@pytest.mark.parametrize("impl", ["flash", "naive"])
@pytest.mark.parametrize("numbers", [[2**32 + 3, 1], [-1, 1], [1, 41], [-(2**40), 2**62]])
def test_lengths_of_a_cache_that_cannot_be_are_refused_on_a_cpu(impl, numbers):
    cache = make_cache([40, 1], capacity=40, q_heads=2, kv_heads=1, d=16)
    message = f"lengths must be from 0 to 40, the slots of k; got {numbers}"
    attention_with_cache(*cache, impl=impl)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        attention_with_cache(*cache[:3], torch.tensor(numbers), impl=impl)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
def test_lengths_of_a_cache_that_the_device_alone_knows_are_clamped(flash_device, dtype):
    """Asking a GPU for them would stop it; what it computes is the same for all that is beyond the capacity."""
    q, k, v, _ = make_cache([40] * 4, capacity=40, q_heads=2, kv_heads=1, d=16, device=flash_device)
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    wrong = torch.tensor([most, least, -1, min(2**32 + 3, most)], dtype=dtype, device=flash_device)
    attend = partial(torch.ops.cs336_systems.flash_with_cache, q, k, v)
    for actual, expected in zip(
        attend(wrong, 1.0, None, None), attend(wrong.clamp(0, 40), 1.0, None, None), strict=True
    ):
        assert torch.equal(actual, expected)


@pytest.mark.usefixtures("compile_afresh")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch")
@pytest.mark.parametrize("impl", ["flash", "naive"])
def test_one_graph_for_all_lengths(device, impl):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for side in (5, FAR, 2**31 - 1, 2**63):
        torch._dynamo.reset()
        graphs.clear()
        attend = partial(attention, causal=True, window=(side, None), impl=impl)
        compiled = torch.compile(attend, fullgraph=True, backend=backend, dynamic=True)
        for length in (4, 9, 30):
            q, k = torch.randn(2, 2, length, 16, device=device), torch.randn(2, 2, length + 3, 16, device=device)
            torch.testing.assert_close(compiled(q, k, k), attend(q, k, k))
        assert len(graphs) == 1


@pytest.mark.parametrize("impl", ["flash", "tiled", "naive"])
@pytest.mark.parametrize("strict", [True, False])
def test_one_exported_program_for_all_lengths(device, impl, strict):
    class Attend(torch.nn.Module):
        def forward(self, q, k):
            return attention(q, k, k, window=(2**31 - 1, 2**63), impl=impl) + attention(q, k, k, window=(2, FAR))

    length, more = (torch.export.Dim(name, min=2, max=4096) for name in ("length", "more"))
    q, k = torch.randn(2, 2, 12, 16, device=device), torch.randn(2, 2, 17, 16, device=device)
    program = torch.export.export(Attend(), (q, k), dynamic_shapes=({2: length}, {2: more}), strict=strict)
    for q_len, k_len in ((12, 17), (30, 9)):
        q, k = torch.randn(2, 2, q_len, 16, device=device), torch.randn(2, 2, k_len, 16, device=device)
        torch.testing.assert_close(program.module()(q, k), Attend()(q, k))
