"""Sequences that share prefixes, each shared run of tokens packed once: nodes of a tree.

Yao et al., "DeFT: Decoding with flash tree-attention" (2024), have such trees of keys, for generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..rules import Mask
from .arguments import integer, tensor
from .recorded import INTEGERS, recorded_mask

_prefix_tree = recorded_mask(
    lambda b, h, q_idx, kv_idx, ends: (kv_idx <= q_idx) & (q_idx < ends[b, kv_idx]), (INTEGERS, 2)
)


def prefix_tree(ends: Tensor) -> Mask:
    """Query i sees key j where j <= i < ends[b, j]: the keys of its own node up to itself, and those of its ancestors.

    Nodes are runs of tokens, laid out depth-first, so a subtree is one range of tokens. q and k have the same tokens.
    ``attention(causal=True)`` hides the same pairs after a query, faster.

    Args:
        ends: (batch or 1, length) integers, where the subtree of each token's node ends: see `tree_layout`.
    """
    if tensor("ends", ends).ndim != 2 or ends.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ends must be (batch, length) integers; got {tuple(ends.shape)} {ends.dtype}")
    return _prefix_tree(ends)


class TreeLayout(NamedTuple):
    """Of each token of packed trees, (batch, length) int32.

    Attributes:
        ends: the index after the last token of the subtree of its node; 0 for the tokens after the last node, which no
            query sees and which see nothing.
        positions: how many tokens its path from the root has before it, as rotary embeddings take them; 0 after the
            last node.
    """

    ends: Tensor
    positions: Tensor


def tree_layout(
    lengths: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]],
    *,
    length: int | None = None,
    device: torch.device | str | None = None,
) -> TreeLayout:
    """The layout of trees whose nodes are packed depth-first, each followed by its children's subtrees.

    An entry of the batch has one tree or several.

    Args:
        lengths: for each entry of the batch, how many tokens each node has, at least 0.
        parents: the number of each node's parent in its entry, -1 for a root.
        length: the tokens of each row, at least those of the largest entry, which it is if None.
        device: of the layout; torch's default if None.

    Raises:
        TypeError: ``lengths`` or ``parents`` is no sequence of sequences of integers.
        ValueError: entries or nodes of both are not equally many, a length is negative, a parent is neither the node
            before nor one of that node's ancestors nor -1, or an entry has more than ``length`` tokens.
    """
    for name, given in (("lengths", lengths), ("parents", parents)):
        if not isinstance(given, Sequence) or not all(isinstance(nodes, Sequence) for nodes in given):
            raise TypeError(f"{name} must be a sequence of integers for each entry of the batch; got {given!r}")
    if len(lengths) != len(parents):
        raise ValueError(f"parents must have {len(lengths)} entries, as lengths has; got {len(parents)}")
    totals = [sum(integer("lengths", size, 0) for size in sizes) for sizes in lengths]
    longest = max(totals, default=0)
    length = integer("length", longest if length is None else length, longest)
    found = torch.zeros(2, len(lengths), length, dtype=torch.int32)
    for entry, (sizes, above, total) in enumerate(zip(lengths, parents, totals, strict=True)):
        ends, shifts = _nodes(entry, sizes, above)
        of_nodes = torch.tensor([ends, shifts], dtype=torch.int32)
        found[:, entry, :total] = of_nodes.repeat_interleave(torch.tensor(sizes, dtype=torch.int64), 1)
        found[1, entry, :total] += torch.arange(total, dtype=torch.int32)
    return TreeLayout(*found.to(torch.get_default_device() if device is None else device))


def _nodes(entry: int, sizes: Sequence[int], parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Of each node of an entry: where its subtree ends, and what takes a token's index to its position."""
    if len(parents) != len(sizes):
        raise ValueError(f"parents[{entry}] must have {len(sizes)} nodes, as lengths[{entry}] has; got {len(parents)}")
    ends, shifts, path, start = [0] * len(sizes), [0] * len(sizes), list[int](), 0
    for node, (size, parent) in enumerate(zip(sizes, parents, strict=True)):
        integer("parents", parent)
        while path and path[-1] != parent:
            ends[path.pop()] = start
        if parent != -1 and not path:
            raise ValueError(
                f"parents[{entry}][{node}] must be the node before, an ancestor of that, or -1; got {parent}"
            )
        # The parent is still on the path: ``ends`` has where its own tokens end, after which a child's positions go on.
        depth = ends[parent] + shifts[parent] if path else 0
        shifts[node] = depth - start
        start += size
        ends[node] = start
        path.append(node)
    for node in path:
        ends[node] = start
    return ends, shifts
