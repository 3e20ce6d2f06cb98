"""Lists of the blocks that a mask leaves anything of: they are right, kernels visit those alone, results stay."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from cs336_systems.attention import attention
from cs336_systems.attention.blocks import HIDDEN, PARTIAL, WHOLE
from cs336_systems.attention.variants import block_local, causal, document, prefix, visible_where
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
    blocks = mask.with_blocks(**SIZES, batch=BATCH, heads=HEADS, **CALLS[call]).blocks
    assert blocks is not None
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
    listed_mask = mask.with_blocks(**SIZES, batch=BATCH, heads=HEADS, **CALLS[call], device=flash_device)
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
        ({"batch": 3}, {}, r"mask must have blocks for 2 batch entries and 1 heads; got \(3, 1\)"),
        ({"device": "meta"}, {}, r"the blocks of mask must be on cpu"),
    ],
)
def test_lists_for_another_call_are_refused(found_for, call, message):
    q = torch.zeros(2, 1, 8, 4)
    sizes = {"q_len": 8, "k_len": 8} | found_for
    made = document(torch.zeros(sizes.get("batch", 1), 8, dtype=torch.int32, device=sizes.get("device", "cpu")))
    mask = made.with_blocks(**sizes) if "device" not in found_for else made
    if "device" in found_for:
        blocks = document(torch.zeros(1, 8, dtype=torch.int32)).with_blocks(8, 8).blocks
        assert blocks is not None
        moved = blocks._replace(rows=blocks.rows.to("meta"), columns=blocks.columns.to("meta"))
        mask = type(made)(made.expression, tuple(x.to("cpu") for x in (torch.zeros(1, 8),) * 2), moved)
    with pytest.raises(ValueError, match=message):
        attention(q, q, q, mask=mask, **call)
