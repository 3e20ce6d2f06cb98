"""Bounds of masks on blocks: they hold, they decide what named masks hide, and finding blocks takes little memory."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

from cs336_systems.attention.blocks import PARTIAL, WHOLE, lists
from cs336_systems.attention.blocks.lists import PAIRS_AT_ONCE
from cs336_systems.attention.mods import mask_mod
from cs336_systems.attention.variants import block_local, causal, document, prefix, prefix_tree, tree_layout
from cs336_systems.kernels.call import BLOCK

from ..features import random_tree
from ..helpers import blocks_of

LENGTHS = 530, 700


def of_each_token(least, most, dtype=torch.int64, length=700):
    return torch.randint(least, most, (length,)).sort().values.to(dtype)


def draw(kind):
    """A function of a pair that computes with what this kind of tensor has."""
    x, y, of_heads = of_each_token(0, 9), of_each_token(-5, 5), torch.randint(0, 300, (3,))
    small, floats = of_each_token(0, 250, torch.uint8), of_each_token(0, 9).float()
    floats[77] = torch.nan
    huge = torch.full((700,), 2**63 - 1) - of_each_token(0, 3)
    wide = torch.full((700,), 2**31 - 1, dtype=torch.int32) - of_each_token(0, 3, torch.int32)
    flags, dense, distances = x > 4, torch.rand(530, 700) < 0.999, torch.randint(0, 2, (1229,)).sort().values
    return {
        "sums": lambda b, h, q, k: x[q] - y[k] + q - k >= of_heads[h] - 100,
        "equal": lambda b, h, q, k: (x[q] == x[k]) | (y[q] != y[k] + 2),
        "negative": lambda b, h, q, k: -y[k] // 3 == (k - q) // 256,
        "quotients": lambda b, h, q, k: (q // 128 == k // 128 - 1) & ~(k // 256 == h),
        "remainders": lambda b, h, q, k: (q % 128 < 64) & (k >= 128) | (q - k) % 3 == 7,
        "products": lambda b, h, q, k: q * (h + 1) > 2 * k,
        "multiples": lambda b, h, q, k: (q - k < 64 * (h + 1)) & (y[q] * -3 <= 5 * of_heads[h] - 300),
        "huge_multiples": lambda b, h, q, k: (huge[q] * 2 < k) | (wide[k] * 2 >= 7) & (q * 2**31 > k),
        "bytes": lambda b, h, q, k: small[q] + small[k] < 200,
        "floats": lambda b, h, q, k: floats[q] <= floats[k],
        "fractions": lambda b, h, q, k: q * 0.5 + 3 > k,
        "huge": lambda b, h, q, k: huge[q] + 2 > huge[k],
        "huge_alike": lambda b, h, q, k: huge[q] == huge[k],
        "negated": lambda b, h, q, k: -huge[q] - 3 < q - k,
        "wide": lambda b, h, q, k: wide[q] + 2 > wide[k],
        "flags": lambda b, h, q, k: flags[q] | ~flags[k],
        "exclusive": lambda b, h, q, k: flags[q] ^ flags[k],
        "converted": lambda b, h, q, k: (q > 200).long() + flags[k].int() == 2,
        "dense": lambda b, h, q, k: dense[q, k] & (q > 127),
        "by_distance": lambda b, h, q, k: distances[k - q + 529] == 1,
        "elsewhere": lambda b, h, q, k: x[(2 * q).clamp(max=699)] == x[k],
        "functions": lambda b, h, q, k: (q - k).abs() <= torch.where(flags[q], 100, torch.minimum(x[k], x[q])),
        "of_one_row": lambda b, h, q, k: flags[7] | (x[3] > y[k]),
        "shifted": lambda b, h, q, k: (q >> 7) >= (k << 1),
        "constant": lambda b, h, q, k: of_heads[h] > 150,
        "all": lambda b, h, q, k: q == q,
        "number": lambda b, h, q, k: torch.tensor(False),
    }[kind]


KINDS = [
    *("sums", "equal", "negative", "quotients", "remainders", "products", "multiples", "huge_multiples", "bytes"),
    *(
        "floats",
        "fractions",
        "huge",
        "huge_alike",
        "negated",
        "wide",
        "flags",
        "exclusive",
        "converted",
        "dense",
        "by_distance",
    ),
    *("elsewhere", "functions", "of_one_row", "shifted", "constant", "all", "number"),
]


def expected_kinds(seen):
    """(..., blocks, blocks) of (..., q_len, k_len); rows past the end count as those that exist."""
    rows = -seen.shape[-2] % BLOCK
    some, every = (
        pad(seen.float(), (0, -seen.shape[-1] % BLOCK, 0, rows), value=0.0),
        pad(pad(seen.float(), (0, -seen.shape[-1] % BLOCK)), (0, 0, 0, rows), value=1.0),
    )
    some, every = (
        x.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK)).transpose(-3, -2).flatten(-2) for x in (some, every)
    )
    return torch.where(every.all(-1), WHOLE, some.any(-1).int())


def kinds_of(lists):
    """The kinds that lists say."""
    found = torch.zeros(*lists.shape[:-1], lists.shape[-1] - 3, dtype=torch.int64)
    for place in torch.cartesian_prod(*map(torch.arange, lists.shape[:-1])).tolist():
        partly, wholly, *order, _ = lists[tuple(place)].tolist()
        found[(*place, order[:partly])] = PARTIAL
        found[(*place, order[partly : partly + wholly])] = WHOLE
    return found


def within(settings):
    """Pairs within the causal mask and the window."""
    (q_len, k_len), distance = LENGTHS, torch.arange(700) - torch.arange(530)[:, None]
    before, after = settings.get("window", (None, None))
    shift = 0 if settings.get("causal") == "top_left" else k_len - q_len
    right = 0 if "causal" in settings else after
    seen = torch.ones(q_len, k_len, dtype=torch.bool)
    seen &= True if right is None else distance <= shift + right
    return seen if before is None else seen & (distance >= shift - before)


@pytest.mark.parametrize(
    "settings", [{}, {"causal": True}, {"causal": "top_left", "window": (200, None)}, {"window": (None, 90)}], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_are_those_of_all_pairs(kind, settings):
    mask = mask_mod(draw(kind))
    if kind in ("sums", "equal"):
        mask = mask | prefix(torch.tensor([130])) if kind == "sums" else mask & ~block_local(256)
    blocks = blocks_of(mask, *LENGTHS, heads=3, **settings)
    seen = mask.to_tensor(*LENGTHS, heads=3)
    seen = expected_kinds(seen & within(settings))
    assert torch.equal(kinds_of(blocks.rows), seen[:, : blocks.rows.shape[1]].long())
    assert torch.equal(kinds_of(blocks.columns), seen[:, : blocks.rows.shape[1]].mT.long())


class Recorded(TorchDispatchMode):
    """The bytes of the largest tensor that is made inside, and how often a number is asked of a tensor."""

    largest = asked = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.asked += function is torch.ops.aten._local_scalar_dense.default
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return result


TOKENS = 131_072


def large_documents():
    starts = torch.randint(0, TOKENS, (128,)).sort().values
    return starts, document(torch.bucketize(torch.arange(TOKENS), starts, right=True)[None])


def test_documents_of_many_tokens():
    """No tensor is larger than a number for each block, and the lists are right."""
    starts, mask = large_documents()
    with Recorded() as recorded:
        rows = blocks_of(mask, TOKENS, TOKENS, causal=True).rows[0, 0]
    assert recorded.largest <= 8 * (TOKENS // BLOCK + 2) ** 2
    assert recorded.asked == 0  # a GPU is waited for once, for the undecided blocks
    first = torch.arange(0, TOKENS, BLOCK)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), starts])
    seen_from = bounds[torch.bucketize(first, starts, right=True)]
    assert torch.equal(rows[:, :2].sum(1).long(), first // BLOCK - seen_from // BLOCK + 1)


def test_trees_of_many_tokens():
    lengths, parents = [], []
    while sum(lengths) < TOKENS - 2000:
        nodes = random_tree(2000)
        parents += [parent if parent == -1 else parent + len(lengths) for parent in nodes[1]]
        lengths += [100 * length for length in nodes[0]]
    ends = tree_layout([lengths], [parents]).ends[:, :TOKENS]
    with Recorded() as recorded:
        blocks = blocks_of(prefix_tree(ends), ends.shape[1], ends.shape[1], causal=True)
    assert recorded.largest <= 8 * (TOKENS // BLOCK + 3) ** 2
    for row in torch.randint(0, blocks.rows.shape[2], (6,)).tolist():
        queries, keys = torch.arange(ends.shape[1])[row * BLOCK : (row + 1) * BLOCK, None], torch.arange(ends.shape[1])
        seen = (keys <= queries) & (queries < ends[0])
        assert torch.equal(kinds_of(blocks.rows[:, :, row : row + 1]), expected_kinds(seen)[None, None].long())


def test_pairs_of_undecided_blocks_are_a_few_at_a_time():
    """Of a mask of which nothing is known, in heads that differ."""
    mask = mask_mod(lambda b, h, q, k: (q * k + h) % 1001 == 1)
    with Recorded() as recorded:
        mask.with_blocks(300, 65_536, heads=3)
    assert recorded.largest <= 8 * PAIRS_AT_ONCE["cpu"]


def test_many_entries_and_heads_are_computed_together(monkeypatch):
    calls, whole, lengths = [], lists.bounds_of, torch.randint(0, 1000, (8, 32))
    monkeypatch.setattr(lists, "bounds_of", lambda *given: (calls.append(given), whole(*given))[1])
    mask = mask_mod(lambda b, h, q, k: k < lengths[b, h])
    found = blocks_of(mask, 500, 1000, batch=8, heads=32).rows
    assert len(calls) <= 4
    keys = torch.arange(1000)
    seen = (keys < lengths[..., None, None]).expand(-1, -1, 500, -1)
    for entry in range(8):
        assert torch.equal(kinds_of(found[entry]), expected_kinds(seen[entry]).long())


@pytest.mark.parametrize(
    "mask",
    [
        *(block_local(256), causal(-128), prefix(torch.tensor([512])) & causal(0), ~block_local(384)),
        mask_mod(lambda b, h, q, k: (q - k < 128 * (h + 1)) & (-q * 2 <= k * -1)),
    ],
)
def test_bounds_decide_what_whole_blocks_say(monkeypatch, mask):
    """So few pairs are looked at: those of blocks that are partly visible."""
    looked, whole = [], lists.seen_pairs
    monkeypatch.setattr(lists, "seen_pairs", lambda o, pairs, *rest: (looked.append(pairs), whole(o, pairs, *rest))[1])
    found = blocks_of(mask, 1024, 1024, heads=3).rows
    exact = sum(pairs.row.shape[0] for pairs in looked if isinstance(pairs.row, torch.Tensor) and pairs.row.ndim == 3)
    assert exact == int(found[..., 0].sum())
