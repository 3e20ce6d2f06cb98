"""Other libraries' attention, measured where it happens to be installed: FlashAttention-3 and -4, FlexAttention."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.attention_presets import Problem
from benchmarks.attention_provider import Attend, Provider
from cs336_systems.profiling.flops import Pass

PEER_DISTRIBUTIONS = ("flash-attn-3", "fa3-fwd", "flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl")
"""Distributions whose versions are recorded: the peers, and the compiler that one of them brings."""

Capability = tuple[int, int]
Limits = Callable[[Problem, Pass, Capability, Mapping[str, bool]], str | None]
"""Why a library cannot do a problem and pass on a GPU of a compute capability, given the flags of its build."""

# What both libraries say, in an exception of no special type, when they refuse a call.
_REFUSAL_PHRASES = ("not supported", "does not support", "Unsupported compute capability", "only supports")


@dataclass(frozen=True)
class Build:
    """One distribution of a peer: the module with `flash_attn_func`, and the module with the flags of its build."""

    module: str
    configuration: str | None = None


# The whole FlashAttention-3 first; the wheel fa3-fwd has the forward pass alone, under a name of its own.
_FLASH_ATTENTION_3 = (
    Build("flash_attn_interface", "flash_attn_config"),
    Build("fa3_fwd_interface", "fa3_fwd_config"),
)
_FLASH_ATTENTION_4 = (Build("flash_attn.cute"),)


def peer_providers(device: torch.device) -> list[Provider]:
    """The peers, with the reason in `missing` for each that cannot be used here."""
    peers = [
        _flash_attention("fa3", _FLASH_ATTENTION_3, _limits_of_3, device),
        _flash_attention("fa4", _FLASH_ATTENTION_4, _limits_of_4, device),
        Provider(
            name="flex",
            group="peers",
            bind=functools.partial(_bind_flex, device),
            compiles=True,
            refusal=_refusal_of_flex,
            refusal_phrases=("NYI", "not supported", "does not support"),
        ),
    ]
    if device.type != "cuda":
        return [replace(peer, missing="measured on a CUDA device only") for peer in peers]
    return peers


def _flash_attention(name: str, builds: tuple[Build, ...], limits: Limits, device: torch.device) -> Provider:
    def unusable(problem: Problem) -> Attend:
        raise NotImplementedError(f"{name} is not installed")

    provider = Provider(
        name=name, group="peers", bind=unusable, layout="length first", refusal_phrases=_REFUSAL_PHRASES
    )
    if device.type != "cuda":
        return provider  # not imported: these modules load CUDA libraries
    failures = []
    for build in builds:
        try:
            module = importlib.import_module(build.module)
            function = module.flash_attn_func
        except ModuleNotFoundError as error:
            # A module that is there may lack another one that it needs; that is said.
            named = error.name or ""
            if not (build.module == named or build.module.startswith(f"{named}.")):
                failures.append(f"{build.module} needs {named}, which is not installed")
        except Exception as error:
            failures.append(f"{build.module} cannot be imported: {type(error).__name__}: {error}")
        else:
            capability = torch.cuda.get_device_capability(device)
            flags = _build_flags(build.configuration)
            refusal = functools.partial(_refusal, name, limits, capability, flags)
            return replace(provider, bind=_binder(function), refusal=refusal)
    return replace(provider, missing="; ".join(failures) or "not installed")


def _build_flags(configuration: str | None) -> Mapping[str, bool]:
    if configuration is None:
        return {}
    try:
        module = importlib.import_module(configuration)
    except ImportError:
        return {}
    flags: dict[str, bool] = getattr(module, "CONFIG", {}).get("build_flags", {})
    return flags


def _refusal(
    name: str, limits: Limits, capability: Capability, flags: Mapping[str, bool], problem: Problem, which: Pass
) -> str | None:
    if problem.dtype not in ("bfloat16", "float16"):
        return f"{name} takes bfloat16 and float16, not {problem.dtype}"
    if problem.head_dim % 8:
        return f"{name} takes head dimensions that are multiples of 8, not {problem.head_dim}"
    reason = limits(problem, which, capability, flags)
    return reason and f"{name} {reason}"


def _limits_of_3(problem: Problem, which: Pass, capability: Capability, flags: Mapping[str, bool]) -> str | None:
    if capability[0] != 9 and (capability[0] != 8 or flags.get("FLASHATTENTION_DISABLE_SM8x")):
        return f"has no kernels for sm_{capability[0]}{capability[1]} in this build"
    if problem.dtype == "float16" and flags.get("FLASHATTENTION_DISABLE_FP16"):
        return "has no float16 kernels in this build"
    if which != "forward" and flags.get("FLASHATTENTION_DISABLE_BACKWARD"):
        return "has the forward pass alone in this build"
    widths = [width for width in (64, 96, 128, 192, 256) if not flags.get(f"FLASHATTENTION_DISABLE_HDIM{width}")]
    if problem.head_dim > max(widths, default=0):
        return f"takes head dimensions up to {max(widths, default=0)} in this build, not {problem.head_dim}"
    return None


def _limits_of_4(problem: Problem, which: Pass, capability: Capability, flags: Mapping[str, bool]) -> str | None:
    if capability[0] not in (8, 9, 10, 11, 12):
        return f"has no kernels for sm_{capability[0]}{capability[1]}"
    if which != "forward" and capability[0] == 8:
        return f"has the forward pass alone for sm_{capability[0]}{capability[1]}"
    if problem.head_dim > 256 or (capability[0] in (10, 11) and 128 < problem.head_dim < 256):
        return f"has no kernels for head dimension {problem.head_dim} on sm_{capability[0]}{capability[1]}"
    return None


def _binder(function: Callable[..., Any]) -> Callable[[Problem], Attend]:
    def bind(problem: Problem) -> Attend:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            result = function(q, k, v, causal=problem.causal)
            # FlashAttention-4 returns the log-sum-exp, or None for it, beside the output whether asked to or not.
            output: torch.Tensor = result[0] if isinstance(result, (tuple, list)) else result
            return output

        return attend

    return bind


def _refusal_of_flex(problem: Problem, which: Pass) -> str | None:
    if problem.head_dim < 16:
        return f"flex takes head dimensions from 16 on, not {problem.head_dim}"
    return None


def _bind_flex(device: torch.device, problem: Problem) -> Attend:
    from torch.nn.attention.flex_attention import flex_attention

    # Whole graphs alone: beyond its limit of recompilations the compiler would run the function as plain PyTorch, which
    # keeps every score, and the time would still be called flex's.
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    mask = causal_block_mask(problem.length, device) if problem.causal else None
    attend: Attend = functools.partial(compiled, block_mask=mask, enable_gqa=problem.heads != problem.kv_heads)
    return attend


def causal_block_mask(length: int, device: torch.device, block: int = 128) -> Any:
    """FlexAttention's description of a causal mask over `length` queries and keys, in blocks of `block` squared.

    It is what `create_block_mask` makes. That first evaluates the mask in every element, which takes 4 GiB at length
    65,536; here whole blocks are described at once.
    """
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    def visible(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return query >= key

    if length % block:
        return create_block_mask(visible, None, None, length, length, device=str(device), BLOCK_SIZE=block)
    count = length // block
    index = torch.arange(count, dtype=torch.int32, device=device)
    ascending = index.expand(1, 1, count, count).contiguous()
    # A row of blocks sees its diagonal block in part, and all before it in full; the blocks that it does not see in
    # this way come after those that it does.
    diagonal_first = ascending.clone()
    below = index[:, None] >= index
    diagonal_first[0, 0][below] = (ascending[0, 0] - 1)[below]
    diagonal_first[..., 0] = index
    return BlockMask.from_kv_blocks(
        torch.ones(1, 1, count, dtype=torch.int32, device=device),
        diagonal_first,
        index[None, None].contiguous(),
        ascending,
        BLOCK_SIZE=block,
        mask_mod=visible,
        seq_lengths=(length, length),
    )
