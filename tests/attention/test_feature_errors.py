"""Bad windows, masks, rules, sinks and dropout: each message names the argument, and nothing is computed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cs336_systems.attention import attention, explain
from cs336_systems.attention.variants import bias, causal, prefix, softcap

from .helpers import says, wrong

Q, K = torch.zeros(2, 4, 5, 16), torch.zeros(2, 2, 7, 16)
FLOATS = "float16, bfloat16, float32, float64"
WINDOW = "window must be (before, after), each None or an integer from 0 on"
IDS = torch.zeros(2, 5, dtype=torch.int64)


@pytest.fixture(params=[attention, explain], ids=["attention", "explain"])
def call(request, never_runs):
    """`attention` or `explain`, with everything that computes replaced by a failure."""
    return lambda **features: request.param(Q, K, K, **features)


WRONG_TYPES = {
    "window_list": ({"window": [1, 2]}, f"{WINDOW}; got [1, 2]"),
    "window_single": ({"window": (3,)}, f"{WINDOW}; got (3,)"),
    "window_float": ({"window": (3.0, None)}, f"{WINDOW}; got (3.0, None)"),
    "window_bool": ({"window": (None, True)}, f"{WINDOW}; got (None, True)"),
    "window_numpy": ({"window": (None, np.float32(1))}, f"{WINDOW}; got (None, {np.float32(1)!r})"),
    "softcap_bool": ({"softcap": True}, "softcap must be a float or None; got True of type bool"),
    "softcap_tensor": ({"softcap": IDS[0, 0]}, "softcap must be a float or None; got tensor(0) of type Tensor"),
    "slopes_list": ({"alibi_slopes": [0.5] * 4}, "alibi_slopes must be a torch.Tensor; got list"),
    "slopes_integers": ({"alibi_slopes": IDS[0, :4]}, f"alibi_slopes must have dtype {FLOATS}; got torch.int64"),
    "bias_bool": ({"bias": torch.ones(5, 7) > 0}, f"bias must have dtype {FLOATS}; got torch.bool"),
    "scores_mask": ({"scores": causal()}, "scores must be Scores, which score rules give; got Mask"),
    "mask_scores": ({"mask": softcap(1.0)}, "mask must be a bool tensor or a Mask; got Scores"),
    "mask_floats": ({"mask": torch.ones(5, 7)}, "mask must have dtype bool; got torch.float32"),
    "sinks_list": ({"sinks": [0.0] * 4}, "sinks must be a torch.Tensor; got list"),
    "sinks_integers": ({"sinks": torch.ones(4).long()}, f"sinks must have dtype {FLOATS}; got torch.int64"),
    "dropout_bool": ({"dropout_p": True}, "dropout_p must be a float; got True of type bool"),
    "dropout_none": ({"dropout_p": None}, "dropout_p must be a float; got None of type NoneType"),
    "seed_float": ({"dropout_p": 0.1, "seed": 1.0}, "seed must be an int, a tensor or None; got float"),
    "seed_bool": ({"dropout_p": 0.1, "seed": True}, "seed must be an int, a tensor or None; got bool"),
    "generator_unused": ({"generator": 5, "seed": 1}, "generator must be a torch.Generator or None; got int"),
    "deterministic": ({"deterministic": 1}, "deterministic must be a bool or None; got 1"),
}
META = {"device": "meta"}
FAR = torch.ones(5, 7, **META)
BROADCASTS = "must have a shape that broadcasts to (2, 4, 5, 7)"
SEED = "seed must be one int64 on cpu"
WRONG_VALUES = {
    "window_before": ({"window": (-1, None)}, f"{WINDOW}; got (-1, None)"),
    "window_after": ({"window": (0, -3)}, f"{WINDOW}; got (0, -3)"),
    "softcap_zero": ({"softcap": 0}, "softcap must be above 0 and finite; got 0"),
    "softcap_nan": ({"softcap": math.nan}, "softcap must be above 0 and finite; got nan"),
    "softcap_infinite": ({"softcap": math.inf}, "softcap must be above 0 and finite; got inf"),
    "slopes_shape": ({"alibi_slopes": torch.ones(2)}, "alibi_slopes must have shape (4,) or (2, 4); got (2,)"),
    "slopes_axes": ({"alibi_slopes": torch.ones(1, 4)}, "alibi_slopes must have shape (4,) or (2, 4); got (1, 4)"),
    "slopes_nan": ({"alibi_slopes": torch.tensor([1.0, math.nan, 0.0, 1.0])}, "alibi_slopes must be finite; got nan"),
    "slopes_elsewhere": ({"alibi_slopes": torch.ones(4, **META)}, "alibi_slopes must be on cpu to match q; got meta"),
    "bias_kv_heads": ({"bias": torch.ones(2, 5, 7)}, f"bias {BROADCASTS}; got (2, 5, 7)"),
    "bias_axes": ({"bias": torch.ones(1, 2, 4, 5, 7)}, f"bias {BROADCASTS}; got (1, 2, 4, 5, 7)"),
    "bias_elsewhere": ({"bias": torch.ones(5, 7, **META)}, "bias must be on cpu to match q; got meta"),
    "mask_shape": ({"mask": torch.ones(5, 5) > 0}, f"mask {BROADCASTS}; got (5, 5)"),
    "mask_empty": ({"mask": torch.ones(0) > 0}, f"mask {BROADCASTS}; got (0,)"),
    "mask_elsewhere": ({"mask": torch.ones(5, 7, **META) > 0}, "mask must be on cpu to match q; got meta"),
    "mask_captured": ({"mask": prefix(IDS[0].to("meta"))}, "what mask captured must be on cpu to match q; got meta"),
    "scores_captured": ({"scores": bias(FAR[None, None])}, "what scores captured must be on cpu to match q; got meta"),
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


@wrong(WRONG_TYPES, WRONG_VALUES)
def test_wrong_arguments(call, wrong, error, message):
    with pytest.raises(error, match=says(message)):
        call(**wrong)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sinks": torch.zeros(3)}, "sinks must have shape (1,), a logit for each head; got (3,)"),
        ({"alibi_slopes": torch.zeros(3)}, "alibi_slopes must have shape (1,) or (3, 1); got (3,)"),
        ({"bias": torch.zeros(1, 1, 5, 5)}, "bias must have a shape that broadcasts to (3, 5, 5); got (1, 1, 5, 5)"),
    ],
)
def test_without_a_head_axis_there_is_one_head(given, message):
    with pytest.raises(ValueError, match=says(message)):
        attention(*[torch.zeros(3, 5, 16)] * 3, **given)
