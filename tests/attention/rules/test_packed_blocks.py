"""Lists of blocks of packed sequences: those of each sequence by itself, and kernels visit those alone."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch

from cs336_systems.attention import attention_varlen
from cs336_systems.attention.mods import mask_mod
from cs336_systems.attention.variants import block_local, causal, document, prefix_tree, tree_layout
from cs336_systems.kernels.call import BLOCK
from cs336_systems.testing import (
    assert_packed_within_budget,
    evaluate,
    make_packed,
    poisoned_memory,
    starts_of,
)

from ..features import random_tree
from ..helpers import DOUBLE, FLOAT, HALF, blocks_of, each_dtype, named, packed_arguments

LENGTHS = [(3, 5), (0, 4), (140, 133), (1, 0), (9, 260), (129, 128)]
MOST = 140, 260


def starts(lengths, device):
    given = packed_arguments(lengths, device)
    return {name: given[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}


def documents(device):
    ids = [torch.randint(0, 3, (len(LENGTHS), length), device=device).sort(-1).values for length in MOST]
    return document(*ids)


def trees(device):
    drawn = [random_tree(260) for _ in LENGTHS]
    return prefix_tree(tree_layout(*zip(*drawn, strict=True), length=260, device=device).ends)


MASKS = {
    "documents": documents,
    "trees": trees,
    "blocks": lambda device: ~block_local(100),
    "of_heads": lambda device: mask_mod(lambda b, h, q, k: (q + k * b) % (h + 2) == 0),
}
CALLS = {
    "documents": {"causal": True},
    "trees": {"causal": "top_left"},
    "blocks": {"window": (90, None)},
    "of_heads": {"causal": True, "window": (200, None)},
}


@pytest.mark.parametrize("settings", CALLS.values(), ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_lists_are_those_of_each_sequence(name, settings):
    mask = MASKS[name](torch.device("cpu"))
    given = {"heads": 2, **settings}
    packed = blocks_of(mask, *MOST, **starts(LENGTHS, "cpu"), **given)
    assert packed.batch == len(LENGTHS)
    for number, lengths in enumerate(LENGTHS):
        if 0 in lengths:
            assert not packed.rows[number, ..., :2].any()
            assert not packed.columns[number, ..., :2].any()
            continue
        alone = blocks_of(mask, *lengths, batch=len(LENGTHS), **given)
        for lists, own in ((packed.rows[number], alone.rows), (packed.columns[number], alone.columns)):
            own = own[number % own.shape[0]]
            assert torch.equal(lists[:, : own.shape[1], :2], own[..., :2])
            assert not lists[:, own.shape[1] :, :2].any()
            for listed, expected in zip(lists[:, : own.shape[1]].flatten(0, 1), own.flatten(0, 1), strict=True):
                visible = int(expected[:2].sum())
                assert torch.equal(listed[2 : 2 + visible], expected[2 : 2 + visible])


@pytest.mark.parametrize("name", named(MASKS, ["trees"]))
@each_dtype(flash=(HALF, FLOAT), tiled=(FLOAT,), naive=(DOUBLE,))
def test_results_are_within_the_budget(impl, dtype, device, name):
    mask = MASKS[name](device)
    listed = mask.with_blocks(*MOST, **starts(LENGTHS, device), heads=4, **CALLS[name])
    inputs = make_packed(LENGTHS, heads=(4, 2), d=16, beyond=3, dtype=dtype, device=device)
    attend = partial(attention_varlen, impl=impl, return_lse=True, **CALLS[name], **packed_arguments(LENGTHS, device))
    with poisoned_memory():
        results = evaluate(partial(attend, mask=listed), inputs)
    dense = mask.to_tensor(*MOST, batch=len(LENGTHS), heads=4, device=device)
    window, causal_mask = CALLS[name].get("window"), CALLS[name].get("causal", False)
    features = {"mask": dense, "window": window}
    assert_packed_within_budget(results, inputs, LENGTHS, causal=causal_mask, features=features)


def test_hidden_blocks_are_not_visited(flash_device):
    """Else the NaN there would spread, since 0 times NaN is NaN."""
    lengths = [(256, 256), (9, 9)]
    inputs = make_packed(lengths, heads=(1, 1), d=16, dtype=HALF, device=flash_device)
    mask = block_local(BLOCK).with_blocks(256, 256, **starts(lengths, flash_device))
    attend = partial(attention_varlen, impl="flash", mask=mask, **packed_arguments(lengths, flash_device))
    expected = evaluate(attend, inputs)
    for x in (inputs.v, inputs.dout):
        x[BLOCK:256] = float("nan")
    for name, x in evaluate(attend, inputs).items():
        for rows in (slice(0, BLOCK), slice(256, None)):
            assert torch.equal(x[rows], expected[name][rows]), name


def test_changed_sequences_are_noticed_on_a_cpu():
    own = starts_of([3, 4], "cpu")
    mask = causal().with_blocks(4, 4, cu_seqlens_q=own)
    q = torch.zeros(7, 1, 8)
    for impl in ("tiled", "naive"):
        attention_varlen(q, q, q, own, max_seqlen_q=4, max_seqlen_k=4, mask=mask, impl=impl)
    own[1] = 4
    for impl in ("tiled", "naive"):
        with pytest.raises(ValueError, match="mask must have blocks that were found for these sequences"):
            attention_varlen(q, q, q, own, max_seqlen_q=4, max_seqlen_k=4, mask=mask, impl=impl)


def test_equal_lengths_are_found_once():
    own, mask = starts_of([3, 4], "cpu"), block_local(2)
    first = blocks_of(mask, 4, 4, cu_seqlens_q=own, cache=True)
    assert blocks_of(mask, 4, 4, cu_seqlens_q=own.clone(), cu_seqlens_k=own, cache=True) is first
    own[1] = 4
    assert blocks_of(mask, 4, 4, cu_seqlens_q=own, cache=True) is not first


STARTS = torch.tensor([0, 3, 7])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"cu_seqlens_q": [0, 7]}, TypeError, "cu_seqlens_q must be (sequences + 1,) int32 or int64 numbers; got list"),
        ({"cu_seqlens_q": None}, ValueError, "cu_seqlens_q must be given with cu_seqlens_k; got None"),
        ({"cu_seqlens_k": STARTS[:2]}, ValueError, "cu_seqlens_k must have shape (3,) to match cu_seqlens_q; got (2,)"),
        ({"cu_seqlens_k": STARTS.to("meta")}, ValueError, "cu_seqlens_k must be on cpu to match the mask; got meta"),
        ({"cu_seqlens_k": STARTS - 1}, ValueError, "cu_seqlens_k must count from 0 on and never decrease; got [-1, 2"),
        ({"q_len": 3}, ValueError, "max_seqlen_q must be at least 4, the longest sequence; got 3"),
        ({"batch": 3}, ValueError, "batch must be 2, the sequences of cu_seqlens_q; got 3"),
    ],
)
def test_lists_that_cannot_be_are_refused(arguments, error, message):
    given = {"q_len": 4, "k_len": 4, "cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS}
    with pytest.raises(error, match=re.escape(message)):
        block_local(2).with_blocks(**given | arguments)
