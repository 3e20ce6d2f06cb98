"""Named masks and score changes, each a function of a pair. Positions are those in q and k, from 0 on.

Masks: `causal`, `window`, `prefix`, `prefix_tree` (of a `tree_layout`), `document`, `dilated`, `block_local`,
`visible_where`. Scores: `softcap`, `alibi`, `bias`, `relative_bias`.
"""

from .alibi import alibi
from .bias import bias
from .block_local import block_local
from .causal import causal
from .dilated import dilated
from .document import document
from .prefix import prefix
from .prefix_tree import TreeLayout, prefix_tree, tree_layout
from .relative_bias import relative_bias
from .softcap import softcap
from .visible_where import visible_where
from .window import window

__all__ = [
    "TreeLayout",
    "alibi",
    "bias",
    "block_local",
    "causal",
    "dilated",
    "document",
    "prefix",
    "prefix_tree",
    "relative_bias",
    "softcap",
    "tree_layout",
    "visible_where",
    "window",
]
