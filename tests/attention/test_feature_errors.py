"""Bad windows, masks, rules, sinks and dropout: each message names the argument, and nothing is computed."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

from cs336_systems.attention import api, attention, explain
from cs336_systems.attention.rules import predicate, score_rule
from cs336_systems.attention.variants import (
    alibi,
    bias,
    block_local,
    causal,
    dilated,
    document,
    prefix,
    relative_bias,
    softcap,
    visible_where,
    window,
)
from cs336_systems.kernels.language import at

Q = torch.zeros(2, 4, 5, 16)
K = torch.zeros(2, 2, 7, 16)
FLOATS = "float16, bfloat16, float32, float64"
WINDOW = "window must be (before, after), each None or an integer from 0 on"
IDS = torch.zeros(2, 5, dtype=torch.int64)


def says(message):
    return f"^{re.escape(message)}$"


@pytest.fixture(params=[attention, explain], ids=["attention", "explain"])
def call(request, monkeypatch):
    """`attention` or `explain`, with everything that computes replaced by a failure."""
    for implementation in api.RUN:
        monkeypatch.setitem(api.RUN, implementation, lambda *args: pytest.fail("an implementation was reached"))
    return lambda **features: request.param(Q, K, K, **features)


WRONG_TYPES = {
    "window_list": ({"window": [1, 2]}, f"{WINDOW}; got [1, 2]"),
    "window_number": ({"window": 3}, f"{WINDOW}; got 3"),
    "window_single": ({"window": (3,)}, f"{WINDOW}; got (3,)"),
    "window_float": ({"window": (3.0, None)}, f"{WINDOW}; got (3.0, None)"),
    "window_bool": ({"window": (None, True)}, f"{WINDOW}; got (None, True)"),
    "window_numpy": ({"window": (None, np.float32(1))}, f"{WINDOW}; got (None, {np.float32(1)!r})"),
    "softcap_text": ({"softcap": "1"}, "softcap must be a float or None; got '1' of type str"),
    "softcap_bool": ({"softcap": True}, "softcap must be a float or None; got True of type bool"),
    "softcap_tensor": (
        {"softcap": torch.tensor(1.0)},
        "softcap must be a float or None; got tensor(1.) of type Tensor",
    ),
    "slopes_list": ({"alibi_slopes": [0.5] * 4}, "alibi_slopes must be a torch.Tensor; got list"),
    "slopes_integers": (
        {"alibi_slopes": torch.ones(4, dtype=torch.int32)},
        f"alibi_slopes must have dtype {FLOATS}; got torch.int32",
    ),
    "bias_number": ({"bias": 1.0}, "bias must be a torch.Tensor; got float"),
    "bias_bool": ({"bias": torch.ones(5, 7) > 0}, f"bias must have dtype {FLOATS}; got torch.bool"),
    "scores_function": (
        {"scores": abs},
        "scores must be Scores, which score rules give; got builtin_function_or_method",
    ),
    "scores_mask": ({"scores": causal()}, "scores must be Scores, which score rules give; got Mask"),
    "scores_tensor": ({"scores": torch.ones(5, 7)}, "scores must be Scores, which score rules give; got Tensor"),
    "mask_array": ({"mask": np.ones((5, 7), bool)}, "mask must be a bool tensor or a Mask; got ndarray"),
    "mask_scores": ({"mask": softcap(1.0)}, "mask must be a bool tensor or a Mask; got Scores"),
    "mask_floats": ({"mask": torch.ones(5, 7)}, "mask must have dtype bool; got torch.float32"),
    "mask_integers": ({"mask": torch.ones(5, 7).int()}, "mask must have dtype bool; got torch.int32"),
    "sinks_list": ({"sinks": [0.0] * 4}, "sinks must be a torch.Tensor; got list"),
    "sinks_integers": ({"sinks": torch.ones(4).long()}, f"sinks must have dtype {FLOATS}; got torch.int64"),
    "dropout_text": ({"dropout_p": "0.1"}, "dropout_p must be a float; got '0.1' of type str"),
    "dropout_bool": ({"dropout_p": True}, "dropout_p must be a float; got True of type bool"),
    "dropout_none": ({"dropout_p": None}, "dropout_p must be a float; got None of type NoneType"),
    "seed_float": ({"dropout_p": 0.1, "seed": 1.0}, "seed must be an int, a tensor or None; got float"),
    "seed_bool": ({"dropout_p": 0.1, "seed": True}, "seed must be an int, a tensor or None; got bool"),
    "seed_unused": ({"seed": "1"}, "seed must be an int, a tensor or None; got str"),
    "generator": ({"dropout_p": 0.1, "generator": 5}, "generator must be a torch.Generator or None; got int"),
    "generator_unused": ({"generator": 5, "seed": 1}, "generator must be a torch.Generator or None; got int"),
    "deterministic": ({"deterministic": 1}, "deterministic must be a bool or None; got 1"),
}
META = {"device": "meta"}
BROADCASTS = "must have a shape that broadcasts to (2, 4, 5, 7)"
SEED = "seed must be one int64 on cpu"
WRONG_VALUES = {
    "window_before": ({"window": (-1, None)}, f"{WINDOW}; got (-1, None)"),
    "window_after": ({"window": (0, -3)}, f"{WINDOW}; got (0, -3)"),
    "softcap_zero": ({"softcap": 0}, "softcap must be above 0 and finite; got 0"),
    "softcap_negative": ({"softcap": -2.0}, "softcap must be above 0 and finite; got -2.0"),
    "softcap_nan": ({"softcap": math.nan}, "softcap must be above 0 and finite; got nan"),
    "softcap_infinite": ({"softcap": math.inf}, "softcap must be above 0 and finite; got inf"),
    "slopes_shape": ({"alibi_slopes": torch.ones(2)}, "alibi_slopes must have shape (4,) or (2, 4); got (2,)"),
    "slopes_axes": ({"alibi_slopes": torch.ones(1, 4)}, "alibi_slopes must have shape (4,) or (2, 4); got (1, 4)"),
    "slopes_nan": ({"alibi_slopes": torch.tensor([1.0, math.nan, 0.0, 1.0])}, "alibi_slopes must be finite; got nan"),
    "slopes_infinite": ({"alibi_slopes": torch.full((2, 4), -math.inf)}, "alibi_slopes must be finite; got -inf"),
    "slopes_elsewhere": (
        {"alibi_slopes": torch.ones(4, **META)},
        "alibi_slopes must be on cpu to match q; got meta",
    ),
    "bias_shape": ({"bias": torch.ones(7, 5)}, f"bias {BROADCASTS}; got (7, 5)"),
    "bias_kv_heads": ({"bias": torch.ones(2, 5, 7)}, f"bias {BROADCASTS}; got (2, 5, 7)"),
    "bias_axes": ({"bias": torch.ones(1, 2, 4, 5, 7)}, f"bias {BROADCASTS}; got (1, 2, 4, 5, 7)"),
    "bias_elsewhere": ({"bias": torch.ones(5, 7, **META)}, "bias must be on cpu to match q; got meta"),
    "mask_shape": ({"mask": torch.ones(5, 5) > 0}, f"mask {BROADCASTS}; got (5, 5)"),
    "mask_empty": ({"mask": torch.ones(0) > 0}, f"mask {BROADCASTS}; got (0,)"),
    "mask_elsewhere": ({"mask": torch.ones(5, 7, **META) > 0}, "mask must be on cpu to match q; got meta"),
    "mask_captured": (
        {"mask": prefix(IDS[0, :2].to("meta"))},
        "what mask captured must be on cpu to match q; got meta",
    ),
    "scores_captured": (
        {"scores": bias(torch.ones(1, 1, 5, 7, **META))},
        "what scores captured must be on cpu to match q; got meta",
    ),
    "sinks_shape": ({"sinks": torch.ones(2)}, "sinks must have shape (4,), a logit for each head; got (2,)"),
    "sinks_axes": ({"sinks": torch.ones(1, 4)}, "sinks must have shape (4,), a logit for each head; got (1, 4)"),
    "sinks_elsewhere": ({"sinks": torch.ones(4, **META)}, "sinks must be on cpu to match q; got meta"),
    "dropout_above_1": ({"dropout_p": 1.5}, "dropout_p must be from 0 to 1; got 1.5"),
    "dropout_negative": ({"dropout_p": -0.1}, "dropout_p must be from 0 to 1; got -0.1"),
    "dropout_nan": ({"dropout_p": math.nan}, "dropout_p must be from 0 to 1; got nan"),
    "seed_shape": ({"dropout_p": 0.1, "seed": IDS[0, :2]}, f"{SEED}; got (2,) torch.int64 on cpu"),
    "seed_dtype": ({"dropout_p": 0.1, "seed": torch.tensor(1).int()}, f"{SEED}; got () torch.int32 on cpu"),
    "seed_elsewhere": ({"seed": torch.tensor(1, **META)}, f"{SEED}; got () torch.int64 on meta"),
}


def params(table):
    return [pytest.param(*row, id=name) for name, row in table.items()]


@pytest.mark.parametrize(("wrong", "message"), params(WRONG_TYPES))
def test_wrong_types(call, wrong, message):
    with pytest.raises(TypeError, match=says(message)):
        call(**wrong)


@pytest.mark.parametrize(("wrong", "message"), params(WRONG_VALUES))
def test_wrong_values(call, wrong, message):
    with pytest.raises(ValueError, match=says(message)):
        call(**wrong)


def test_without_a_head_axis_there_is_one_head():
    q = torch.zeros(3, 5, 16)
    with pytest.raises(ValueError, match=says("sinks must have shape (1,), a logit for each head; got (3,)")):
        attention(q, q, q, sinks=torch.zeros(3))
    with pytest.raises(ValueError, match=says("alibi_slopes must have shape (1,) or (3, 1); got (3,)")):
        attention(q, q, q, alibi_slopes=torch.zeros(3))
    with pytest.raises(ValueError, match=says("bias must have a shape that broadcasts to (3, 5, 5); got (1, 1, 5, 5)")):
        attention(q, q, q, bias=torch.zeros(1, 1, 5, 5))


@pytest.mark.parametrize(("good", "bad"), [((3, 1), [3, 1]), ((1, 1), (True, 1)), ((1, None), (1.0, None))])
def test_a_wrong_window_is_refused_after_the_same_call_with_the_right_one(good, bad):
    """1 == True == 1.0, and calls are remembered."""
    attention(Q, K, K, window=good, impl="naive")
    with pytest.raises(TypeError, match=r"^window must be"):
        attention(Q, K, K, window=bad, impl="naive")


FLOAT_SLOPES, INTEGERS = "slopes must be (batch, heads) floating-point numbers", "(batch, length) integers"
FULL_BIAS = "bias must be (batch, heads, q_len, k_len) floating-point numbers"
TABLE = "table must be ([batch,] heads, length) floating-point numbers"
WRONG_FOR_VARIANTS = {
    "alibi_list": (lambda: alibi([1.0]), "slopes must be a torch.Tensor; got list"),
    "alibi_shape": (lambda: alibi(torch.ones(4)), f"{FLOAT_SLOPES}; got (4,) torch.float32"),
    "alibi_integers": (lambda: alibi(IDS), f"{FLOAT_SLOPES}; got (2, 5) torch.int64"),
    "alibi_shift": (lambda: alibi(torch.ones(1, 4), 0.5), "shift must be an integer; got 0.5 of type float"),
    "bias_number": (lambda: bias(1.0), "bias must be a torch.Tensor; got float"),
    "bias_shape": (lambda: bias(torch.ones(5, 7)), f"{FULL_BIAS}; got (5, 7) torch.float32"),
    "bias_bool": (lambda: bias(torch.ones(1, 1, 5, 7) > 0), f"{FULL_BIAS}; got (1, 1, 5, 7) torch.bool"),
    "block_local": (lambda: block_local(0), "size must be at least 1; got 0"),
    "block_local_float": (lambda: block_local(2.5), "size must be an integer; got 2.5 of type float"),
    "causal_none": (lambda: causal(None), "shift must be an integer; got None of type NoneType"),
    "dilated": (lambda: dilated(-1), "step must be at least 1; got -1"),
    "dilated_bool": (lambda: dilated(True), "step must be an integer; got True of type bool"),
    "document_list": (lambda: document([0]), "of_queries must be a torch.Tensor; got list"),
    "document_shape": (lambda: document(IDS[0]), f"of_queries must be {INTEGERS}; got (5,) torch.int64"),
    "document_floats": (lambda: document(IDS, IDS.float()), f"of_keys must be {INTEGERS}; got (2, 5) torch.float32"),
    "prefix_list": (lambda: prefix([3]), "lengths must be a torch.Tensor; got list"),
    "prefix_shape": (lambda: prefix(IDS), "lengths must be (batch,) integers; got (2, 5) torch.int64"),
    "prefix_floats": (lambda: prefix(torch.ones(2)), "lengths must be (batch,) integers; got (2,) torch.float32"),
    "relative_bias_list": (lambda: relative_bias([1.0]), "table must be a torch.Tensor; got list"),
    "relative_bias_shape": (lambda: relative_bias(torch.ones(9)), f"{TABLE}; got (9,) torch.float32"),
    "relative_bias_integers": (lambda: relative_bias(IDS), f"{TABLE}; got (2, 5) torch.int64"),
    "relative_bias_origin": (
        lambda: relative_bias(torch.ones(1, 9), 4.0),
        "origin must be an integer; got 4.0 of type float",
    ),
    "softcap_zero": (lambda: softcap(0.0), "cap must be above 0 and finite; got 0.0"),
    "softcap_nan": (lambda: softcap(math.nan), "cap must be above 0 and finite; got nan"),
    "softcap_infinite": (lambda: softcap(math.inf), "cap must be above 0 and finite; got inf"),
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


@pytest.mark.parametrize(("make", "message"), params(WRONG_FOR_VARIANTS))
def test_wrong_arguments_of_variants(make, message):
    with pytest.raises((TypeError, ValueError), match=says(message)):
        make()


@score_rule
def scaled(score, batch, head, row, column, factors, power):
    return score * at(factors, (head,)) * power


@predicate
def everything(batch, head, row, column):
    return row == row


@predicate
def distant(batch, head, row, column, table, zero):
    return at(table, (head, column - row + zero)) > 0


distant.reads("table", axes="head distance", origin="zero")


WRONG_FOR_RULES = {
    "too_few": (lambda: scaled(IDS), ".*scaled must be given factors, power; got 1 values"),
    "too_many": (lambda: everything(1), ".*everything must be given nothing; got 1 values"),
    "captured_text": (lambda: scaled(IDS, "2"), "power must be a tensor or a number; got '2' of type str"),
    "captured_bool": (lambda: scaled(IDS, True), "power must be a tensor or a number; got True of type bool"),
    "captured_nan": (lambda: scaled(IDS, math.nan), "power must be finite; got nan"),
    "captured_infinite": (lambda: scaled(-math.inf, 1), "factors must be finite; got -inf"),
    "predicate_places": (lambda: predicate(lambda batch, row: row), ".* must take batch, head, row, column and .*"),
    "score_places": (lambda: score_rule(lambda batch, head, row, column: 0), ".* must take score, batch, head, .*"),
    "gradient_name": (lambda: scaled.gradient("factor", "head"), "captured must be one of factors, power; .*'factor'"),
    "gradient_axis": (lambda: scaled.gradient("factors", "heads"), "axes must be of batch, .*; got 'heads'"),
    "gradient_order": (lambda: scaled.gradient("factors", "row head"), "axes must be of batch, .*; got 'row head'"),
    "gradient_twice": (lambda: scaled.adds("factors", "row row"), "axes must be of batch, .*; got 'row row'"),
    "gradient_distance": (
        lambda: scaled.gradient("factors", "row distance", "power"),
        "axes must be of batch, .*, or of batch, head, distance; got 'row distance'",
    ),
    "gradient_distance_order": (
        lambda: scaled.gradient("factors", "distance head", "power"),
        "axes must be of batch, .*; got 'distance head'",
    ),
    "gradient_without_origin": (
        lambda: scaled.adds("factors", "head distance"),
        "origin must be one of power, as axes are 'head distance'; got None",
    ),
    "gradient_origin": (
        lambda: scaled.reads("factors", "head distance", "factors"),
        "origin must be one of power, as axes are 'head distance'; got 'factors'",
    ),
    "gradient_origin_of_nothing": (
        lambda: scaled.reads("factors", "head", "power"),
        "origin must be None, as axes are 'head'; got 'power'",
    ),
    "origin_tensor": (lambda: distant(IDS, IDS), "zero must be an integer; got Tensor"),
    "origin_float": (lambda: distant(IDS, 0.5), "zero must be an integer; got float"),
    "gradient_arguments": (
        lambda: scaled.gradient("factors", "head")(lambda score: score),
        r"the function must take what .*scaled does, \(score, .*, power\); got \(score\)",
    ),
    "derivative_arguments": (
        lambda: scaled.derivative(lambda score, factors: factors),
        r"the function must take what .*scaled does, \(score, .*, power\); got \(score, factors\)",
    ),
    "steepest_text": (lambda: score_rule(steepest="2"), "steepest must be a number; got '2' of type str"),
    "steepest_nan": (lambda: score_rule(steepest=math.nan), "steepest must be above 0 and finite; got nan"),
    "steepest_zero": (lambda: score_rule(steepest=0.0), "steepest must be above 0 and finite; got 0.0"),
    "and": (lambda: everything() & True, ".*unsupported operand.*"),
    "or": (lambda: everything() | torch.ones(1), ".*unsupported operand.*"),
    "add": (lambda: softcap(1.0) + 1.0, ".*unsupported operand.*"),
}


@pytest.mark.parametrize(("make", "message"), params(WRONG_FOR_RULES))
def test_wrong_arguments_of_rules(make, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}$"):
        make()


def test_a_captured_tensor_without_a_gradient_is_named():
    """Where its gradient is needed; autograd finds it by itself for naive and tiled."""
    factors = torch.ones(4, requires_grad=True)
    reason = "the score rule .*scaled captured a tensor that needs a gradient, and has no `gradient` for it"
    with pytest.raises(ValueError, match=reason):
        attention(Q, K, K, scores=scaled(factors, 2), impl="flash")
    with torch.no_grad():
        explain(Q, K, K, scores=scaled(factors, 2))
    assert attention(Q, K, K, scores=scaled(factors, 2)).requires_grad


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (
            {"mask": document(IDS, torch.zeros(2, 6, dtype=torch.int64))},
            "what mask captured must have shape (2, 7) at least, for batch column, or 1 there; got (2, 6)",
        ),
        (
            {"mask": causal() & ~prefix(torch.zeros(0, dtype=torch.int64))},
            "what mask captured must have shape (2,) at least, for batch, or 1 there; got (0,)",
        ),
        (
            {"mask": visible_where(torch.ones(1, 1, 5, 5))},
            "what mask captured must have shape (2, 4, 5, 7) at least, for batch head row column, or 1 there; "
            "got (1, 1, 5, 5)",
        ),
        (
            {"scores": softcap(3.0) + bias(torch.zeros(1, 1, 9, 7))},
            "what scores captured must have shape (2, 4, 5, 7), for batch head row column, or 1 there; "
            "got (1, 1, 9, 7)",
        ),
        (
            {"scores": alibi(torch.zeros(2, 3))},
            "what scores captured must have shape (2, 4), for batch head, or 1 there; got (2, 3)",
        ),
        (
            {"mask": ~distant(torch.zeros(4, 11), 3)},
            "what mask captured for distances must have at least 4 elements before its origin, and 7 from there on; "
            "got 3 and 8",
        ),
        (
            {"scores": relative_bias(torch.zeros(4, 10))},
            "what scores captured must have shape (2, 4, 11), for batch head distance, or 1 there; got (1, 4, 10)",
        ),
        (
            {"scores": relative_bias(torch.zeros(2, 11))},
            "what scores captured must have shape (2, 4, 11), for batch head distance, or 1 there; got (1, 2, 11)",
        ),
        (
            {"scores": relative_bias(torch.zeros(4, 20), 3)},
            "what scores captured for distances must have at least 4 elements before its origin, and 7 from there on; "
            "got 3 and 17",
        ),
        (
            {"scores": relative_bias(torch.zeros(1, 1, 11))},
            "what scores captured for distances must have at least 4 elements before its origin, and 7 from there on; "
            "got 5 and 6",
        ),
    ],
)
def test_captured_tensors_of_another_size_are_refused(call, features, message):
    """Kernels would read past their ends."""
    with pytest.raises(ValueError, match=says(message)):
        call(**features)
