"""Who computes attention in the benchmark: our implementations, torch's backends, and peers that are installed.

To add one, write a `Provider` and put it into `all_providers`; nothing else has to know about it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.attention_peers import peer_providers
from benchmarks.attention_presets import Problem
from benchmarks.attention_provider import Attend, Provider
from cs336_systems.attention import attention
from cs336_systems.attention.choose import interpreting

BASELINE = "naive"
"""The implementation that all others are compared with."""


def _ours(name: str) -> Provider:
    def bind(problem: Problem) -> Attend:
        return lambda q, k, v: attention(q, k, v, causal=problem.causal, impl=name)

    return Provider(
        name=name,
        group="ours",
        bind=bind,
        layout="as given",
        quadratic=name in ("naive", "compiled"),
        compiles=name == "compiled",
        missing="TRITON_INTERPRET is set: these would be times of the interpreter"
        if name == "flash" and interpreting()
        else "",
        # An implementation that was asked for by name and cannot do the call raises ValueError and says why.
        refusals=(ValueError, NotImplementedError),
    )


def _bind_sdpa(problem: Problem) -> Attend:
    return functools.partial(
        F.scaled_dot_product_attention,
        is_causal=problem.causal,
        enable_gqa=problem.heads != problem.kv_heads,
    )


def _torch_backend(name: str, backend: SDPBackend) -> Provider:
    return Provider(
        name=name,
        group="torch",
        bind=_bind_sdpa,
        quadratic=backend is SDPBackend.MATH,
        refusal_phrases=("No available kernel", "No viable backend"),
        warns_why=True,
        context=lambda: sdpa_kernel(backend),
    )


def our_providers() -> list[Provider]:
    """The implementations of `cs336_systems.attention`, the baseline first."""
    return [_ours(name) for name in ("naive", "compiled", "tiled", "flash", "sdpa")]


def torch_providers() -> list[Provider]:
    """The backends of torch's `scaled_dot_product_attention`, each by itself."""
    return [
        _torch_backend("torch-flash", SDPBackend.FLASH_ATTENTION),
        _torch_backend("torch-efficient", SDPBackend.EFFICIENT_ATTENTION),
        _torch_backend("torch-cudnn", SDPBackend.CUDNN_ATTENTION),
        _torch_backend("torch-math", SDPBackend.MATH),
    ]


def all_providers(device: torch.device) -> list[Provider]:
    """Every provider, in the order of tables and legends, those that are missing on this machine too."""
    return [*our_providers(), *torch_providers(), *peer_providers(device)]


def chosen_providers(providers: Sequence[Provider], wanted: Sequence[str]) -> list[Provider]:
    """The providers that `wanted` names, by name, by group, or `all`. Raises ValueError for a name that is none."""
    names = {provider.name for provider in providers}
    groups = {provider.group for provider in providers}
    for name in wanted:
        if name != "all" and name not in names and name not in groups:
            known = ", ".join([*(provider.name for provider in providers), *sorted(groups), "all"])
            raise ValueError(f"--impl must be taken from {known}; got {name}")
    return [p for p in providers if "all" in wanted or p.name in wanted or p.group in wanted]


def reference_name(problem: Problem, device: torch.device) -> str:
    """The torch backend that a problem's times are compared with: the fastest of its kernels without cuDNN.

    Torch's flash kernel takes no float32 on a GPU; its memory-efficient one does.
    """
    return "torch-efficient" if problem.dtype == "float32" and device.type == "cuda" else "torch-flash"
