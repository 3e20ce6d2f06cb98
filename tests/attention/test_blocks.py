"""Lists of the blocks that a mask leaves anything of: they are right, kernels visit those alone, results stay."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from cs336_systems.attention import attention
from cs336_systems.attention.blocks import HIDDEN, PARTIAL, WHOLE
from cs336_systems.attention.rules import predicate
from cs336_systems.attention.variants import block_local, causal, document, prefix, visible_where
from cs336_systems.kernels.language import at
from cs336_systems.kernels.settings import BLOCK
from cs336_systems.testing import Shapes, assert_within_budget, evaluate, make_inputs

SIZES = {"q_len": 300, "k_len": 420}
BATCH, HEADS = 2, 2


def numbers(device, *ends):
    """(1, length) of document numbers, the last document ending at the last of ``ends``."""
    bounds = torch.tensor(ends, device=device)
    return torch.bucketize(torch.arange(ends[-1], device=device), bounds, right=True)[None]


MASKS = {
    "document": lambda device: document(numbers(device, 90, 130, 300), numbers(device, 128, 256, 420)),
    "block_local": lambda device: block_local(BLOCK),
    "prefix": lambda device: prefix(torch.tensor([40, 290], device=device)) | causal(),
    "by_head": lambda device: visible_where(
        torch.stack([torch.zeros(420, device=device), torch.ones(420, device=device)]).bool().view(1, 2, 1, 420)
    ),
    "nothing": lambda device: visible_where(torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)),
    "scattered": lambda device: visible_where(torch.rand(2, 1, 300, 420, device=device) < 1e-4),
}
CALLS = {
    "no_band": {},
    "causal": {"causal": True},
    "top_left_window": {"causal": "top_left", "window": (150, None)},
    "window": {"window": (60, 200)},
}


def seen_pairs(mask, call, device):
    """(batch, heads, q_len, k_len) bools: the weights that are not 0, of scores that are all equal."""
    zeros = torch.zeros(BATCH, HEADS, 300, 1, device=device)
    k, v = torch.zeros(BATCH, HEADS, 420, 1, device=device), torch.eye(420, device=device).expand(BATCH, HEADS, -1, -1)
    return attention(zeros, k, v, mask=mask, impl="naive", **call) > 0


def blocks_of(mask, q_len=300, k_len=300, **arguments):
    blocks = mask.with_blocks(q_len, k_len, **arguments).blocks
    assert blocks is not None
    return blocks


def kinds_of(seen):
    padded = torch.nn.functional.pad(seen, (0, -420 % BLOCK, 0, -300 % BLOCK))
    exists = torch.nn.functional.pad(torch.ones(300, 420, dtype=torch.bool), (0, -420 % BLOCK, 0, -300 % BLOCK))
    kinds = torch.empty(BATCH, HEADS, 3, 4, dtype=torch.int64)
    for batch in range(BATCH):
        for head in range(HEADS):
            for row in range(3):
                for column in range(4):
                    place = slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK)
                    own, there = padded[batch, head][place], exists[place]
                    # Rows past the end are nobody's; a block whose columns end early is not whole.
                    complete = bool(own[there.any(1)].all()) and bool(there.any(0).all())
                    kinds[batch, head, row, column] = WHOLE if complete else PARTIAL if own.any() else HIDDEN
    return kinds


def listed(lists, kind):
    """Sets of the blocks of one kind beside each block, as (batch, head, block) -> numbers."""
    found = {}
    for batch in range(BATCH):
        for head in range(HEADS):
            own = lists[batch % lists.shape[0], head % lists.shape[1]]
            for number, (partial_count, whole_count, *order) in enumerate(own.tolist()):
                start = 0 if kind == PARTIAL else partial_count
                count = partial_count if kind == PARTIAL else whole_count
                found[batch, head, number] = order[start : start + count]
    return found


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", MASKS)
def test_lists_hold_the_blocks_that_are_seen(name, call):
    device = torch.device("cpu")
    mask = MASKS[name](device)
    blocks = blocks_of(mask, **SIZES, **CALLS[call])
    kinds = kinds_of(seen_pairs(mask, CALLS[call], device))
    for kind in (PARTIAL, WHOLE):
        for (batch, head, row), columns in listed(blocks.rows, kind).items():
            assert columns == (kinds[batch, head, row] == kind).nonzero().flatten().tolist()
        for (batch, head, column), rows in listed(blocks.columns, kind).items():
            assert rows == (kinds[batch, head, :, column] == kind).nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("document", "causal"),
        ("block_local", "window"),
        ("prefix", "no_band"),
        ("by_head", "top_left_window"),
        ("nothing", "no_band"),
        ("scattered", "causal"),
    ],
)
def test_results_are_within_the_budget(flash_device, name, call):
    inputs = make_inputs(Shapes.of(BATCH, **SIZES, d=16, q_heads=HEADS), dtype=torch.float16, device=flash_device)
    mask = MASKS[name](flash_device)
    listed_mask = mask.with_blocks(**SIZES, **CALLS[call], device=flash_device)
    settings = {"causal": CALLS[call].get("causal", False)}
    attend = partial(attention, impl="flash", return_lse=True, **CALLS[call])
    results = evaluate(attend, inputs, {"mask": listed_mask})
    window = CALLS[call].get("window")
    assert_within_budget(results, inputs, **settings, features={"mask": mask, "window": window})


def test_hidden_blocks_are_not_visited(flash_device):
    """Else the NaN there would spread, since 0 times NaN is NaN."""
    inputs = make_inputs(Shapes.of(1, q_len=256, d=16), dtype=torch.float16, device=flash_device)
    mask = block_local(BLOCK).with_blocks(256, 256, device=flash_device)
    expected = evaluate(partial(attention, impl="flash", mask=mask), inputs)
    for x in (inputs.v, inputs.dout):
        x[..., BLOCK:, :] = float("nan")
    results = evaluate(partial(attention, impl="flash", mask=mask), inputs)
    for name, x in results.items():
        assert torch.equal(x[..., :BLOCK, :], expected[name][..., :BLOCK, :]), name


def test_blocks_go_with_everything_else(flash_device):
    inputs = make_inputs(Shapes.of(1, **SIZES, d=16, q_heads=2, kv_heads=1), dtype=torch.float16, device=flash_device)
    mask = MASKS["document"](flash_device)
    features = {
        "bias": torch.randn(1, 2, 300, 420, dtype=torch.float16, device=flash_device, requires_grad=True),
        "alibi_slopes": torch.rand(2, device=flash_device, requires_grad=True),
        "sinks": torch.randn(2, device=flash_device, requires_grad=True),
        "softcap": 5.0,
        "dropout_p": 0.2,
        "seed": 7,
    }
    attend = partial(attention, impl="flash", return_lse=True, causal=True)
    results = evaluate(attend, inputs, features | {"mask": mask.with_blocks(**SIZES, causal=True)})
    assert_within_budget(results, inputs, causal=True, features=features | {"mask": mask})


def apart(device):
    """Masks that tell batch entries, heads or both apart, with the causal mask that goes with them."""
    ids = torch.stack([numbers(device, 90, 200, 300)[0], numbers(device, 20, 150, 300)[0]])
    by_both = torch.rand(BATCH, HEADS, 1, 300, device=device) < 0.01
    by_both[0, :, :, 128:] = False
    return {
        "document": (document(ids), True),
        "prefix": (prefix(torch.tensor([10, 290], device=device)), False),
        "both": (visible_where(by_both), "top_left"),
        "combined": (~document(ids) | prefix(torch.tensor([10], device=device)), False),
        "larger": (document(ids.repeat(2, 1)), True),
    }


@pytest.mark.parametrize("name", ["document", "prefix", "both", "combined"])
@pytest.mark.parametrize("impl", ["flash", "tiled", "naive"])
def test_entries_and_heads_that_a_mask_tells_apart_have_lists_each(device, impl, name):
    """As the documentation has it: nobody says how many entries and heads there are."""
    mask, causal_mask = apart(device)[name]
    listed = mask.with_blocks(300, 300, causal=causal_mask)
    shapes = Shapes.of(BATCH, q_len=300, k_len=300, d=16, q_heads=HEADS)
    dtype = torch.float32 if impl == "naive" else torch.float16  # naive's log-sum-exp is of its dtype
    inputs = make_inputs(shapes, dtype=dtype, device=device)
    results = evaluate(partial(attention, impl=impl, return_lse=True, mask=listed, causal=causal_mask), inputs)
    assert_within_budget(results, inputs, causal=causal_mask, features={"mask": mask})


def test_lists_are_as_many_as_entries_and_heads_differ():
    device = torch.device("cpu")
    found = {name: blocks_of(mask) for name, (mask, _) in apart(device).items()}
    assert {name: tuple(blocks.rows.shape[:2]) for name, blocks in found.items()} == {
        "document": (BATCH, 1),
        "prefix": (BATCH, 1),
        "both": (BATCH, HEADS),
        "combined": (BATCH, 1),
        "larger": (2 * BATCH, 1),
    }
    larger = apart(device)["larger"][0]
    for batch in (1, 3):  # a call may have fewer entries than what was captured
        assert blocks_of(larger, batch=batch).rows.shape[0] == batch
    alike = blocks_of(block_local(BLOCK), batch=5, heads=3)
    assert alike.rows.shape[:2] == (1, 1)
    q = torch.zeros(5, 7, 300, 8)
    attention(q, q, q, mask=block_local(BLOCK).with_blocks(300, 300, batch=2), impl="tiled")


@predicate
def undeclared(batch, head, row, column, lengths):
    return column < at(lengths, (batch,))


@predicate
def of_heads(batch, head, row, column):
    return (row + column) % (head + 2) == 0


def test_what_a_rule_does_not_declare_has_to_be_said():
    lengths = torch.tensor([40, 200, 290])
    for mask, argument, number in ((undeclared(lengths), "batch", 3), (of_heads(), "heads", 4)):
        with pytest.raises(ValueError, match=rf"^{argument} must be given, because the rules of mask read more along"):
            mask.with_blocks(300, 300)
        blocks = blocks_of(mask, **{argument: number})
        assert blocks.rows.shape[:2] == ((3, 1) if argument == "batch" else (1, 4))
        assert getattr(blocks, argument) == number
    # One captured number that all entries share tells none apart.
    assert blocks_of(undeclared(lengths[:1])).batch is None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"batch": 3},
            ValueError,
            r"what mask captured must have shape \(3, 8\) at least.*; got \(2, 8\)",
        ),
        (
            {"q_len": 9},
            ValueError,
            r"what mask captured must have shape \(2, 9\) at least.*; got \(2, 8\)",
        ),
        ({"q_len": 0}, ValueError, r"q_len must be at least 1; got 0"),
        ({"heads": 0}, ValueError, r"heads must be at least 1; got 0"),
        ({"batch": 2.0}, TypeError, r"batch must be an integer; got 2.0 of type float"),
        ({"device": "meta"}, ValueError, r"what mask captured must be on meta to match q; got cpu"),
    ],
)
def test_lists_that_cannot_be_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        document(torch.zeros(2, 8, dtype=torch.int32)).with_blocks(**({"q_len": 8, "k_len": 8} | arguments))


@pytest.mark.parametrize("impl", ["flash", "tiled", "naive"])
@pytest.mark.parametrize(
    ("found_for", "message"),
    [
        ({}, r"mask must have blocks for 3 batch entries, which it tells apart; got those of 2"),
        ({"batch": 1}, r"mask must have blocks for 3 batch entries, which it tells apart; got those of 1"),
    ],
)
def test_lists_for_other_entries_are_refused(impl, found_for, message):
    q = torch.zeros(3, 2, 8, 16)
    mask = document(torch.zeros(2 if not found_for else 3, 8, dtype=torch.int32))
    with pytest.raises(ValueError, match=message):
        attention(q, q, q, mask=mask.with_blocks(8, 8, **found_for), impl=impl)


def test_lists_for_other_heads_are_refused():
    q = torch.zeros(3, 2, 8, 16)
    mask = of_heads().with_blocks(8, 8, heads=1)
    with pytest.raises(ValueError, match="mask must have blocks for 2 heads, which it tells apart; got those of 1"):
        attention(q, q, q, mask=mask)


def test_combined_masks_have_no_lists():
    mask = block_local(64).with_blocks(200, 200)
    assert mask.blocks is not None
    assert (mask & causal()).blocks is None
    assert (~mask).blocks is None


@pytest.mark.parametrize(
    ("found_for", "call", "message"),
    [
        ({"q_len": 7, "k_len": 8}, {}, r"mask must have blocks that were found for this call"),
        ({}, {"causal": True}, r"mask must have blocks that were found for this call"),
        ({}, {"window": (3, 3)}, r"mask must have blocks that were found for this call"),
        ({"batch": 3}, {}, r"mask must have blocks for 2 batch entries, which it tells apart; got those of 3"),
        ({"device": "meta"}, {}, r"the blocks of mask must be on cpu"),
    ],
)
def test_lists_for_another_call_are_refused(found_for, call, message):
    q = torch.zeros(2, 1, 8, 4)
    sizes = {"q_len": 8, "k_len": 8} | found_for
    made = document(torch.zeros(sizes.get("batch", 1), 8, dtype=torch.int32, device=sizes.get("device", "cpu")))
    mask = made.with_blocks(**sizes) if "device" not in found_for else made
    if "device" in found_for:
        blocks = blocks_of(document(torch.zeros(1, 8, dtype=torch.int32)), 8, 8)
        moved = blocks._replace(rows=blocks.rows.to("meta"), columns=blocks.columns.to("meta"))
        mask = type(made)(made.expression, tuple(x.to("cpu") for x in (torch.zeros(1, 8),) * 2), moved)
    with pytest.raises(ValueError, match=message):
        attention(q, q, q, mask=mask, **call)
