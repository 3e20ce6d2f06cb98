"""Masks, score changes, sinks and dropout: from a caller's arguments to expressions of rules and their tensors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..kernels import rules as expr
from ..kernels.call import Aux, Options
from ..kernels.torch_names import exporting, must_dispatch
from . import variants
from .blocks import Blocks
from .captured import broadcasts, check_captured, within_call
from .op import library
from .rules import Mask, Scores
from .sizes import Sizes, diagonal_shift
from .validation import clamp_side

if TYPE_CHECKING:
    from .call import Arguments

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_features(arguments: Arguments, sizes: Sizes, options: Options, device: torch.device) -> None:
    """Raise TypeError or ValueError where an argument is not what it has to be; the message names it."""
    mask, slopes, heads = arguments.mask, arguments.alibi_slopes, sizes.num_heads
    if isinstance(mask, Mask):
        if mask.blocks is not None:
            _check_blocks(mask.blocks, sizes, options, device)
        check_captured("mask", expr.leaves(mask.expression), mask.tensors, sizes, device)
    elif mask is not None:
        if not isinstance(mask, Tensor):
            raise TypeError(f"mask must be a bool tensor or a Mask; got {type(mask).__name__}")
        _check("mask", mask, device, (torch.bool,))
        _check_broadcasts("mask", mask, sizes)
    if slopes is not None:
        _check("alibi_slopes", slopes, device, FLOATS)
        batch = math.prod(sizes.batch)
        fits = slopes.ndim in (1, 2) and slopes.shape[-1] == heads
        if not fits or (slopes.ndim == 2 and slopes.shape[0] != batch):
            raise ValueError(
                f"alibi_slopes must have shape ({heads},) or ({batch}, {heads}); got {tuple(slopes.shape)}"
            )
    if arguments.bias is not None:
        _check("bias", arguments.bias, device, FLOATS)
        _check_broadcasts("bias", arguments.bias, sizes)
    scores = arguments.scores
    if scores is not None:
        if not isinstance(scores, Scores):
            raise TypeError(f"scores must be Scores, which score rules give; got {type(scores).__name__}")
        check_captured("scores", scores.expression, scores.tensors, sizes, device)
    sinks = arguments.sinks
    if sinks is not None:
        _check("sinks", sinks, device, FLOATS)
        if tuple(sinks.shape) != (heads,):
            raise ValueError(f"sinks must have shape ({heads},), a logit for each head; got {tuple(sinks.shape)}")
    _check_randomness(arguments.seed, arguments.generator, device)


def bind(arguments: Arguments, sizes: Sizes, bottom_right: bool, device: torch.device) -> Aux:
    """The tensors of a call whose arguments are valid, shaped as backends take them: views where they can be.

    Raises:
        ValueError: a slope on a CPU is not finite. Elsewhere looking would stop the device.
    """
    mask, scores, packed = arguments.mask, arguments.scores, sizes.packed
    blocks = mask.blocks if isinstance(mask, Mask) else None
    mask_aux: tuple[Tensor, ...] = ()
    if isinstance(mask, Mask):
        mask_aux = mask.tensors
    elif mask is not None:
        mask_aux = (_broadcast_view(mask, sizes),)
    score_aux: list[Tensor] = []
    if arguments.alibi_slopes is not None:
        score_aux.append(_finite(arguments.alibi_slopes))
        if packed is not None and bottom_right:
            shift = diagonal_shift(sizes, bottom_right)
            assert isinstance(shift, Tensor)
            score_aux.append(shift)
    if arguments.bias is not None:
        score_aux.append(_broadcast_view(arguments.bias, sizes))
    if scores is not None:
        score_aux += within_call(scores.expression, scores.tensors_of(sizes), sizes)
    return Aux(
        sinks=None if arguments.sinks is None else arguments.sinks.contiguous(),
        seed=None if arguments.dropout_p == 0 else _seed(arguments, device),
        block_rows=None if blocks is None else blocks.rows,
        block_columns=None if blocks is None else blocks.columns,
        cu_seqlens_q=None if packed is None else packed.cu_seqlens_q,
        cu_seqlens_k=None if packed is None else packed.cu_seqlens_k,
        mask_aux=mask_aux,
        score_aux=tuple(score_aux),
    )


def expressions(
    arguments: Arguments, sizes: Sizes, bottom_right: bool, aux: Aux, device: torch.device
) -> tuple[expr.Mask | None, expr.Scores]:
    """The rules of the mask and of the scores, in the order in which `bind` lists their tensors."""
    mask = arguments.mask
    if isinstance(mask, Tensor):
        mask = variants.visible_where(aux.mask_aux[0])
    scores = Scores((), ())
    if arguments.alibi_slopes is not None:
        packed = sizes.packed is not None and bottom_right
        shift = aux.score_aux[1] if packed else diagonal_shift(sizes, bottom_right)
        scores = scores + variants.alibi(aux.score_aux[0], shift)
    if arguments.bias is not None:
        scores = scores + variants.bias(aux.score_aux[len(scores.tensors)])
    if arguments.scores is not None:
        scores = scores + Scores(arguments.scores.expression_of(sizes), arguments.scores.tensors)
    check_captured("scores", scores.expression, aux.score_aux, sizes, device)
    return None if mask is None else mask.expression, scores.expression


def _check_blocks(blocks: Blocks, sizes: Sizes, options: Options, device: torch.device) -> None:
    if (blocks.starts is None) != (sizes.packed is None):
        expected, got = ("with", "without") if blocks.starts is None else ("without", "with")
        raise ValueError(f"mask must have blocks that were found {expected} cu_seqlens_q for this call; got some {got}")
    if sizes.note:
        raise ValueError("max_seqlen_q and max_seqlen_k must be given for a mask with lists of blocks; got None")
    reach = (sizes.k_len, sizes.q_len) if options.bottom_right else (sizes.q_len, sizes.k_len)
    # Of packed sequences the options have sides that are clamped to all rows, lists those clamped to a sequence's.
    made_for, asked = (
        (*lengths, clamp_side(of.window_left, reach[0]), clamp_side(of.window_right, reach[1]), of.bottom_right)
        for of, lengths in ((blocks, (blocks.q_len, blocks.k_len)), (options, (sizes.q_len, sizes.k_len)))
    )
    if made_for != asked:
        names = "(q_len, k_len, window_left, window_right, bottom_right)"
        raise ValueError(f"mask must have blocks that were found for this call, {names} {asked}; got {made_for}")
    of_call = {"batch entries": math.prod(sizes.batch), "heads": sizes.num_heads}
    for (name, number), found in zip(of_call.items(), (blocks.batch, blocks.heads), strict=True):
        if found is not None and found != number:
            raise ValueError(f"mask must have blocks for {number} {name}, which it tells apart; got those of {found}")
    if blocks.rows.device != device:
        raise ValueError(f"the blocks of mask must be on {device} to match q; got {blocks.rows.device}")


def _check(name: str, tensor: Tensor, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} must have dtype {expected}; got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} to match q; got {tensor.device}")


def _check_broadcasts(name: str, tensor: Tensor, sizes: Sizes) -> None:
    shape = sizes.shape
    padded = (1,) * (len(shape) - tensor.ndim) + tuple(tensor.shape)
    if len(padded) != len(shape) or not all(map(broadcasts, padded, shape)):
        expected, got = ", ".join(map(str, shape)), f"{tuple(tensor.shape)}{sizes.note}"
        raise ValueError(f"{name} must have a shape that broadcasts to ({expected}); got {got}")


def _broadcast_view(tensor: Tensor, sizes: Sizes) -> Tensor:
    """(batch or 1, heads or 1, q_len or 1, k_len or 1): a view, unless several batch axes are only partly broadcast."""
    shape = sizes.shape
    padded = (1,) * (len(shape) - tensor.ndim) + tuple(tensor.shape)
    tensor = tensor.reshape(padded)
    if sizes.heads is None:
        return tensor[:, None] if tensor.ndim == 3 else tensor[None, None]
    if any(size != 1 for size in padded[:-3]):
        tensor = tensor.expand(*sizes.batch, *padded[-3:])
        return tensor.reshape(math.prod(sizes.batch), *padded[-3:])
    return tensor.reshape(1, *padded[-3:])


def _finite(slopes: Tensor) -> Tensor:
    if slopes.device.type == "cpu" and not must_dispatch(slopes) and not slopes.isfinite().all():
        raise ValueError(f"alibi_slopes must be finite; got {slopes[~slopes.isfinite()][0].item()}")
    return slopes if slopes.ndim == 2 else slopes[None]


def _check_randomness(seed: Any, generator: Any, device: torch.device) -> None:
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.dtype != torch.int64 or seed.device != device:
            got = f"{tuple(seed.shape)} {seed.dtype} on {seed.device}"
            raise ValueError(f"seed must be one int64 on {device}; got {got}")
    elif seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"seed must be an int, a tensor or None; got {type(seed).__name__}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None; got {type(generator).__name__}")


def _seed(arguments: Arguments, device: torch.device) -> Tensor:
    """The seed as an int64 tensor of one element on this device; drawn there where none is given."""
    seed = arguments.seed
    if seed is None:
        generator = arguments.generator
        drawn_on = device if generator is None else generator.device
        return torch.randint(-(2**63), 2**63 - 1, (1,), device=drawn_on, generator=generator).to(device)
    if isinstance(seed, Tensor):
        return seed.reshape(1)
    if type(seed) is int:
        seed = (seed + 2**63) % 2**64 - 2**63
    if torch.compiler.is_compiling() and not exporting():
        return torch.ops.cs336_systems.seed(seed, device)
    return torch.tensor([seed], device=device)


library.define("seed(SymInt seed, Device device) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def _opaque_seed(seed: int, device: torch.device) -> Tensor:
    """A seed that torch.compile does not take for a constant: it would write all random numbers as one expression."""
    return torch.full((1,), seed, dtype=torch.int64, device=device)


library.impl("seed", _opaque_seed, "CompositeExplicitAutograd")
torch.library.register_fake("cs336_systems::seed", _opaque_seed, lib=library)
