"""Every check of a public argument. Messages name the argument, what was expected and what came."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.settings import Window
from .features import Features, assemble
from .sizes import Packed, Sizes
from .spec import AttentionSpec, check_spec, window_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Problem:
    """A validated call in metadata alone: all that choosing an implementation needs.

    ``batch`` are the leading sizes before the heads. ``q_heads`` and ``kv_heads`` are None for tensors without a head
    axis, which have at most one batch axis. ``extras`` are the tensors that the spec asks for.
    """

    spec: AttentionSpec
    batch: tuple[int, ...]
    q_heads: int | None
    kv_heads: int | None
    q_len: int
    k_len: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: torch.device
    return_lse: bool
    extras: tuple[Tensor, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute, or no key to compute it from."""
        return 0 in (*self.batch, self.q_heads, self.q_len, self.k_len)


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str,
    scale: float | None,
    return_lse: bool,
    window: Window | None = None,
    features: Features | None = None,
    deterministic: bool | None = None,
    packed: Packed | None = None,
) -> Problem:
    """Validate the arguments of an attention call; with ``packed``, of q (1, heads, all rows of q, d) and so on.

    Raises:
        TypeError: an argument has the wrong type, or a tensor a dtype that is not floating-point or not q's.
        ValueError: a shape, device or value does not fit.
    """
    check_tensors(q=q, k=k, v=v)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name} must have dtype {q.dtype} to match q; got {tensor.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on {q.device} to match q; got {tensor.device}")
    has_heads = q.ndim >= 4
    _check_shapes(q, k, v, has_heads)
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse must be a bool; got {return_lse!r}")
    if deterministic is not None and not isinstance(deterministic, bool):
        raise TypeError(f"deterministic must be a bool or None; got {deterministic!r}")
    spec = check_spec(causal, scale, q.shape[-1])
    batch, q_heads = tuple(q.shape[:-3] if has_heads else q.shape[:-2]), q.shape[-3] if has_heads else None
    if deterministic is None and q.device.type == "cuda":
        deterministic = torch.are_deterministic_algorithms_enabled()
    if window is not None or deterministic:
        spec = dataclasses.replace(spec, window=window_of(window), deterministic=bool(deterministic))
        spec = spec.within(q.shape[-2], k.shape[-2])
    extras: tuple[Tensor, ...] = ()
    if features is not None or packed is not None:
        sizes = Sizes(batch, q_heads, q.shape[-2], k.shape[-2])
        if packed is not None:
            sizes = Sizes((packed.q_starts.numel() - 1,), q_heads, packed.q_most or 1, packed.k_most or 1, packed)
            spec = dataclasses.replace(spec, packed=(packed.q_most, packed.k_most))
        made = assemble(features or Features(), sizes, spec.causal.value, spec.window, q.device)
        spec = dataclasses.replace(
            spec, mask=made.mask, scores=made.scores, sinks=made.sinks, dropout=made.dropout, blocks=made.blocks
        )
        extras = made.extras
    return Problem(
        spec=spec,
        batch=batch,
        q_heads=q_heads,
        kv_heads=k.shape[-3] if has_heads else None,
        q_len=q.shape[-2],
        k_len=k.shape[-2],
        head_dim=q.shape[-1],
        v_head_dim=v.shape[-1],
        dtype=q.dtype,
        device=q.device,
        return_lse=return_lse,
        extras=extras,
    )


def check_tensors(**tensors: Tensor) -> None:
    """Each must be a dense floating-point tensor of at least two dimensions."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor; got {type(tensor).__name__}")
        if tensor.dtype not in DTYPES:
            expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise TypeError(f"{name} must have a dtype of {expected}; got {tensor.dtype}")
        if tensor.is_nested or tensor.layout is not torch.strided:
            kind = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
            raise TypeError(f"{name} must be a dense (strided) tensor; got {kind}")
        if tensor.ndim < 2:
            raise ValueError(f"{name} must have at least 2 dimensions (length, head_dim); got {shape_of(tensor)}")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, has_heads: bool) -> None:
    if q.shape[-1] == 0:
        raise ValueError(f"q must have a head dimension of at least 1; got {shape_of(q)}")
    leading = q.shape[:-3] if has_heads else q.shape[:-2]
    if k.ndim != q.ndim or k.shape[: len(leading)] != leading or k.shape[-1] != q.shape[-1]:
        expected = _shape(*leading, *(["kv_heads"] if has_heads else []), "*", q.shape[-1])
        raise ValueError(f"k must have shape {expected} to match q; got {shape_of(k)}")
    if v.ndim != k.ndim or v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"v must have shape {_shape(*k.shape[:-1], '*')} to match k; got {shape_of(v)}")
    if v.shape[-1] == 0:
        raise ValueError(f"v must have a head dimension of at least 1; got {shape_of(v)}")
    if has_heads:
        q_heads, kv_heads = q.shape[-3], k.shape[-3]
        if (kv_heads == 0) != (q_heads == 0) or (kv_heads and q_heads % kv_heads):
            raise ValueError(f"k must have a number of heads that divides q's {q_heads}; got {kv_heads}")


def shape_of(tensor: Tensor) -> str:
    """A shape as messages write it: (2, 8, 128, 64)."""
    return _shape(*tensor.shape)


def _shape(*sizes: object) -> str:
    return f"({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"
