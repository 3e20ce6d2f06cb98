"""What to write instead of other libraries' names: for arguments, and for a module that is called."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any, NoReturn

_INSTEAD = {
    "is_causal": ("causal", "'top_left' aligns as torch's is_causal does"),
    "causal_mask": ("causal", "True or 'bottom_right', or 'top_left'"),
    "attn_mask": ("mask", "of bools; bias is added to the scores"),
    "attention_mask": ("mask", "of bools; bias is added to the scores"),
    "mask_mod": ("mask", ""),
    "block_mask": ("mask", "which with_blocks gives lists of blocks"),
    "score_mod": ("scores", ""),
    "sm_scale": ("scale", ""),
    "softmax_scale": ("scale", ""),
    "scaling": ("scale", ""),
    "dropout": ("dropout_p", ""),
    "window_size": ("window", "before, after; None for all"),
    "sliding_window": ("window", "before, after: n - 1, 0 for n keys with the query's own"),
    "s_aux": ("sinks", ""),
    "return_attn_probs": ("return_lse", ""),
    "return_softmax_lse": ("return_lse", ""),
}
"""An argument of torch, FlexAttention, flash-attn, Triton's tutorial or transformers; ours, and what it takes."""


def refuse_unknown(unknown: Mapping[str, object], known: Collection[str]) -> NoReturn:
    """Raise TypeError for the first of these arguments, and name the one of ``known`` to use."""
    name = next(iter(unknown))
    instead, values = _INSTEAD.get(name, ("", ""))
    hint = f"; use {instead}{f' ({values})' if values else ''}" if instead in known else ""
    raise TypeError(f"unexpected keyword argument {name!r}{hint}")


class UncallableModule(ModuleType):
    """A module whose name is that of a function in it, and which says how to import the function."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        function = self.__name__.rpartition(".")[2]
        raise TypeError(f"{self.__name__} is a module; write `from {self.__name__} import {function}`")
