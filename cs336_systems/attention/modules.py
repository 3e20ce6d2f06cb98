"""Attention as nn.Modules: the settings at construction, the tensors at the call."""

from __future__ import annotations

from typing import ClassVar, TypedDict

from torch import Tensor, nn
from typing_extensions import Never, Unpack

from .api import TensorOptions, attention
from .hints import refuse_unknown
from .validation import (
    Implementation,
    Window,
    check_causal,
    check_scale,
    check_window,
    parse_implementation,
    positive,
    probability,
)


class ModuleOptions(TypedDict, total=False):
    """The keyword arguments of `Attention`, but for ``impl``."""

    causal: bool | str
    window: Window | None
    scale: float | None
    softcap: float | None
    dropout_p: float
    deterministic: bool | None


class Attention(nn.Module):
    """`attention` with its settings kept; it has no parameters.

    >>> attend = Attention(causal=True, window=(1024, None))
    >>> out = attend(q, k, v, sinks=self.sinks)

    Args:
        causal, window, scale, softcap, deterministic, impl: as for `attention`.
        dropout_p: the probability that a weight is dropped in training mode; in evaluation mode none is.

    Raises:
        TypeError, ValueError: a setting is not one that `attention` takes.
    """

    def __init__(
        self,
        *,
        causal: bool | str = False,
        window: Window | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        dropout_p: float = 0.0,
        deterministic: bool | None = None,
        impl: str | Implementation = "auto",
        **unknown: Never,
    ) -> None:
        if unknown:
            refuse_unknown(unknown, ModuleOptions.__annotations__)
        super().__init__()
        check_causal(causal)
        check_scale(scale)
        check_window(window)
        positive("softcap", softcap)
        probability(dropout_p)
        parse_implementation(impl)
        self.causal = causal
        self.window = window
        self.scale = scale
        self.softcap = softcap
        self.dropout_p = dropout_p
        self.deterministic = deterministic
        self.impl = impl

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **tensors: Unpack[TensorOptions]
    ) -> Tensor | tuple[Tensor, Tensor]:
        """out, or (out, lse), of q, k and v, shaped as `attention` takes them.

        ``tensors`` are its arguments that are tensors or hold some: mask, bias, alibi_slopes, scores, sinks,
        seed and generator.
        """
        return attention(
            q,
            k,
            v,
            causal=self.causal,
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
            dropout_p=self.dropout_p if self.training else 0.0,
            deterministic=self.deterministic,
            impl=self.impl,
            return_lse=return_lse,
            **tensors,
        )

    def extra_repr(self) -> str:
        """The settings, for printing."""
        impl = self.impl.value if isinstance(self.impl, Implementation) else self.impl
        settings: dict[str, object] = {"causal": self.causal, "scale": self.scale, "impl": impl}
        others = {"window": self.window, "softcap": self.softcap, "deterministic": self.deterministic}
        settings |= {name: value for name, value in others.items() if value is not None}
        if self.dropout_p:
            settings["dropout_p"] = self.dropout_p
        return ", ".join(f"{name}={value!r}" for name, value in settings.items())


class _Fixed(Attention):
    """An `Attention` of one implementation."""

    implementation: ClassVar[Implementation]

    def __init__(self, **options: Unpack[ModuleOptions]) -> None:
        super().__init__(**options, impl=self.implementation)


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
    """FlashAttention-2 in Triton. See `cs336_systems.attention.functions`."""

    implementation = Implementation.FLASH


class SDPAAttention(_Fixed):
    """torch's own ``scaled_dot_product_attention``."""

    implementation = Implementation.SDPA
