"""Bad windows, masks, rules, sinks and dropout: each message names the argument, and nothing is computed."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

from cs336_systems.attention import attention, explain
from cs336_systems.attention.variants import bias, causal, prefix, softcap

from .helpers import rows

Q = torch.zeros(2, 4, 5, 16)
K = torch.zeros(2, 2, 7, 16)
FLOATS = "float16, bfloat16, float32, float64"
WINDOW = "window must be (before, after), each None or an integer from 0 on"
IDS = torch.zeros(2, 5, dtype=torch.int64)


def says(message):
    return f"^{re.escape(message)}$"


@pytest.fixture(params=[attention, explain], ids=["attention", "explain"])
def call(request, never_runs):
    """`attention` or `explain`, with everything that computes replaced by a failure."""
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
    "slopes_elsewhere": ({"alibi_slopes": torch.ones(4, **META)}, "alibi_slopes must be on cpu to match q; got meta"),
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


@pytest.mark.parametrize(("wrong", "message"), rows(WRONG_TYPES))
def test_wrong_types(call, wrong, message):
    with pytest.raises(TypeError, match=says(message)):
        call(**wrong)


@pytest.mark.parametrize(("wrong", "message"), rows(WRONG_VALUES))
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
