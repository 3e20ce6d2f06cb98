"""Other libraries' names are refused, and the error says what to write."""

from __future__ import annotations

import inspect

import pytest
import torch

import cs336_systems.attention
from cs336_systems.attention import (
    Attention,
    CompiledAttention,
    attention,
    attention_varlen,
    attention_with_cache,
    explain,
    explain_varlen,
    explain_with_cache,
    score_statistics,
    score_statistics_varlen,
)
from cs336_systems.attention.hints import _INSTEAD

from .helpers import says

QKV = [torch.zeros(1, 2, 3, 4)] * 3
PACKED = [torch.zeros(3, 2, 4)] * 3
STARTS = torch.tensor([0, 3])
CALLS = {
    "attention": lambda **given: attention(*QKV, **given),
    "explain": lambda **given: explain(*QKV, **given),
    "varlen": lambda **given: attention_varlen(*PACKED, STARTS, **given),
    "explain_varlen": lambda **given: explain_varlen(*PACKED, STARTS, **given),
    "statistics": lambda **given: score_statistics(*QKV[:2], **given),
    "statistics_varlen": lambda **given: score_statistics_varlen(*PACKED[:2], STARTS, **given),
    "module": lambda **given: Attention(**given),
    "implementation": lambda **given: CompiledAttention(**given),
    "cache": lambda **given: attention_with_cache(*QKV, STARTS[1:], **given),
    "explain_cache": lambda **given: explain_with_cache(*QKV, STARTS[1:], **given),
}
HINTS = {
    "is_causal": "causal ('top_left' aligns as torch's is_causal does)",
    "attn_mask": "mask (of bools; bias is added to the scores)",
    "causal_mask": "causal (True or 'bottom_right', or 'top_left')",
    "sm_scale": "scale",
    "softmax_scale": "scale",
    "dropout": "dropout_p",
}


@pytest.mark.parametrize("name", HINTS)
def test_attention_says_what_to_use(name):
    with pytest.raises(TypeError, match=says(f"unexpected keyword argument {name!r}; use {HINTS[name]}")):
        attention(*QKV, **{name: True})


@pytest.mark.parametrize("call", CALLS)
def test_every_entry_point_does(call):
    with pytest.raises(TypeError, match=says("unexpected keyword argument 'sm_scale'; use scale")):
        CALLS[call](sm_scale=1.0)
    with pytest.raises(TypeError, match=says("unexpected keyword argument 'scal'")):
        CALLS[call](scal=1.0)


@pytest.mark.parametrize(("call", "name"), [("cache", "is_causal"), ("statistics", "dropout"), ("module", "attn_mask")])
def test_nothing_is_advised_that_is_refused_too(call, name):
    with pytest.raises(TypeError, match=says(f"unexpected keyword argument {name!r}")):
        CALLS[call](**{name: None})


def test_hints_name_arguments_that_there_are():
    """Those that `inspect.signature` shows, with no names of other libraries among them."""
    parameters = inspect.signature(attention).parameters
    assert {instead for instead, _ in _INSTEAD.values()} < parameters.keys()
    assert not _INSTEAD.keys() & parameters.keys()


def test_the_module_says_how_to_import_the_function():
    message = "cs336_systems.attention is a module; write `from cs336_systems.attention import attention`"
    with pytest.raises(TypeError, match=says(message)):
        cs336_systems.attention(*QKV)
    assert inspect.ismodule(cs336_systems.attention)
