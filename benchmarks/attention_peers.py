"""Other libraries' attention, measured where it happens to be installed: FlashAttention-3 and -4, FlexAttention."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from benchmarks.attention_presets import Problem
from benchmarks.attention_provider import Attend, Provider
from cs336_systems.profiling.flops import Pass

PEER_DISTRIBUTIONS = ("flash-attn-3", "fa3-fwd", "flash-attn-4")
"""Distributions whose versions are recorded."""


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
        _flash_attention("fa3", _FLASH_ATTENTION_3, device),
        _flash_attention("fa4", _FLASH_ATTENTION_4, device),
        Provider(name="flex", group="peers", bind=functools.partial(_bind_flex, device), compiles=True),
    ]
    if device.type != "cuda":
        return [replace(peer, missing="measured on a CUDA device only") for peer in peers]
    return peers


def _flash_attention(name: str, builds: tuple[Build, ...], device: torch.device) -> Provider:
    def unusable(problem: Problem) -> Attend:
        raise NotImplementedError(f"{name} is not installed")

    provider = Provider(name=name, group="peers", bind=unusable, layout="length first")
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
            flags = _build_flags(build.configuration)
            return replace(provider, bind=_binder(function), refusal=functools.partial(_refusal, name, flags))
    return replace(provider, missing="; ".join(failures) or "not installed")


def _build_flags(configuration: str | None) -> Mapping[str, bool]:
    if configuration is None:
        return {}
    try:
        module: ModuleType = importlib.import_module(configuration)
    except ImportError:
        return {}
    flags: dict[str, bool] = getattr(module, "CONFIG", {}).get("build_flags", {})
    return flags


def _refusal(name: str, flags: Mapping[str, bool], problem: Problem, which: Pass) -> str | None:
    if problem.dtype not in ("bfloat16", "float16"):
        return f"{name} takes bfloat16 and float16, not {problem.dtype}"
    if problem.dtype == "float16" and flags.get("FLASHATTENTION_DISABLE_FP16"):
        return f"this build of {name} has no float16 kernels"
    if which != "forward" and flags.get("FLASHATTENTION_DISABLE_BACKWARD"):
        return f"this build of {name} has the forward pass alone"
    if problem.head_dim % 8:
        return f"{name} takes head dimensions that are multiples of 8, not {problem.head_dim}"
    return None


def _binder(function: Callable[..., Any]) -> Callable[[Problem], Attend]:
    def bind(problem: Problem) -> Attend:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            result = function(q, k, v, causal=problem.causal)
            # Some versions return the log-sum-exp beside the output whether asked to or not.
            output: torch.Tensor = result[0] if isinstance(result, tuple) else result
            return output

        return attend

    return bind


def _bind_flex(device: torch.device, problem: Problem) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return query >= key

    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    length = problem.length
    mask = create_block_mask(visible, None, None, length, length, device=str(device)) if problem.causal else None
    attend: Attend = functools.partial(compiled, block_mask=mask, enable_gqa=problem.heads != problem.kv_heads)
    return attend
