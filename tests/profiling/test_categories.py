"""The table of categories, on snapshots that were made by hand."""

from __future__ import annotations

import inspect

import pytest

from cs336_systems.attention import naive
from cs336_systems.profiling import categories as names
from cs336_systems.profiling.allocations import Allocation, read_history
from cs336_systems.profiling.categories import (
    RULES,
    Rule,
    bytes_at,
    category_of,
    kinds,
    largest_by_category,
    largest_first,
)
from cs336_systems.profiling.recording import GRADIENT, OPTIMIZER_STATE

from .snapshots import alloc, free, mark, origin, recording


def in_naive(text):
    """An origin at the statement of naive attention that begins so."""
    lines, first = inspect.getsourcelines(naive._naive)
    (line,) = [first + number for number, line in enumerate(lines) if line.strip().startswith(text)]
    return origin("layers.0.attn.attend", "aten.bmm", filename=naive.__file__, line=line, function="_naive")


CASES = [
    (origin("layers.3.ln1", "aten.pow"), names.NORM),
    (origin("ln_final", "aten.mul"), names.NORM),
    (origin("model.layers.3.input_layernorm", "aten.mul"), names.NORM),
    (origin("token_embeddings", "aten.embedding"), names.EMBEDDING),
    (origin("layers.0.ffn", "aten.silu"), names.FFN),
    (origin("layers.0.ffn.w1", "aten.mm (MmBackward0)"), names.FFN),
    (origin("model.layers.0.mlp.up_proj", "aten.mm"), names.FFN),
    (origin("layers.0.ffn.w1", "aten._to_copy of a parameter"), names.PARAMETER_COPIES),
    (origin("layers.0.attn.q_proj", "aten.mm"), names.PROJECTIONS),
    (origin("layers.0.attn.rope", "aten.stack"), names.PROJECTIONS),
    (in_naive("scores = einsum"), names.SCORES),
    (in_naive("scores = scores.masked_fill(~seen"), names.SCORES),
    (in_naive("weights = torch.softmax"), names.SOFTMAX),
    (in_naive("out = einsum"), names.ATTENTION_OUTPUT),
    (origin("layers.0.attn.attend", "aten._scaled_dot_product_flash_attention"), names.ATTENTION_OUTPUT),
    (origin("layers.0.attn.attend", "cs336_systems.flash_forward"), names.ATTENTION_OUTPUT),
    (origin("elsewhere", "aten._softmax"), names.SOFTMAX),
    (origin("layers.11", "aten.add"), names.RESIDUAL),
    (origin("lm_head", "aten.mm"), names.LOSS),
    (origin("", "aten._log_softmax"), names.LOSS),
    (origin("", "aten.ones_like"), names.OTHER),
    (None, names.OTHER),
]


@pytest.mark.parametrize(("where", "category"), CASES)
def test_where_it_comes_from_decides(where, category):
    assert category_of(Allocation(4, 0, None, "forward", where)) == category


def test_who_owns_it_decides_first():
    where = origin("layers.0.ffn.w1", "aten.mm")
    assert category_of(Allocation(4, 0, None, "backward", where, GRADIENT)) == names.GRADIENT
    assert category_of(Allocation(4, 0, None, "optimizer", where, OPTIMIZER_STATE)) == names.OPTIMIZER_STATE
    assert category_of(Allocation(4, 0, None, "optimizer", None)) == names.UPDATE


def test_rules_of_ones_own_come_before():
    mine = Allocation(4, 0, None, "forward", origin("router", "aten.topk"))
    assert category_of(mine) == names.OTHER
    assert category_of(mine, [Rule("routing", module="router"), *RULES]) == "routing"
    assert category_of(mine, [Rule("routing", module="router", operation="mm"), *RULES]) == names.OTHER


def example():
    norm, scores = origin("layers.0.ln1", "aten.mul"), in_naive("scores = einsum")
    other = origin("layers.1.ln1", "aten.mul")
    return read_history(
        recording(
            mark("forward"),
            alloc(16, 10, norm),
            alloc(32, 99, scores),
            alloc(48, 10, other),
            free(32),
            mark("backward"),
            alloc(32, 20, norm),
            free(64, 5),
            mark("end"),
            before=1000,
        )
    )


def test_the_largest_of_each_category_and_phase():
    largest = largest_by_category(example())
    assert {key: each.bytes for key, each in largest.items()} == {
        (names.SCORES, "forward"): 99,
        (names.NORM, "backward"): 20,
        (names.NORM, "forward"): 10,
    }


def test_what_lives_at_an_event_by_category():
    history = example()
    assert bytes_at(history, 2) == {names.STANDING: 1000, names.NORM: 20, names.SCORES: 99}
    assert bytes_at(history, 5) == {names.STANDING: 995, names.NORM: 40}
    assert sum(bytes_at(history, 4).values()) == history.curve()[4]


def test_layers_are_one_kind():
    found = kinds(largest_first(example().allocations))
    assert [(kind.first.bytes, kind.module, kind.times) for kind in found] == [
        (99, "layers.*.attn.attend", 1),
        (20, "layers.*.ln1", 1),
        (10, "layers.*.ln1", 2),
    ]
