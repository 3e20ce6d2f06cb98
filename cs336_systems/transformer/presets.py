"""Named model sizes. The same name means different sizes in different years, so a name belongs to a suite."""

from __future__ import annotations

from typing import Any, NamedTuple

from .config import TransformerConfig


class Sizes(NamedTuple):
    """The sizes that differ between presets; see `TransformerConfig`."""

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int


_SHARED = {
    "small": Sizes(768, 3072, 12, 12),
    "medium": Sizes(1024, 4096, 24, 16),
    "large": Sizes(1280, 5120, 36, 20),
    "wide": Sizes(3200, 25600, 8, 4),
}
_BILLIONS_2_7 = Sizes(2560, 10240, 32, 32)

PRESETS: dict[str, dict[str, Sizes]] = {
    "2025": {**_SHARED, "xl": Sizes(1600, 6400, 48, 25), "2.7B": _BILLIONS_2_7},
    "2026": {**_SHARED, "xl": _BILLIONS_2_7, "8B": Sizes(4096, 11008, 34, 32), "10B": Sizes(4608, 12288, 50, 36)},
}
"""Sizes by suite and name. 8B is the leaderboard's, whose vocabulary has 151,936 tokens."""

VOCAB_SIZE = 10_000
CONTEXT_LENGTH = 1024


def preset(name: str, suite: str = "2025", **changes: Any) -> TransformerConfig:
    """The config of a preset: a vocabulary of 10,000, a context of 1,024, an untied head, and the sizes of the name.

    >>> preset("xl", context_length=256).parameters()
    1998235200

    ``changes`` are attributes of `TransformerConfig`. Raises ValueError if the suite does not exist, or has no such
    name, and what `TransformerConfig` raises.
    """
    if suite not in PRESETS:
        raise ValueError(f"suite must be one of {', '.join(map(repr, PRESETS))}; got {suite!r}")
    if name not in PRESETS[suite]:
        expected = ", ".join(map(repr, PRESETS[suite]))
        raise ValueError(f"name must be one of {expected} in the suite {suite!r}; got {name!r}")
    settings: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "context_length": CONTEXT_LENGTH}
    return TransformerConfig(**settings | PRESETS[suite][name]._asdict() | changes)
