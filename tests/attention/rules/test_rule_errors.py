"""Bad arguments of masks and score changes that have names, and bad tensors that they captured."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.attention import attention, explain
from cs336_systems.attention.variants import (
    alibi,
    bias,
    block_local,
    causal,
    dilated,
    document,
    prefix,
    prefix_tree,
    relative_bias,
    softcap,
    tree_layout,
    visible_where,
    window,
)

from ..helpers import rows, says

Q, K = torch.zeros(2, 4, 5, 16), torch.zeros(2, 2, 7, 16)


IDS = torch.zeros(2, 5, dtype=torch.int64)
FLOAT_SLOPES, INTEGERS = "slopes must be (batch, heads) floating-point numbers", "(batch, length) integers"
FULL_BIAS = "bias must be (batch, heads, q_len, k_len) floating-point numbers"
TABLE = "table must be ([batch,] heads, length) floating-point numbers"
OF_ENTRIES = "must be a sequence of integers for each entry of the batch"
DEPTH_FIRST = "must be the node before, an ancestor of that, or -1"
WRONG_FOR_VARIANTS = {
    "alibi_list": (lambda: alibi([1.0]), "slopes must be a torch.Tensor; got list"),
    "alibi_shape": (lambda: alibi(torch.ones(4)), f"{FLOAT_SLOPES}; got (4,) torch.float32"),
    "alibi_integers": (lambda: alibi(IDS), f"{FLOAT_SLOPES}; got (2, 5) torch.int64"),
    "alibi_shift": (lambda: alibi(torch.ones(1, 4), 0.5), "shift must be an integer; got 0.5 of type float"),
    "bias_number": (lambda: bias(1.0), "bias must be a torch.Tensor; got float"),
    "bias_shape": (lambda: bias(torch.ones(5, 7)), f"{FULL_BIAS}; got (5, 7) torch.float32"),
    "bias_bool": (lambda: bias(torch.ones(1, 1, 5, 7) > 0), f"{FULL_BIAS}; got (1, 1, 5, 7) torch.bool"),
    "block_local": (lambda: block_local(0), "size must be at least 1; got 0"),
    "causal_none": (lambda: causal(None), "shift must be an integer; got None of type NoneType"),
    "dilated": (lambda: dilated(-1), "step must be at least 1; got -1"),
    "document_shape": (lambda: document(IDS[0]), f"of_queries must be {INTEGERS}; got (5,) torch.int64"),
    "document_floats": (lambda: document(IDS, IDS.float()), f"of_keys must be {INTEGERS}; got (2, 5) torch.float32"),
    "prefix_shape": (lambda: prefix(IDS), "lengths must be (batch,) integers; got (2, 5) torch.int64"),
    "prefix_tree_shape": (lambda: prefix_tree(IDS[0]), f"ends must be {INTEGERS}; got (5,) torch.int64"),
    "prefix_tree_list": (lambda: prefix_tree([[3]]), "ends must be a torch.Tensor; got list"),
    "layout_flat": (lambda: tree_layout((3,), [[-1]]), f"lengths {OF_ENTRIES}; got (3,)"),
    "layout_tensor": (lambda: tree_layout([[3]], IDS[:1, :1]), f"parents {OF_ENTRIES}; got tensor([[0]])"),
    "layout_entries": (lambda: tree_layout([[3]], []), "parents must have 1 entries, as lengths has; got 0"),
    "layout_nodes": (
        lambda: tree_layout([[], [3, 4]], [[], [-1]]),
        "parents[1] must have 2 nodes, as lengths[1] has; got 1",
    ),
    "layout_negative": (lambda: tree_layout([[3, -1]], [[-1, 0]]), "lengths must be at least 0; got -1"),
    "layout_float": (lambda: tree_layout(((3.0,),), [[-1]]), "lengths must be an integer; got 3.0 of type float"),
    "layout_none": (lambda: tree_layout([[3]], ((None,),)), "parents must be an integer; got None of type NoneType"),
    "layout_order": (
        lambda: tree_layout([[1, 1, 1, 1, 1]], [[-1, 0, 0, 1, 0]]),
        f"parents[0][3] {DEPTH_FIRST}; got 1",
    ),
    "layout_itself": (lambda: tree_layout([[3]], [[0]]), f"parents[0][0] {DEPTH_FIRST}; got 0"),
    "layout_root": (lambda: tree_layout([[3, 3]], [[-1, -2]]), f"parents[0][1] {DEPTH_FIRST}; got -2"),
    "layout_length": (lambda: tree_layout([[3, 4]], [[-1, 0]], length=6), "length must be at least 7; got 6"),
    "relative_bias_list": (lambda: relative_bias([1.0]), "table must be a torch.Tensor; got list"),
    "relative_bias_shape": (lambda: relative_bias(torch.ones(9)), f"{TABLE}; got (9,) torch.float32"),
    "relative_bias_origin": (
        lambda: relative_bias(torch.ones(1, 9), 4.0),
        "origin must be an integer; got 4.0 of type float",
    ),
    "softcap_zero": (lambda: softcap(0.0), "cap must be above 0 and finite; got 0.0"),
    "softcap_text": (lambda: softcap("3"), "cap must be a number; got '3' of type str"),
    "visible_where_list": (lambda: visible_where([True]), "mask must be a torch.Tensor; got list"),
    "visible_where_shape": (
        lambda: visible_where(torch.ones(5, 7)),
        "mask must have 4 dimensions (batch, heads, q_len, k_len); got (5, 7)",
    ),
    "window_none": (lambda: window(None), "before must be an integer; got None of type NoneType"),
    "window_after": (lambda: window(1, 0.5), "after must be an integer; got 0.5 of type float"),
    "window_shift": (lambda: window(1, 1, "2"), "shift must be an integer; got '2' of type str"),
}


WRONG_TOGETHER = {
    "and": (lambda: causal() & True, ".*unsupported operand.*"),
    "add": (lambda: softcap(1.0) + 1.0, ".*unsupported operand.*"),
}


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        *rows({name: (make, says(message)) for name, (make, message) in WRONG_FOR_VARIANTS.items()}),
        *rows({name: (make, f"^{pattern}$") for name, (make, pattern) in WRONG_TOGETHER.items()}),
    ],
)
def test_wrong_arguments(make, pattern):
    with pytest.raises((TypeError, ValueError), match=pattern):
        make()


DISTANCES = "captured for distances must have at least 4 elements before its origin, and 7 from there on"


def distant(b, h, q_idx, kv_idx):
    return torch.zeros(4, 11)[h, kv_idx - q_idx + 3] > 0


WRONG_SIZES = {
    "document": (
        {"mask": document(IDS, IDS[:, :1].expand(2, 6))},
        "mask captured must have shape (2, 7) at least, for batch column, or 1 there; got (2, 6)",
    ),
    "prefix": (
        {"mask": causal() & ~prefix(IDS[0, :0])},
        "mask captured must have shape (2,) at least, for batch, or 1 there; got (0,)",
    ),
    "visible_where": (
        {"mask": visible_where(torch.ones(1, 1, 5, 5))},
        "mask captured must have shape (2, 4, 5, 7) at least, for batch head row column, or 1 there; got (1, 1, 5, 5)",
    ),
    "bias": (
        {"scores": softcap(3.0) + bias(torch.zeros(1, 1, 4, 7))},
        "scores captured must have shape (2, 4, 5, 7) at least, for batch head row column, or 1 there; "
        "got (1, 1, 4, 7)",
    ),
    "alibi": (
        {"scores": alibi(torch.zeros(2, 3))},
        "scores captured must have shape (2, 4) at least, for batch head, or 1 there; got (2, 3)",
    ),
    "distant": (
        {"mask": distant},
        f"mask {DISTANCES}; got 3 and 8",
    ),
    "short_table": (
        {"scores": relative_bias(torch.zeros(4, 10))},
        "scores captured must have shape (2, 4, 11) at least, for batch head distance, or 1 there; got (1, 4, 10)",
    ),
    "table_of_other_heads": (
        {"scores": relative_bias(torch.zeros(2, 11))},
        "scores captured must have shape (2, 4, 11) at least, for batch head distance, or 1 there; got (1, 2, 11)",
    ),
    "origin_too_early": ({"scores": relative_bias(torch.zeros(4, 20), 3)}, f"scores {DISTANCES}; got 3 and 17"),
    "origin_too_late": ({"scores": relative_bias(torch.zeros(1, 1, 11))}, f"scores {DISTANCES}; got 5 and 6"),
}


@pytest.mark.parametrize("call", [attention, explain])
@pytest.mark.parametrize(("features", "message"), rows(WRONG_SIZES))
def test_captured_tensors_of_another_size_are_refused(never_runs, call, features, message):
    """Kernels would read past their ends."""
    with pytest.raises(ValueError, match=says(f"what {message}")):
        call(Q, K, K, **features)
