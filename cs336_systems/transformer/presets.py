"""Sizes with names. The same name has meant different sizes in different years, so a name belongs to a suite."""

from __future__ import annotations

from typing import Any, NamedTuple

from .config import TransformerConfig


class Sizes(NamedTuple):
    """What sets a preset apart from the others."""

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int


_IN_EVERY_SUITE = {
    "small": Sizes(768, 3072, 12, 12),
    "medium": Sizes(1024, 4096, 24, 16),
    "large": Sizes(1280, 5120, 36, 20),
    "wide": Sizes(3200, 25600, 8, 4),
}
_BILLIONS_2_7 = Sizes(2560, 10240, 32, 32)

PRESETS: dict[str, dict[str, Sizes]] = {
    "2025": {**_IN_EVERY_SUITE, "xl": Sizes(1600, 6400, 48, 25), "2.7B": _BILLIONS_2_7},
    "2026": {**_IN_EVERY_SUITE, "xl": _BILLIONS_2_7, "10B": Sizes(4608, 12288, 50, 36)},
}
"""By suite and name."""

VOCAB_SIZE = 10_000
CONTEXT_LENGTH = 1024


def preset(name: str, suite: str = "2025", **changes: Any) -> TransformerConfig:
    """The config of a preset: 10,000 tokens, a context of 1,024, an untied head, and the sizes of its name.

    >>> preset("xl", context_length=256).parameters()
    1998235200

    Args:
        name: of `PRESETS`.
        suite: "2025" or "2026"; "xl" is another model in each.
        changes: attributes of `TransformerConfig` that are to be others.

    Raises:
        ValueError: there is no such suite, or no such name in it.
        TypeError, ValueError: a change is not one that `TransformerConfig` takes.
    """
    if suite not in PRESETS:
        raise ValueError(f"suite must be one of {', '.join(map(repr, PRESETS))}; got {suite!r}")
    if name not in PRESETS[suite]:
        expected = ", ".join(map(repr, PRESETS[suite]))
        raise ValueError(f"name must be one of {expected} in the suite {suite!r}; got {name!r}")
    settings: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "context_length": CONTEXT_LENGTH}
    return TransformerConfig(**settings | PRESETS[suite][name]._asdict() | changes)
