"""Attention as nn.Modules: the settings at construction, the tensors at the call."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from .api import attention
from .choose import Implementation, parse
from .spec import check_spec


class Attention(nn.Module):
    """`attention` with its settings kept; it has no parameters.

    >>> attend = Attention(causal=True)
    >>> out = attend(q, k, v)

    Args:
        causal, scale, impl: as for `attention`.

    Raises:
        TypeError, ValueError: a setting is not one that `attention` takes.
    """

    def __init__(
        self, *, causal: bool | str = False, scale: float | None = None, impl: str | Implementation = "auto"
    ) -> None:
        super().__init__()
        check_spec(causal, scale, head_dim=1)
        parse(impl)
        self.causal = causal
        self.scale = scale
        self.impl = impl

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """out, or (out, lse), of q, k and v, shaped as `attention` takes them."""
        settings: dict[str, Any] = {"causal": self.causal, "scale": self.scale, "impl": self.impl}
        return attention(q, k, v, **settings, return_lse=return_lse)

    def extra_repr(self) -> str:
        """The settings, for printing."""
        impl = self.impl.value if isinstance(self.impl, Implementation) else self.impl
        return f"causal={self.causal!r}, scale={self.scale!r}, impl={impl!r}"


class _Fixed(Attention):
    """An `Attention` of one implementation."""

    implementation: ClassVar[Implementation]

    def __init__(self, *, causal: bool | str = False, scale: float | None = None) -> None:
        super().__init__(causal=causal, scale=scale, impl=self.implementation)


class NaiveAttention(_Fixed):
    """Every score in memory; the oracle. See `cs336_systems.attention.naive`."""

    implementation = Implementation.NAIVE


class CompiledAttention(_Fixed):
    """`NaiveAttention` through torch.compile."""

    implementation = Implementation.COMPILED


class TiledAttention(_Fixed):
    """FlashAttention-2 in plain PyTorch. See `cs336_systems.attention.tiled`."""

    implementation = Implementation.TILED


class FlashAttention(_Fixed):
    """FlashAttention-2 in Triton. See `cs336_systems.attention.flash`."""

    implementation = Implementation.FLASH


class SDPAAttention(_Fixed):
    """torch's own ``scaled_dot_product_attention``."""

    implementation = Implementation.SDPA
