"""From what a user gives for masks, scores, sinks and dropout to a spec's expressions and their tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import rules as expressions
from ..kernels.torch_names import exporting
from . import ops, variants
from .blocks import Blocks
from .captured import broadcasts, check_captured
from .ops import must_dispatch
from .rules import Mask, Scores
from .sizes import Sizes, shift_of, unsaid

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Features:
    """What a call asks for besides causality, a window and a scale, as `attention` takes it."""

    mask: Tensor | Mask | None = None
    bias: Tensor | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    scores: Scores | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    seed: int | Tensor | None = None
    generator: torch.Generator | None = None


class Assembled(NamedTuple):
    """Features as a spec has them, and the tensors that go with them, in the order of `pairs.Extras`."""

    mask: expressions.Mask | None
    scores: expressions.Scores
    sinks: bool
    dropout: float | None
    blocks: bool
    extras: tuple[Tensor, ...]


def assemble(
    features: Features, sizes: Sizes, causal: str, window: tuple[int | None, int | None], device: torch.device
) -> Assembled:
    """Validate features, and put them together.

    Args:
        causal, window: as the spec has them.

    Raises:
        TypeError, ValueError: an argument is not what it has to be; the message names it.
    """
    mask = _mask(features.mask, sizes, device)
    blocks = () if mask is None or mask.blocks is None else _blocks(mask.blocks, sizes, causal, window, device)
    scores = Scores((), ())
    cap = positive("softcap", features.softcap)
    if cap is not None:
        scores = scores + variants.softcap(cap)
    if features.alibi_slopes is not None:
        scores = scores + variants.alibi(_slopes(features.alibi_slopes, sizes, device), shift_of(sizes, causal))
    if features.bias is not None:
        _check("bias", features.bias, device, FLOATS)
        scores = scores + variants.bias(_broadcast("bias", features.bias, sizes))
    if features.scores is not None:
        if not isinstance(features.scores, Scores):
            raise TypeError(f"scores must be Scores, which score rules give; got {type(features.scores).__name__}")
        scores = scores + features.scores
    if mask is not None:
        check_captured("mask", expressions.leaves(mask.expression), mask.tensors, sizes, device)
    check_captured("scores", scores.expression, scores.tensors, sizes, device)
    sinks = () if features.sinks is None else (_sinks(features.sinks, sizes, device),)
    dropout = probability(features.dropout_p)
    _check_randomness(features, device)
    seed = () if dropout is None else (_seed(features, device),)
    starts = () if sizes.packed is None else sizes.packed[:2]
    extras = _distinct((*sinks, *seed, *blocks, *starts, *(mask.tensors if mask else ()), *scores.tensors))
    # torch.compile of torch 2.11 does not trace whether a tuple is true.
    by_rules = None if mask is None else mask.expression
    return Assembled(by_rules, scores.expression, len(sinks) > 0, dropout, len(blocks) > 0, extras)


def _distinct(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors, views standing for those that came before: torch.compile takes none twice."""
    return tuple(
        tensor.view_as(tensor) if any(tensor is other for other in tensors[:number]) else tensor
        for number, tensor in enumerate(tensors)
    )


def _blocks(
    blocks: Blocks, sizes: Sizes, causal: str, window: tuple[int | None, int | None], device: torch.device
) -> tuple[Tensor, Tensor]:
    if sizes.packed is not None:
        raise ValueError("mask must have no lists of blocks for packed sequences, which differ in length; got some")
    found_for = (blocks.q_len, blocks.k_len, blocks.causal, blocks.window)
    asked = (sizes.q_len, sizes.k_len, causal, window)
    if found_for != asked:
        names = "(q_len, k_len, causal, window)"
        raise ValueError(f"mask must have blocks that were found for this call, {names} {asked}; got {found_for}")
    of_call = {"batch entries": math.prod(sizes.batch), "heads": sizes.matrices}
    for (name, number), found in zip(of_call.items(), (blocks.batch, blocks.heads), strict=True):
        if found is not None and found != number:
            raise ValueError(f"mask must have blocks for {number} {name}, which it tells apart; got those of {found}")
    if blocks.rows.device != device:
        raise ValueError(f"the blocks of mask must be on {device} to match q; got {blocks.rows.device}")
    return blocks.rows, blocks.columns


def _mask(mask: Tensor | Mask | None, sizes: Sizes, device: torch.device) -> Mask | None:
    if mask is None or isinstance(mask, Mask):
        return mask
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a bool tensor or a Mask; got {type(mask).__name__}")
    _check("mask", mask, device, (torch.bool,))
    return variants.visible_where(_broadcast("mask", mask, sizes))


def _check(name: str, tensor: Tensor, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} must have dtype {expected}; got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} to match q; got {tensor.device}")


def _broadcast(name: str, tensor: Tensor, sizes: Sizes) -> Tensor:
    """(batch or 1, heads or 1, q_len or 1, k_len or 1): a view, unless several batch axes are only partly broadcast."""
    shape = sizes.shape
    own = (1,) * (len(shape) - tensor.ndim) + tuple(tensor.shape)
    if len(own) != len(shape) or not all(map(broadcasts, own, shape)):
        written = ", ".join(map(str, shape))
        got = f"{tuple(tensor.shape)}{unsaid(sizes)}"
        raise ValueError(f"{name} must have a shape that broadcasts to ({written}); got {got}")
    tensor = tensor.reshape(own)
    if sizes.heads is None:
        return tensor[:, None] if tensor.ndim == 3 else tensor[None, None]
    leading = own[:-3]
    if any(size != 1 for size in leading):
        tensor = tensor.expand(*sizes.batch, *own[-3:])
        return tensor.reshape(math.prod(sizes.batch), *own[-3:])
    return tensor.reshape(1, *own[-3:])


def _slopes(slopes: Tensor, sizes: Sizes, device: torch.device) -> Tensor:
    _check("alibi_slopes", slopes, device, FLOATS)
    heads, batch = sizes.matrices, math.prod(sizes.batch)
    of_heads = slopes.ndim in (1, 2) and slopes.shape[-1] == heads
    if not of_heads or (slopes.ndim == 2 and slopes.shape[0] != batch):
        raise ValueError(f"alibi_slopes must have shape ({heads},) or ({batch}, {heads}); got {tuple(slopes.shape)}")
    # Only where looking stops no device; elsewhere what they reach becomes NaN.
    if device.type == "cpu" and not must_dispatch(slopes) and not slopes.isfinite().all():
        raise ValueError(f"alibi_slopes must be finite; got {slopes[~slopes.isfinite()][0].item()}")
    return slopes if slopes.ndim == 2 else slopes[None]


def _sinks(sinks: Tensor, sizes: Sizes, device: torch.device) -> Tensor:
    _check("sinks", sinks, device, FLOATS)
    heads = sizes.matrices
    if tuple(sinks.shape) != (heads,):
        raise ValueError(f"sinks must have shape ({heads},), a logit for each head; got {tuple(sinks.shape)}")
    return sinks.contiguous()


def positive(name: str, value: float | None) -> float | None:
    """The value, if it is None or a finite number above 0."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a float or None; got {value!r} of type {type(value).__name__}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be above 0 and finite; got {value}")
    return float(value)


def probability(value: float) -> float | None:
    """``dropout_p`` as a spec has it: None where nothing is dropped."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"dropout_p must be a float; got {value!r} of type {type(value).__name__}")
    if not 0 <= value <= 1:
        raise ValueError(f"dropout_p must be from 0 to 1; got {value}")
    return float(value) if value > 0 else None


def _check_randomness(features: Features, device: torch.device) -> None:
    seed, generator = features.seed, features.generator
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.dtype != torch.int64 or seed.device != device:
            got = f"{tuple(seed.shape)} {seed.dtype} on {seed.device}"
            raise ValueError(f"seed must be one int64 on {device}; got {got}")
    elif seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"seed must be an int, a tensor or None; got {type(seed).__name__}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None; got {type(generator).__name__}")


def _seed(features: Features, device: torch.device) -> Tensor:
    """The seed as an int64 tensor of one element on this device; drawn there where none is given."""
    seed = features.seed
    if seed is None:
        generator = features.generator
        drawn_on = device if generator is None else generator.device
        return torch.randint(-(2**63), 2**63 - 1, (1,), device=drawn_on, generator=generator).to(device)
    if isinstance(seed, Tensor):
        return seed.reshape(1)
    if type(seed) is int:
        seed = (seed + 2**63) % 2**64 - 2**63
    if torch.compiler.is_compiling() and not exporting():
        return torch.ops.cs336_systems.seed(seed, device)
    return torch.tensor([seed], device=device)


ops.library.define("seed(SymInt seed, Device device) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def _opaque_seed(seed: int, device: torch.device) -> Tensor:
    """A seed that torch.compile takes for no constant: it would write the random numbers out as one expression."""
    return torch.full((1,), seed, dtype=torch.int64, device=device)


ops.library.impl("seed", _opaque_seed, "CompositeExplicitAutograd")
torch.library.register_fake(f"{ops.NAMESPACE}::seed", _opaque_seed, lib=ops.library)
