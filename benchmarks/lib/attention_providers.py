"""The providers of the attention benchmark: this library's implementations, torch's backends, and other libraries.

To add one, write a `Provider` and put it into `all_providers`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import site
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.lib.flags import DTYPES
from benchmarks.lib.harness import Case
from benchmarks.lib.isolation import run_isolated
from cs336_systems.attention import attention
from cs336_systems.kernels.language import interpreting
from cs336_systems.profiling.flops import Pass, attention_flops

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Mask = Callable[[Tensor, Tensor], Tensor]
"""Whether a query sees a key, from their indices, which broadcast."""
Layout = Literal["as given", "heads first", "length first"]
"""The shape of a provider's tensors: (batch, heads, length, d), without the axis of heads if the problem has none; the
same, always with that axis; or (batch, length, heads, d)."""

GROUPS = ("ours", "torch", "peers")
BASELINE = "naive"
"""The provider that all others are compared with."""
KERNELS, KERNELS_LABEL = "flash", "ours"
"""This library's kernels: the provider's name, and its label in plots that also show other libraries."""
PEER_DISTRIBUTIONS = ("flash-attn-3", "fa3-fwd", "flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl")
"""Distributions whose versions are recorded: the other libraries, and the compiler that one of them needs."""
# What the flash_attn libraries say in exceptions of any type when they refuse a call.
_REFUSAL_PHRASES = ("not supported", "does not support", "nsupported compute capability", "only supports")
# Tensors of length × length that are alive at once: forward the scores, the masked scores and the probabilities; in
# training their gradients too. An estimate on the safe side, counted in float32 at least.
_QUADRATIC_TENSORS: dict[Pass, int] = {"forward": 3, "backward": 5, "both": 5}


@dataclass(frozen=True)
class Problem(Case):
    """The attention call of one case. ``heads`` 0: tensors without an axis of heads. ``v_head_dim`` None: as q's."""

    dtype: str
    mask: str
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    length: int
    v_head_dim: int | None = field(default=None, kw_only=True)

    @property
    def causal(self) -> bool:
        """Whether a query sees only the keys up to its own position."""
        return self.mask == "causal"

    def flops(self, which: Pass) -> float:
        """Operations of one call, as `attention_flops` counts them."""
        sizes = (self.batch, max(1, self.heads), self.length, self.length, self.head_dim)
        return attention_flops(*sizes, v_head_dim=self.v_head_dim, causal=self.causal, which=which)

    def quadratic_bytes(self, which: Pass) -> int:
        """Estimated bytes of an implementation that keeps the score matrix."""
        scores = self.batch * max(1, self.heads) * self.length**2 * max(4, DTYPES[self.dtype].itemsize)
        return scores * _QUADRATIC_TENSORS[which]


@dataclass(frozen=True)
class Provider:
    """One implementation of attention.

    Attributes:
        bind: makes the function that is timed, for one problem; what it prepares is not timed.
        quadratic: it keeps tensors of length × length.
        compiles: it uses torch.compile.
        missing: why it cannot be used on this machine at all.
        refusal: why it cannot compute a problem and pass; None if it can.
        refusals, refusal_phrases: exceptions, and texts in the message of any exception, by which it says the same.
        warns_why: the reasons of such an exception are the warnings before it.
        context: entered around every call.
    """

    name: str
    group: str
    bind: Callable[[Any], Attend]
    layout: Layout = "heads first"
    quadratic: bool = False
    compiles: bool = False
    missing: str = ""
    refusal: Callable[[Any, Pass], str | None] = lambda problem, which: None
    refusals: tuple[type[Exception], ...] = (NotImplementedError,)
    refusal_phrases: tuple[str, ...] = ()
    warns_why: bool = False
    context: Callable[[], AbstractContextManager[object]] = nullcontext


def all_providers(device: torch.device) -> list[Provider]:
    """Every provider, in the order of tables and legends, those missing on this machine too; the baseline first."""
    ours = [_ours(name) for name in (BASELINE, "compiled", "tiled", KERNELS, "sdpa")]
    backends = {
        "torch-flash": SDPBackend.FLASH_ATTENTION,
        "torch-efficient": SDPBackend.EFFICIENT_ATTENTION,
        "torch-cudnn": SDPBackend.CUDNN_ATTENTION,
        "torch-math": SDPBackend.MATH,
    }
    return [*ours, *(_torch_backend(name, backend) for name, backend in backends.items()), *peer_providers(device)]


@functools.cache
def add_peers(folder: Path | None) -> None:
    """Let other libraries be imported from a folder that `pip install --target` made."""
    if folder is not None:
        site.addsitedir(str(folder))


def chosen_providers(providers: Sequence[Provider], wanted: Sequence[str]) -> list[Provider]:
    """The providers named by their name, their group, or `all`. Raises ValueError for an unknown name."""
    known = [*(provider.name for provider in providers), *GROUPS, "all"]
    for name in wanted:
        if name not in known:
            raise ValueError(f"--providers must be taken from {', '.join(known)}; got {name}")
    return [p for p in providers if "all" in wanted or p.name in wanted or p.group in wanted]


def reasons_missing(options: argparse.Namespace) -> dict[str, str]:
    """By provider, the reason why it cannot be measured here, or an empty text. Raises ValueError if this fails."""
    # In a separate process: other libraries load CUDA when they are imported.
    finished = run_isolated(_reasons_missing, options)
    if finished.failure:
        raise ValueError(f"--peers: {finished.failure}")
    return finished.result


def _reasons_missing(options: argparse.Namespace) -> dict[str, str]:
    add_peers(options.peers)
    return {provider.name: provider.missing for provider in all_providers(options.device)}


def reference_name(dtype: str, device: torch.device) -> str:
    """The torch backend that times are compared with: flash, or memory-efficient for float32 on a GPU."""
    return "torch-efficient" if dtype == "float32" and device.type == "cuda" else "torch-flash"


def _ours(name: str) -> Provider:
    def bind(problem: Problem) -> Attend:
        return lambda q, k, v: attention(q, k, v, causal=problem.causal, impl=name)

    interpreted = name == KERNELS and interpreting()
    return Provider(
        name=name,
        group="ours",
        bind=bind,
        layout="as given",
        quadratic=name in (BASELINE, "compiled"),
        compiles=name == "compiled",
        missing="TRITON_INTERPRET is set: these would be times of the interpreter" if interpreted else "",
        refusals=(ValueError, NotImplementedError),
    )


def _torch_backend(name: str, backend: SDPBackend) -> Provider:
    def bind(problem: Problem) -> Attend:
        grouped = problem.heads != problem.kv_heads
        return functools.partial(F.scaled_dot_product_attention, is_causal=problem.causal, enable_gqa=grouped)

    return Provider(
        name=name,
        group="torch",
        bind=bind,
        quadratic=backend is SDPBackend.MATH,
        refusal_phrases=("No available kernel", "No viable backend"),
        warns_why=True,
        context=lambda: sdpa_kernel(backend),
    )


def peer_providers(device: torch.device) -> list[Provider]:
    """Other libraries, with the reason in `missing` for each that cannot be used here."""
    flex = Provider(
        "flex",
        "peers",
        functools.partial(_bind_flex, device),
        compiles=True,
        refusal=lambda problem, which: (
            None if problem.head_dim >= 16 else f"flex takes head dimensions from 16 on, not {problem.head_dim}"
        ),
        refusal_phrases=("NYI", "not supported", "does not support"),
    )
    peers = [
        # All of FlashAttention-3 first; the distribution fa3-fwd has the forward pass alone.
        _flash_attention("fa3", ("flash_attn_interface", "fa3_fwd_interface"), device),
        _flash_attention("fa4", ("flash_attn.cute",), device),
        flex,
    ]
    if device.type != "cuda":
        return [replace(peer, missing="measured on a CUDA device only") for peer in peers]
    return peers


def _flash_attention(name: str, modules: Sequence[str], device: torch.device) -> Provider:
    """The first of the modules that can be imported and has `flash_attn_func`."""

    def refusal(problem: Problem, which: Pass) -> str | None:
        # Where the library's own message has none of `_REFUSAL_PHRASES`.
        if problem.dtype not in ("bfloat16", "float16"):
            return f"{name} takes bfloat16 and float16, not {problem.dtype}"
        if problem.head_dim % 8:
            return f"{name} takes head dimensions that are multiples of 8, not {problem.head_dim}"
        return None

    function, missing, failures = None, "", []
    for module in modules if device.type == "cuda" else ():  # importing it loads CUDA libraries
        try:
            function = importlib.import_module(module).flash_attn_func
            break
        except ModuleNotFoundError as error:
            absent = error.name or ""
            if module != absent and not module.startswith(f"{absent}."):
                failures.append(f"{module} needs {absent}, which is not installed")
        except Exception as error:
            failures.append(f"{module} cannot be imported: {type(error).__name__}: {error}")
    else:
        missing = "; ".join(failures) or "not installed"
    bind = functools.partial(_bind_flash_attention, function)
    how: dict[str, Any] = {"refusal": refusal, "refusal_phrases": _REFUSAL_PHRASES}
    return Provider(name, "peers", bind, "length first", missing=missing, **how)


def _bind_flash_attention(function: Any, problem: Problem) -> Attend:
    return functools.partial(output_alone(function), causal=problem.causal)


def output_alone(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """The function without what it returns besides the output: FlashAttention-4's log-sum-exp or None."""

    def attend(*tensors: Tensor, **arguments: Any) -> Tensor:
        result = function(*tensors, **arguments)
        return result[0] if isinstance(result, (tuple, list)) else result

    return attend


def _bind_flex(device: torch.device, problem: Problem) -> Attend:
    from torch.nn.attention.flex_attention import flex_attention

    # fullgraph: beyond its limit of recompilations torch.compile would run the function eagerly, which keeps every
    # score, and the time would still be reported as flex's.
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    mask = block_mask(lambda query, key: query >= key, problem.length, device) if problem.causal else None
    return functools.partial(compiled, block_mask=mask, enable_gqa=problem.heads != problem.kv_heads)


def block_mask(mask: Mask, length: int, device: torch.device, rows: int = 8192) -> Any:
    """FlexAttention's BlockMask of ``length`` queries and keys, for all heads and batch entries.

    It equals what `create_block_mask` makes, which for all pairs takes more than 32 GiB at length 65,536: it is called
    for ``rows`` queries at a time, a multiple of the block size.
    """
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    def strip(first: int) -> Any:
        def visible(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
            return mask(query + first, key)

        return create_block_mask(visible, None, None, min(rows, length - first), length, device=str(device))

    strips = [strip(first) for first in range(0, length, rows)]
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    lists: dict[str, Any] = {name: torch.cat([getattr(strip, name) for strip in strips], 2) for name in names}
    lists["mask_mod"] = lambda batch, head, query, key: mask(query, key)
    return BlockMask.from_kv_blocks(**lists, BLOCK_SIZE=strips[0].BLOCK_SIZE, seq_lengths=(length, length))
