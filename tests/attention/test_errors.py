"""Bad arguments: each message names one, is the same from every entry point, and nothing is computed."""

from __future__ import annotations

import math

import pytest
import torch

from cs336_systems.attention import (
    Attention,
    CompiledAttention,
    FlashAttention,
    FlashAttentionFunction,
    NaiveAttention,
    SDPAAttention,
    TiledAttention,
    TiledAttentionFunction,
    attention,
    explain,
)
from cs336_systems.attention.variants import bias, causal, prefix, softcap

from .helpers import says, wrong


def through_module(module):
    def call(q, k, v, return_lse=False, **settings):
        return module(**settings)(q, k, v, return_lse=return_lse)

    return call


def through_function(function):
    def call(q, k, v, causal=False, scale=None, return_lse=False):
        return function.apply(q, k, v, causal, scale, return_lse)

    return call


MODULES = (Attention, CompiledAttention, FlashAttention, NaiveAttention, SDPAAttention, TiledAttention)
ENTRY_POINTS = {
    "attention": attention,
    "explain": explain,
    **{module.__name__: through_module(module) for module in MODULES},
    **{function.__name__: through_function(function) for function in (FlashAttentionFunction, TiledAttentionFunction)},
}


@pytest.fixture(params=ENTRY_POINTS)
def entry_point(request, never_runs):
    """A way in, with everything that computes replaced by a failure."""
    return ENTRY_POINTS[request.param]


Q = torch.zeros(2, 8, 5, 16)
K = torch.zeros(2, 4, 7, 16)
V = torch.zeros(2, 4, 7, 12)
ALL_DTYPES = "float16, bfloat16, float32, float64"
MASKS = "causal must be True, False, 'top_left' or 'bottom_right'"

WINDOW = "window must be (before, after), each None or an integer from 0 on"
IDS = torch.zeros(2, 5, dtype=torch.int64)

WRONG_TYPES = {
    "q_none": ({"q": None}, "q must be a torch.Tensor; got NoneType"),
    "k_complex": ({"k": K.to(torch.complex64)}, f"k must have a dtype of {ALL_DTYPES}; got torch.complex64"),
    "k_half": ({"k": K.half()}, "k must have dtype torch.float32 to match q; got torch.float16"),
    "k_sparse": ({"k": K.to_sparse()}, "k must be a dense (strided) tensor; got layout torch.sparse_coo"),
    "causal_1": ({"causal": 1}, f"{MASKS}; got 1 of type int"),
    "scale_true": ({"scale": True}, "scale must be a float or None; got True of type bool"),
    "return_lse": ({"return_lse": 1}, "return_lse must be a bool; got 1"),
    "scale_tensor": ({"scale": torch.tensor(0.5)}, "scale must be a float or None; got tensor(0.5000) of type Tensor"),
    "window_list": ({"window": [1, 2]}, f"{WINDOW}; got [1, 2]"),
    "window_single": ({"window": (3,)}, f"{WINDOW}; got (3,)"),
    "window_bool": ({"window": (None, True)}, f"{WINDOW}; got (None, True)"),
    "softcap_bool": ({"softcap": True}, "softcap must be a float or None; got True of type bool"),
    "softcap_tensor": ({"softcap": IDS[0, 0]}, "softcap must be a float or None; got tensor(0) of type Tensor"),
    "slopes_list": ({"alibi_slopes": [0.5]}, "alibi_slopes must be a torch.Tensor; got list"),
    "slopes_integers": ({"alibi_slopes": IDS[0]}, f"alibi_slopes must have dtype {ALL_DTYPES}; got torch.int64"),
    "scores_mask": ({"scores": causal()}, "scores must be Scores, which score rules give; got Mask"),
    "mask_scores": ({"mask": softcap(1.0)}, "mask must be a bool tensor or a Mask; got Scores"),
    "mask_floats": ({"mask": torch.ones(5, 7)}, "mask must have dtype bool; got torch.float32"),
    "dropout_bool": ({"dropout_p": True}, "dropout_p must be a float; got True of type bool"),
    "dropout_none": ({"dropout_p": None}, "dropout_p must be a float; got None of type NoneType"),
    "seed_float": ({"dropout_p": 0.1, "seed": 1.0}, "seed must be an int, a tensor or None; got float"),
    "seed_bool": ({"dropout_p": 0.1, "seed": True}, "seed must be an int, a tensor or None; got bool"),
    "generator_unused": ({"generator": 5, "seed": 1}, "generator must be a torch.Generator or None; got int"),
    "deterministic": ({"deterministic": 1}, "deterministic must be a bool or None; got 1"),
}
META = {"device": "meta"}
FAR = torch.ones(5, 7, **META)
BROADCASTS = "must have a shape that broadcasts to (2, 8, 5, 7)"
SEED = "seed must be one int64 on cpu"
WRONG_VALUES = {
    "q_vector": ({"q": torch.zeros(16)}, "q must have at least 2 dimensions (length, head_dim); got (16,)"),
    "k_elsewhere": ({"k": K.to("meta")}, "k must be on cpu to match q; got meta"),
    "k_batch": ({"k": K[:1]}, "k must have shape (2, kv_heads, *, 16) to match q; got (1, 4, 7, 16)"),
    "k_width": ({"k": K[..., :8]}, "k must have shape (2, kv_heads, *, 16) to match q; got (2, 4, 7, 8)"),
    "k_axes": ({"k": K[:, 0]}, "k must have shape (2, kv_heads, *, 16) to match q; got (2, 7, 16)"),
    "no_heads": ({"q": Q[:, 0], "k": K[:1, 0]}, "k must have shape (2, *, 16) to match q; got (1, 7, 16)"),
    "v_length": ({"v": V[:, :, :6]}, "v must have shape (2, 4, 7, *) to match k; got (2, 4, 6, 12)"),
    "v_axes": ({"v": V[0]}, "v must have shape (2, 4, 7, *) to match k; got (4, 7, 12)"),
    "q_narrow": ({"q": Q[..., :0], "k": K[..., :0]}, "q must have a head dimension of at least 1; got (2, 8, 5, 0)"),
    "v_narrow": ({"v": V[..., :0]}, "v must have a head dimension of at least 1; got (2, 4, 7, 0)"),
    "heads": ({"k": K[:, :3], "v": V[:, :3]}, "k must have a number of heads that divides q's 8; got 3"),
    "no_key_heads": ({"k": K[:, :0], "v": V[:, :0]}, "k must have a number of heads that divides q's 8; got 0"),
    "no_query_heads": ({"q": Q[:, :0]}, "k must have a number of heads that divides q's 0; got 4"),
    "causal_name": ({"causal": "diagonal"}, f"{MASKS}; got 'diagonal'"),
    "scale_nan": ({"scale": math.nan}, "scale must be finite; got nan"),
    "scale_beyond_floats": ({"scale": 10**400}, f"scale must be finite; got 1{19 * '0'}"),
    "window_before": ({"window": (-1, None)}, f"{WINDOW}; got (-1, None)"),
    "softcap_zero": ({"softcap": 0}, "softcap must be above 0 and finite; got 0"),
    "softcap_infinite": ({"softcap": math.inf}, "softcap must be above 0 and finite; got inf"),
    "slopes_shape": ({"alibi_slopes": torch.ones(2)}, "alibi_slopes must have shape (8,) or (2, 8); got (2,)"),
    "slopes_axes": ({"alibi_slopes": torch.ones(1, 8)}, "alibi_slopes must have shape (8,) or (2, 8); got (1, 8)"),
    "slopes_nan": ({"alibi_slopes": torch.ones(8) * math.nan}, "alibi_slopes must be finite; got nan"),
    "slopes_elsewhere": ({"alibi_slopes": torch.ones(8, **META)}, "alibi_slopes must be on cpu to match q; got meta"),
    "bias_kv_heads": ({"bias": torch.ones(2, 5, 7)}, f"bias {BROADCASTS}; got (2, 5, 7)"),
    "bias_axes": ({"bias": torch.ones(1, 2, 8, 5, 7)}, f"bias {BROADCASTS}; got (1, 2, 8, 5, 7)"),
    "bias_elsewhere": ({"bias": torch.ones(5, 7, **META)}, "bias must be on cpu to match q; got meta"),
    "mask_shape": ({"mask": torch.ones(5, 5) > 0}, f"mask {BROADCASTS}; got (5, 5)"),
    "mask_elsewhere": ({"mask": torch.ones(5, 7, **META) > 0}, "mask must be on cpu to match q; got meta"),
    "mask_captured": ({"mask": prefix(IDS[0].to("meta"))}, "what mask captured must be on cpu to match q; got meta"),
    "scores_captured": ({"scores": bias(FAR[None, None])}, "what scores captured must be on cpu to match q; got meta"),
    "sinks_shape": ({"sinks": torch.ones(2)}, "sinks must have shape (8,), a logit for each head; got (2,)"),
    "sinks_elsewhere": ({"sinks": torch.ones(8, **META)}, "sinks must be on cpu to match q; got meta"),
    "dropout_above_1": ({"dropout_p": 1.5}, "dropout_p must be from 0 to 1; got 1.5"),
    "dropout_negative": ({"dropout_p": -0.1}, "dropout_p must be from 0 to 1; got -0.1"),
    "seed_shape": ({"dropout_p": 0.1, "seed": IDS[0, :2]}, f"{SEED}; got (2,) torch.int64 on cpu"),
    "seed_dtype": ({"dropout_p": 0.1, "seed": torch.tensor(1).int()}, f"{SEED}; got () torch.int32 on cpu"),
    "seed_elsewhere": ({"seed": torch.tensor(1, **META)}, f"{SEED}; got () torch.int64 on meta"),
}


@pytest.mark.parametrize("entry_point", ["attention", "explain"], indirect=True)
@wrong(WRONG_TYPES, WRONG_VALUES)
def test_wrong_arguments(entry_point, wrong, error, message):
    with pytest.raises(error, match=says(message)):
        entry_point(**{"q": Q, "k": K, "v": V} | wrong)


@pytest.mark.parametrize("name", ["k_complex", "v_length", "causal_1", "scale_nan", "return_lse"])
def test_every_entry_point_says_the_same(entry_point, name):
    given, message = (WRONG_TYPES | WRONG_VALUES)[name]
    with pytest.raises((TypeError, ValueError), match=says(message)):
        entry_point(**{"q": Q, "k": K, "v": V} | given)


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


IMPLEMENTATIONS = "impl must be one of 'auto', 'flash', 'sdpa', 'compiled', 'tiled', 'naive'"
WRONG_IMPLEMENTATIONS = [
    ("fast", ValueError, f"{IMPLEMENTATIONS}; got 'fast'"),
    (None, TypeError, f"{IMPLEMENTATIONS}; got None of type NoneType"),
]


@pytest.mark.parametrize("entry_point", ["attention", "explain", "Attention"], indirect=True)
@pytest.mark.parametrize(("impl", "error", "message"), WRONG_IMPLEMENTATIONS)
def test_wrong_implementations(entry_point, impl, error, message):
    with pytest.raises(error, match=says(message)):
        entry_point(Q, K, V, impl=impl)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    "settings", [{"causal": "diagonal"}, {"scale": "1"}, {"window": 3}, {"softcap": -1.0}, {"dropout_p": 2.0}]
)
def test_modules_refuse_settings_when_they_are_made(module, settings):
    with pytest.raises((TypeError, ValueError), match=f"^{next(iter(settings))} must be"):
        module(**settings)
    with pytest.raises(ValueError, match=says(f"{IMPLEMENTATIONS}; got 'fast'")):
        Attention(impl="fast")


@pytest.mark.parametrize("function", [FlashAttentionFunction, TiledAttentionFunction])
def test_functions_need_a_leading_axis(function):
    message = "q must have at least 3 dimensions (batch, length, head_dim); got (5, 4)"
    with pytest.raises(ValueError, match=says(message)):
        function.apply(*[torch.zeros(5, 4)] * 3, True)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"causal": True}, {"causal": 1}),
        ({"scale": 1.0}, {"scale": True}),
        ({"return_lse": True}, {"return_lse": 1}),
        ({"window": (1, 1)}, {"window": (True, 1)}),
        ({"window": (1, None)}, {"window": (1.0, None)}),
        ({"dropout_p": 1, "seed": 1}, {"dropout_p": True, "seed": 1}),
        ({"seed": 1, "dropout_p": 0.5}, {"seed": True, "dropout_p": 0.5}),
        *[({}, {name: torch.zeros(1, 2, 3).to_sparse()}) for name in "qkv"],
        *[({}, {name: torch.zeros(1, 2, 3, device="meta")}) for name in "kv"],
        *[({}, {name: torch.zeros(1, 2, 3).half()}) for name in "kv"],
    ],
)
def test_a_wrong_argument_is_refused_after_the_same_call_with_the_right_one(good, bad):
    """1 == True == 1.0, and plans are kept."""
    inputs = dict.fromkeys("qkv", torch.zeros(1, 2, 3))
    attention(**inputs | good, impl="naive")
    with pytest.raises((TypeError, ValueError), match=f"^{next(iter(bad))} must (be|have)"):
        attention(**inputs | bad, impl="naive")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(("name", "expected"), [("q", "a nested tensor of layout torch.jagged"), ("k", "a dense")])
def test_ragged_tensors_without_offsets_are_refused(name, expected):
    ragged = torch.nested.nested_tensor([torch.zeros(3, 4), torch.zeros(5, 4)])
    with pytest.raises(TypeError, match=f"^{name} must be {expected}"):
        attention(**{name: torch.zeros(2, 5, 4) for name in ("q", "k", "v")} | {name: ragged})


@pytest.mark.gpu
def test_tensors_on_different_devices():
    with pytest.raises(ValueError, match=says("k must be on cuda:0 to match q; got cpu")):
        attention(Q.to("cuda:0"), K, V)
