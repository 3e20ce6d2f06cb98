"""What the attention benchmark can be asked to sweep: the configuration, its presets, and the problems it comes to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cs336_systems.profiling.flops import PASSES, Pass, attention_flops

DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
MASKS = ("causal", "full")


@dataclass(frozen=True)
class Problem:
    """One cell of the sweep: the attention call that every implementation is given. `heads` is 0 for no head axis."""

    dtype: str
    mask: str
    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int

    @property
    def causal(self) -> bool:
        """Whether a query sees only the keys up to its own position."""
        return self.mask == "causal"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of q, k and v."""
        return DTYPES[self.dtype]

    @property
    def key(self) -> str:
        """The cell's name, which is unique in a sweep."""
        return f"{self.dtype} {self.mask} d {self.head_dim} length {self.length}"

    @property
    def shape(self) -> str:
        """The shape of q, for people."""
        heads = f"{self.heads}, " if self.heads else ""
        return f"({self.batch}, {heads}{self.length}, {self.head_dim})"

    def flops(self, which: Pass) -> float:
        """Operations of one call, by the convention of `attention_flops`."""
        return attention_flops(
            self.batch,
            max(1, self.heads),
            self.length,
            self.length,
            self.head_dim,
            causal=self.causal,
            which=which,
        )


@dataclass(frozen=True)
class SweepConfiguration:
    """Everything that decides what is measured. Exactly one of `batch` and `tokens`, and of `heads` and `channels`.

    `tokens` gives each length the batch of tokens / length, `channels` each head dimension channels / dimension heads;
    `heads` 0 means no head axis. `kv_heads` None means as many as heads. Raises ValueError for what cannot be swept.
    """

    preset: str
    lengths: tuple[int, ...]
    dims: tuple[int, ...]
    dtypes: tuple[str, ...]
    masks: tuple[str, ...]
    passes: tuple[Pass, ...] = PASSES
    implementations: tuple[str, ...] = ("all",)
    batch: int | None = None
    tokens: int | None = None
    heads: int | None = None
    channels: int | None = None
    kv_heads: int | None = None
    rounds: int = 5
    max_seconds: float = 1.0
    seed: int = 0
    tf32: bool = False

    def __post_init__(self) -> None:
        for name in ("lengths", "dims"):
            if not getattr(self, name) or any(value < 1 for value in getattr(self, name)):
                raise ValueError(f"{name} must be positive and at least one; got {getattr(self, name)}")
        for name, allowed in (("dtypes", DTYPES), ("masks", MASKS), ("passes", PASSES)):
            values = getattr(self, name)
            if not values or any(value not in allowed for value in values):
                raise ValueError(f"{name} must be taken from {', '.join(allowed)}; got {', '.join(values) or 'none'}")
        for name in ("lengths", "dims", "dtypes", "masks", "passes"):
            if len(set(getattr(self, name))) != len(getattr(self, name)):
                raise ValueError(f"{name} must not repeat a value; got {getattr(self, name)}")
        _require_one("batch", self.batch, "tokens", self.tokens)
        _require_one("heads", self.heads, "channels", self.channels)
        if (self.batch is not None and self.batch < 1) or (self.heads is not None and self.heads < 0):
            raise ValueError(f"batch must be at least 1 and heads at least 0; got {self.batch} and {self.heads}")
        if self.rounds < 1 or self.max_seconds <= 0:
            raise ValueError(f"rounds and max_seconds must be positive; got {self.rounds} and {self.max_seconds}")
        self.problems()

    def problems(self) -> list[Problem]:
        """The cells in the order of measurement: within a dtype, mask and dimension the lengths ascend."""
        return [
            self._problem(dtype, mask, head_dim, length)
            for dtype in self.dtypes
            for mask in self.masks
            for head_dim in self.dims
            for length in sorted(self.lengths)
        ]

    def _problem(self, dtype: str, mask: str, head_dim: int, length: int) -> Problem:
        batch = self.batch or _share("tokens", self.tokens, "length", length)
        heads = _share("channels", self.channels, "head dimension", head_dim) if self.heads is None else self.heads
        kv_heads = heads if self.kv_heads is None else self.kv_heads
        if kv_heads != heads and (kv_heads < 1 or heads < 1 or heads % kv_heads):
            raise ValueError(f"kv_heads must divide the {heads} heads; got {kv_heads}")
        return Problem(dtype, mask, batch, heads, kv_heads, length, head_dim)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SweepConfiguration:
        """The configuration that `as_dict` was taken of; keys of other things are left out."""
        names = {field.name for field in dataclasses.fields(cls)}
        fields: dict[str, Any] = {}
        for name in names & set(values):
            fields[name] = tuple(values[name]) if isinstance(values[name], list) else values[name]
        return cls(**fields)


def _require_one(first: str, first_value: int | None, second: str, second_value: int | None) -> None:
    if (first_value is None) == (second_value is None):
        raise ValueError(f"exactly one of {first} and {second} must be given; got {first_value} and {second_value}")


def _share(name: str, total: int | None, per: str, size: int) -> int:
    if total is None or total < size or total % size:
        raise ValueError(f"{name} ({total}) must be a multiple of every {per}; got {size}")
    return total // size


def _powers_of_two(first: int, last: int) -> tuple[int, ...]:
    return tuple(2**power for power in range(first.bit_length() - 1, last.bit_length()))


PRESETS: dict[str, SweepConfiguration] = {
    preset.preset: preset
    for preset in (
        SweepConfiguration(
            preset="cpu",
            lengths=(128, 256, 512, 1024),
            dims=(32, 64),
            dtypes=("float32",),
            masks=("causal",),
            batch=1,
            heads=4,
        ),
        SweepConfiguration(
            preset="quick",
            lengths=(512, 1024, 2048, 4096, 8192),
            dims=(64, 128),
            dtypes=("bfloat16",),
            masks=("causal",),
            tokens=16384,
            channels=2048,
        ),
        SweepConfiguration(
            preset="paper",
            lengths=_powers_of_two(512, 16384),
            dims=(64, 128, 256),
            dtypes=("bfloat16",),
            masks=("causal", "full"),
            passes=("forward", "backward"),
            tokens=16384,
            channels=2048,
        ),
        SweepConfiguration(
            preset="course",
            lengths=(256, 1024, 4096, 8192, 16384),
            dims=(16, 32, 64, 128),
            dtypes=("float32", "bfloat16"),
            masks=("full",),
            batch=8,
            heads=0,
        ),
        SweepConfiguration(
            preset="course-causal",
            lengths=_powers_of_two(128, 65536),
            dims=(16, 32, 64, 128),
            dtypes=("bfloat16", "float32"),
            masks=("causal",),
            batch=1,
            heads=0,
        ),
    )
}

PRESET_NOTES = {
    "cpu": "a small float32 sweep for a machine without a GPU; the default there",
    "quick": "bf16, causal, 16,384 tokens a batch, d 64 and 128; the default on a GPU",
    "paper": "the FlashAttention papers' sweep: 16,384 tokens, 2,048 channels, d 64 to 256, causal and full, bf16",
    "course": "CS336's sweep: batch 8, no head axis, d 16 to 128, length 256 to 16384, float32 and bf16",
    "course-causal": "CS336's second sweep: batch 1, no head axis, causal, length 128 to 65536, bf16 and float32",
}
