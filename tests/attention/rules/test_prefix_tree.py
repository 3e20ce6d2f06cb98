"""Prefix trees: a token sees its path from the root, and every path gives what it gives as a sequence by itself."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from cs336_systems.attention import attention
from cs336_systems.attention.variants import prefix_tree, tree_layout
from cs336_systems.testing import Shapes, evaluate, make_inputs

from ..features import random_tree
from ..helpers import DOUBLE, each_implementation

ROOT = Path(__file__).parents[3]
FORKED = [5, 3, 2, 0, 4, 6], [-1, 0, 1, 1, 0, -1]
"""Two trees in one entry; a node without tokens."""


def tokens_of(lengths):
    """The indices of each node's tokens."""
    bounds = [0, *itertools.accumulate(lengths)]
    return [list(range(start, stop)) for start, stop in itertools.pairwise(bounds)]


def path_to(node, parents):
    """The nodes from the root to this one."""
    return [] if node == -1 else [*path_to(parents[node], parents), node]


def paths(lengths, parents):
    """The tokens of the path to each node, in order."""
    tokens = tokens_of(lengths)
    return [[t for above in path_to(node, parents) for t in tokens[above]] for node in range(len(lengths))]


def drawn(entries, most):
    return [*zip(*[random_tree(most) for _ in range(entries)], strict=True)]


@pytest.mark.parametrize("draw", range(8))
def test_tokens_see_their_paths(draw):
    lengths, parents = drawn(3, 60)
    layout = tree_layout(lengths, parents, length=64)
    seen, positions = torch.zeros(3, 64, 64, dtype=torch.bool), torch.zeros(3, 64, dtype=torch.int32)
    for entry, (sizes, above) in enumerate(zip(lengths, parents, strict=True)):
        for own, path in zip(tokens_of(sizes), paths(sizes, above), strict=True):
            for token in own:
                before = path[: path.index(token) + 1]
                seen[entry, token, before] = True
                positions[entry, token] = len(before) - 1
    assert torch.equal(prefix_tree(layout.ends).to_tensor(64, 64, batch=3)[:, 0], seen)
    assert torch.equal(layout.positions, positions)


@each_implementation
def test_paths_give_what_they_give_by_themselves(impl, device):
    """Outputs, and the gradients of a sum over all tokens: shared tokens get those of all paths."""
    dtype = DOUBLE if impl != "flash" else torch.float32
    shapes = Shapes.of(1, q_len=20, k_len=20, d=8, q_heads=4, kv_heads=2)
    inputs = make_inputs(shapes, dtype=dtype, device=device)
    layout = tree_layout(*[[x] for x in FORKED], device=device)

    def of_tree(q, k, v):
        return attention(q, k, v, causal=True, mask=prefix_tree(layout.ends), impl=impl)

    def of_paths(q, k, v):
        out = torch.zeros_like(q)
        for own, path in zip(tokens_of(FORKED[0]), paths(*FORKED), strict=True):
            alone = attention(*[x[..., path, :] for x in (q, k, v)], causal=True, impl="naive")
            out = out.index_copy(
                2, torch.tensor(own, dtype=torch.int64, device=device), alone[..., len(path) - len(own) :, :]
            )
        return out

    expected = evaluate(of_paths, inputs)
    for name, x in evaluate(of_tree, inputs).items():
        torch.testing.assert_close(x, expected[name], msg=lambda text, name=name: f"{name}: {text}")


def test_layouts_of_nothing_and_padding():
    assert tree_layout([], []).ends.shape == (0, 0)
    assert tree_layout([[]], [[]], length=3).ends.tolist() == [[0, 0, 0]]
    layout = tree_layout([[2], [1, 1, 1]], [[-1], [-1, 0, -1]])
    assert layout.ends.tolist() == [[2, 2, 0], [2, 2, 3]]
    assert layout.positions.tolist() == [[0, 1, 0], [0, 1, 0]]


def test_long_chains_take_no_longer_for_their_depth():
    nodes = 100_000
    layout = tree_layout([[1] * nodes], [range(-1, nodes - 1)])
    assert layout.ends.eq(nodes).all()
    assert torch.equal(layout.positions[0], torch.arange(nodes, dtype=torch.int32))


def test_the_example_of_the_docs_runs():
    [example] = [
        part for part in (ROOT / "docs/features.md").read_text().split("```python\n") if "tree_layout(" in part
    ]
    names = {}
    exec(compile(example.split("```")[0], "docs/features.md", "exec"), names)
    longest = [max(map(len, paths(*tree))) for tree in zip(names["lengths"], names["parents"], strict=True)]
    assert (names["tree"].positions.amax(1) + 1).tolist() == longest
    assert names["out"].shape == (2, 4, 670, 64)
