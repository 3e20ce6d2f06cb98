"""Lists of the blocks that a mask leaves visible: they are right, kernels visit those alone, results stay the same."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.functional import pad

from cs336_systems.attention import attention
from cs336_systems.attention.blocks import HIDDEN, PARTIAL, WHOLE
from cs336_systems.attention.mods import mask_mod
from cs336_systems.attention.variants import block_local, causal, document, prefix, visible_where
from cs336_systems.kernels.call import BLOCK
from cs336_systems.testing import Shapes, evaluate, make_inputs

from ..features import Maker
from ..helpers import FLOAT, HALF, blocks_of, check, each_implementation, named

CPU = torch.device("cpu")
SIZES = {"q_len": 300, "k_len": 420}
BATCH, HEADS = 2, 2


def ids(device, *ends):
    """(1, length) of document numbers, the last document ending at the last of ``ends``."""
    bounds = torch.tensor(ends, device=device)
    return torch.bucketize(torch.arange(ends[-1], device=device), bounds, right=True)[None]


def by_head(device):
    return visible_where(torch.arange(2, device=device).bool().view(1, 2, 1, 1).expand(1, 2, 1, 420))


MASKS = {
    "document": lambda device: document(ids(device, 90, 130, 300), ids(device, 128, 256, 420)),
    "block_local": lambda device: block_local(BLOCK),
    "prefix": lambda device: prefix(torch.tensor([40, 290], device=device)) | causal(),
    "by_head": by_head,
    "nothing": lambda device: visible_where(torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)),
    "scattered": lambda device: visible_where(torch.rand(2, 1, 300, 420, device=device) < 1e-4),
}
CALLS = {
    "document": {"causal": True},
    "block_local": {"window": (60, 200)},
    "prefix": {},
    "by_head": {"causal": "top_left", "window": (150, None)},
    "nothing": {},
    "scattered": {"causal": True},
}


def kinds_of(mask, call):
    """(batch, heads, 3, 4): whether each block is hidden, partly or wholly visible, from weights of equal scores."""
    q, k = torch.zeros(BATCH, HEADS, 300, 1), torch.zeros(BATCH, HEADS, 420, 1)
    seen = attention(q, k, torch.eye(420).expand(BATCH, HEADS, -1, -1), mask=mask, impl="naive", **call) > 0
    # Rows past the end are nobody's; a block whose columns end early is not whole.
    wide = -420 % BLOCK, -300 % BLOCK
    least = pad(pad(seen.float(), (0, wide[0])), (0, 0, 0, wide[1]), value=1.0)
    some, every = (
        x.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK)).transpose(-3, -2).flatten(-2)
        for x in (pad(seen, (0, wide[0], 0, wide[1])), least.bool())
    )
    return torch.where(every.all(-1), WHOLE, torch.where(some.any(-1), PARTIAL, HIDDEN))


def listed(lists, kinds, kind, step):
    """Whether the lists hold exactly the blocks of this kind, (..., block, other block), in this order."""
    for batch in range(BATCH):
        for head in range(HEADS):
            own = lists[batch % lists.shape[0], head % lists.shape[1]]
            for number, (partly, wholly, *order) in enumerate(own.tolist()):
                found = order[:partly] if kind == PARTIAL else order[partly : partly + wholly]
                assert found == (kinds[batch, head, number] == kind).nonzero().flatten().tolist()[::step]


@pytest.mark.parametrize("call", [{}, *[call for call in CALLS.values() if call][:3]], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_lists_hold_the_blocks_that_are_seen(name, call):
    mask = MASKS[name](CPU)
    blocks, kinds = blocks_of(mask, **SIZES, **call), kinds_of(mask, call)
    for kind in (PARTIAL, WHOLE):
        listed(blocks.rows, kinds, kind, -1)
        listed(blocks.columns, kinds.mT, kind, 1)


@pytest.mark.parametrize("name", MASKS)
def test_lists_say_which_are_longest(name):
    blocks = blocks_of(MASKS[name](CPU), **SIZES)
    for lists, step in ((blocks.rows, -1), (blocks.columns, 1)):
        for own in lists.flatten(0, 1):
            lengths = own[:, :2].sum(-1).tolist()
            expected = sorted(range(len(own)), key=lambda block: (-lengths[block], step * block))
            assert own[:, -1].tolist() == expected


def test_lists_of_many_blocks_are_in_order():
    count = 300
    rows, columns = blocks_of(causal(), q_len=count * BLOCK, k_len=count * BLOCK, device=CPU)[:2]
    for number in range(count):
        assert rows[0, 0, number, : 3 + number].tolist() == [1, number, *range(number, -1, -1)]
        assert columns[0, 0, number, : 2 + count - number].tolist() == [1, count - 1 - number, *range(number, count)]


@pytest.mark.parametrize("name", named(MASKS, ["document", "by_head"]))
def test_results_are_within_the_budget(flash_device, name):
    inputs = make_inputs(Shapes.of(BATCH, **SIZES, d=16, q_heads=HEADS), dtype=HALF, device=flash_device)
    mask, call = MASKS[name](flash_device), CALLS[name]
    features = {"mask": mask.with_blocks(**SIZES, **call, device=flash_device), "window": call.get("window")}
    check("flash", inputs, features, causal=call.get("causal", False))


def test_hidden_blocks_are_not_visited(flash_device):
    """Else the NaN there would spread, since 0 times NaN is NaN."""
    inputs = make_inputs(Shapes.of(1, q_len=256, d=16), dtype=HALF, device=flash_device)
    mask = block_local(BLOCK).with_blocks(256, 256, device=flash_device)
    expected = evaluate(partial(attention, impl="flash", mask=mask), inputs)
    for x in (inputs.v, inputs.dout):
        x[..., BLOCK:, :] = float("nan")
    for name, x in evaluate(partial(attention, impl="flash", mask=mask), inputs).items():
        assert torch.equal(x[..., :BLOCK, :], expected[name][..., :BLOCK, :]), name


@pytest.mark.slow
def test_with_every_other_feature(flash_device):
    """And the gradient of a bias, whose kernel visits the same blocks."""
    inputs = make_inputs(Shapes.of(1, **SIZES, d=16, q_heads=2, kv_heads=1), dtype=HALF, device=flash_device)
    make = Maker((1, 2, 300, 420), FLOAT, flash_device)
    features = make.bias("hqk") | make.slopes() | make.sinks() | {"softcap": 5.0, "dropout_p": 0.2, "seed": 7}
    mask = MASKS["document"](flash_device).with_blocks(**SIZES, causal=True)
    check("flash", inputs, features | {"mask": mask}, causal=True)


def apart(device):
    """Masks that tell batch entries, heads or both apart, with the causal mask that goes with them."""
    of_both = torch.stack([ids(device, 90, 200, 300)[0], ids(device, 20, 150, 300)[0]])
    by_both = torch.rand(BATCH, HEADS, 1, 300, device=device) < 0.01
    by_both[0, :, :, 128:] = False
    return {
        "document": (document(of_both), True),
        "prefix": (prefix(torch.tensor([10, 290], device=device)), False),
        "both": (visible_where(by_both), "top_left"),
        "combined": (~document(of_both) | prefix(torch.tensor([10], device=device)), False),
        "larger": (document(of_both.repeat(2, 1)), True),
    }


@pytest.mark.parametrize("name", named(["document", "prefix", "both", "combined"], ["both"]))
@each_implementation
def test_entries_and_heads_that_a_mask_tells_apart_have_lists_each(device, impl, name):
    """Nobody says how many entries and heads there are."""
    mask, causal_mask = apart(device)[name]
    shapes = Shapes.of(BATCH, q_len=300, k_len=300, d=16, q_heads=HEADS)
    dtype = FLOAT if impl == "naive" else HALF  # naive's log-sum-exp is of its dtype
    inputs = make_inputs(shapes, dtype=dtype, device=device)
    check(impl, inputs, {"mask": mask.with_blocks(300, 300, causal=causal_mask)}, causal=causal_mask)


def test_lists_are_as_many_as_entries_and_heads_differ():
    found = {name: tuple(blocks_of(mask).rows.shape[:2]) for name, (mask, _) in apart(CPU).items()}
    both = dict.fromkeys(("document", "prefix", "combined"), (BATCH, 1))
    assert found == both | {"both": (BATCH, HEADS), "larger": (2 * BATCH, 1)}
    for batch in (1, 3):  # a call may have fewer entries than what was captured
        assert blocks_of(apart(CPU)["larger"][0], batch=batch).rows.shape[0] == batch
    assert blocks_of(block_local(BLOCK), batch=5, heads=3).rows.shape[:2] == (1, 1)
    q = torch.zeros(5, 7, 300, 8)
    attention(q, q, q, mask=block_local(BLOCK).with_blocks(300, 300, batch=2), impl="tiled")


def of_heads(b, h, q_idx, kv_idx):
    return (q_idx + kv_idx) % (h + 2) == 0


def test_what_no_captured_tensor_says_has_to_be_said():
    lengths = torch.tensor([40, 200, 290])
    by_entry = mask_mod(lambda b, h, q_idx, kv_idx: kv_idx < lengths[(2 * b) % 3])
    for mask, argument, number, shape in ((by_entry, "batch", 3, (3, 1)), (mask_mod(of_heads), "heads", 4, (1, 4))):
        with pytest.raises(ValueError, match=rf"^{argument} must be given, because mask depends on it and captured no"):
            mask.with_blocks(300, 300)
        blocks = blocks_of(mask, **{argument: number})
        assert (blocks.rows.shape[:2], getattr(blocks, argument)) == (shape, number)
    # One captured number that all entries share tells none apart.
    assert blocks_of(prefix(lengths[:1])).batch is None


DOCUMENTS = torch.zeros(2, 8, dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batch": 3}, ValueError, r"what mask captured must have shape \(3, 8\) at least.*; got \(2, 8\)"),
        ({"q_len": 9}, ValueError, r"what mask captured must have shape \(2, 9\) at least.*; got \(2, 8\)"),
        ({"q_len": 0}, ValueError, r"q_len must be at least 1; got 0"),
        ({"heads": 0}, ValueError, r"heads must be at least 1; got 0"),
        ({"batch": 2.0}, TypeError, r"batch must be an integer; got 2.0 of type float"),
        ({"device": "meta"}, ValueError, r"what mask captured must be on meta to match q; got cpu"),
    ],
)
def test_lists_that_cannot_be_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        document(DOCUMENTS).with_blocks(**({"q_len": 8, "k_len": 8} | arguments))


OTHERS = r"mask must have blocks for {} {}, which it tells apart; got those of {}"
THIS_CALL = "mask must have blocks that were found for this call"


@pytest.mark.parametrize("impl", ["auto", "flash", "tiled", "naive"])
@pytest.mark.parametrize(
    ("mask", "found_for", "call", "message"),
    [
        (document(DOCUMENTS), {}, {}, OTHERS.format(3, "batch entries", 2)),
        (document(DOCUMENTS[:1].repeat(3, 1)), {"batch": 1}, {}, OTHERS.format(3, "batch entries", 1)),
        (mask_mod(of_heads), {"heads": 1}, {}, OTHERS.format(2, "heads", 1)),
        (block_local(3), {"q_len": 7}, {}, THIS_CALL),
        (block_local(3), {}, {"causal": True}, THIS_CALL),
        (block_local(3), {}, {"window": (3, 3)}, THIS_CALL),
    ],
)
def test_lists_for_another_call_are_refused(impl, mask, found_for, call, message):
    q = torch.zeros(3, 2, 8, 16)
    with pytest.raises(ValueError, match=message):
        attention(q, q, q, mask=mask.with_blocks(**({"q_len": 8, "k_len": 8} | found_for)), impl=impl, **call)


def test_nothing_is_found_without_values():
    with pytest.raises(
        ValueError, match=r"^device must be one whose tensors have values, to find blocks from; got meta$"
    ):
        block_local(3).with_blocks(8, 8, device="meta")


@pytest.mark.parametrize("impl", ["auto", "flash", "tiled", "naive"])
def test_lists_on_another_device_are_refused(impl):
    q, mask = torch.zeros(3, 2, 8, 16), block_local(3)
    blocks = blocks_of(mask, 8, 8)
    elsewhere = replace(mask, blocks=blocks._replace(rows=blocks.rows.to("meta")))
    with pytest.raises(ValueError, match="the blocks of mask must be on cpu to match q; got meta"):
        attention(q, q, q, mask=elsewhere, impl=impl)


def test_combined_masks_have_no_lists():
    mask = block_local(64).with_blocks(200, 200)
    assert mask.blocks is not None
    assert (mask & causal()).blocks is None
    assert (~mask).blocks is None
