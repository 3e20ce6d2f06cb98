"""From the arguments of the public functions to a `Call`: every check, and every option in its final form."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.call import NO_AUX, Aux, Call, Options
from .features import bind, check_features, expressions
from .hints import refuse_unknown
from .mods import as_mask, as_scores
from .rules import Mask, Scores
from .sizes import Packed, Sizes
from .tracing.tables import Table
from .validation import (
    Window,
    check_causal,
    check_qkv,
    check_scale,
    check_window,
    default_scale,
    positive,
    probability,
    window_sides,
)


class Arguments(NamedTuple):
    """The keyword arguments of `attention` and `attention_varlen` but ``impl``, as they were given."""

    causal: bool | str = False
    window: Window | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    deterministic: bool | None = None
    return_lse: bool = False
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    scores: Scores | None = None
    mask: Tensor | Mask | None = None
    sinks: Tensor | None = None
    seed: int | Tensor | None = None
    generator: torch.Generator | None = None

    def key(self, has_tensors: bool) -> tuple[Any, ...]:
        """All that a plan depends on: the values of numbers, the metadata of tensors if `has_tensors`.

        The types belong to it, because 1 == True. Raises TypeError if it cannot be hashed.
        """
        plain = self[:7]
        window = plain[1]
        types = *map(type, plain), *(() if window is None else map(type, window))
        return (plain, types, *map(_metadata, self[7:])) if has_tensors else (plain, types)

    @classmethod
    def of(cls, q: Tensor | None = None, /, **options: Any) -> Arguments:
        """The arguments, with masks and score changes in place of functions of a pair. Raises what `mods` says."""
        if not ATTENTION_OPTIONS.issuperset(options):
            refuse_unknown({name: x for name, x in options.items() if name not in ATTENTION_OPTIONS}, ATTENTION_OPTIONS)
        scores, mask = as_scores(options.pop("scores", None), q), as_mask(options.pop("mask", None), q)
        return cls(scores=scores, mask=mask, **options)

    @property
    def has_tensors(self) -> bool:
        """Whether anything is given but numbers, or dropout draws a seed."""
        # Written out, because it runs in every call. `is True`: nothing has checked yet that dropout_p is a number.
        _, _, _, _, dropout_p, _, _, slopes, bias, scores, mask, sinks, seed, generator = self
        return not (
            slopes is None
            and bias is None
            and scores is None
            and mask is None
            and sinks is None
            and seed is None
            and generator is None
            and (dropout_p == 0) is True
        )


ATTENTION_OPTIONS = frozenset(Arguments._fields)


def _metadata(argument: Any) -> Any:
    if argument is None:
        return None
    if isinstance(argument, Tensor):
        look = argument.shape, argument.stride(), argument.dtype, argument.device, argument.requires_grad
        return type(argument), *look  # a subclass has to see the operators
    if isinstance(argument, Table):
        return tuple(map(_metadata, argument.captured))
    if isinstance(argument, (Mask, Scores)):
        blocks = argument.blocks if isinstance(argument, Mask) else None
        listed = None if blocks is None else (*map(_metadata, blocks[:2]), *blocks[2:-1], blocks.starts is None)
        return argument.expression, tuple(map(_metadata, argument.tensors)), listed
    return type(argument)


def make_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arguments: Arguments,
    packed: Packed | None = None,
    cache_lengths: Tensor | None = None,
) -> Call:
    """Validate the arguments of an attention call; with ``packed``, q is (1, heads, all rows, d), and so on.

    Two dimensions get a batch axis.

    Raises:
        TypeError: an argument has the wrong type, or a tensor a dtype that is not floating-point or not q's.
        ValueError: a shape, device or value does not fit.
    """
    check_qkv(q, k, v)
    options = _options(q, k, arguments)
    aux = Aux(cache_lengths=cache_lengths) if cache_lengths is not None else NO_AUX
    if packed is not None:
        options = options._replace(max_seqlen_q=packed.max_seqlen_q, max_seqlen_k=packed.max_seqlen_k)
    if arguments.has_tensors or packed is not None:
        sizes = sizes_of(q, k, packed)
        check_features(arguments, sizes, options, q.device)
        aux = bind(arguments, sizes, options.bottom_right, q.device)
        mask, scores = expressions(arguments, sizes, options.bottom_right, aux, q.device)
        options = options._replace(mask=mask, scores=scores)
    if q.ndim == 2:
        q, k, v = q[None], k[None], v[None]
    return Call(q, k, v, options, aux, arguments.return_lse)


def sizes_of(q: Tensor, k: Tensor, packed: Packed | None) -> Sizes:
    """The sizes of the scores of a call."""
    heads = q.shape[-3] if q.ndim >= 4 else None
    if packed is None:
        return Sizes(tuple(q.shape[:-3] if q.ndim >= 4 else q.shape[:-2]), heads, q.shape[-2], k.shape[-2])
    lengths = packed.max_seqlen_q or 1, packed.max_seqlen_k or 1
    return Sizes((packed.cu_seqlens_q.numel() - 1,), heads, *lengths, packed)


def _options(q: Tensor, k: Tensor, arguments: Arguments) -> Options:
    deterministic = arguments.deterministic
    if not isinstance(arguments.return_lse, bool):
        raise TypeError(f"return_lse must be a bool; got {arguments.return_lse!r}")
    if deterministic is not None and not isinstance(deterministic, bool):
        raise TypeError(f"deterministic must be a bool or None; got {deterministic!r}")
    causal = check_causal(arguments.causal)
    scale = check_scale(arguments.scale)
    window = check_window(arguments.window)
    if deterministic is None and q.device.type == "cuda":
        deterministic = torch.are_deterministic_algorithms_enabled()
    left, right, bottom_right = window_sides(causal, window, q.shape[-2], k.shape[-2])
    return Options(
        scale=default_scale(q.shape[-1]) if scale is None else scale,
        window_left=left,
        window_right=right,
        bottom_right=bottom_right,
        softcap=positive("softcap", arguments.softcap),
        dropout_p=probability(arguments.dropout_p),
        deterministic=bool(deterministic),
    )
