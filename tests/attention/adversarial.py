"""Calls whose numbers are hard on a softmax in tiles, and what is right for them.

What is right is what float64 gives from the same numbers, with scores beyond float32's range taken for infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cs336_systems.attention.mods import score_mod
from cs336_systems.testing import Inputs, Results, Shapes, make_inputs

from .helpers import BFLOAT, FLOAT, FLOATS

LARGEST = torch.finfo(FLOAT).max
D = 64 if torch.cuda.is_available() else 16
"""The kernels for Hopper take no heads of 16, which are quicker to interpret."""
SHAPES = Shapes.of(1, q_len=35, k_len=150, d=D, q_heads=2, kv_heads=1)
"""More than two tiles of keys, of which the last is not full."""
WIDE = (BFLOAT, FLOAT)
COLUMN = torch.arange(SHAPES.k[-2])
BOTH = {"full": False, "causal": True}


def within_float32(score, b, h, q_idx, kv_idx):
    return score + torch.where(score > LARGEST, math.inf, torch.where(score < -LARGEST, -math.inf, 0.0))


@dataclass(frozen=True)
class Case:
    """A call of `attention`; ``change`` makes its inputs of normal ones."""

    name: str
    change: Callable[[Inputs], Inputs] = lambda inputs: inputs
    causal: bool | str = False
    scale: float | None = None
    features: dict[str, Any] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = FLOATS
    shapes: Shapes = SHAPES

    @property
    def settings(self) -> dict[str, Any]:
        return {"causal": self.causal, "scale": self.scale}

    def inputs(self, dtype: torch.dtype, device: torch.device) -> Inputs:
        return self.change(make_inputs(self.shapes, dtype=dtype, device=device))

    def expected(self, make: Callable[..., Results], inputs: Inputs, return_lse: bool) -> Results:
        """Of `oracle` or `terms`."""
        features = {**self.features, "scores": score_mod(within_float32)}
        return make(inputs, **self.settings, features=features, return_lse=return_lse)


def ramp(keys: Tensor, factor: float = 100.0) -> Callable[[Inputs], Inputs]:
    """Scores of every row are raised by ``keys``, one number a key."""

    def change(inputs: Inputs) -> Inputs:
        q, k = inputs.q.clone(), inputs.k.clone()
        q[..., 0] = factor
        k[..., 0] = (keys * math.sqrt(D) / factor).to(k)
        return inputs._replace(q=q, k=k)

    return change


def times(**factors: float) -> Callable[[Inputs], Inputs]:
    """Tensors by name times a factor."""
    return lambda inputs: inputs._replace(**{name: getattr(inputs, name) * factor for name, factor in factors.items()})


def spot(value: float, name: str) -> Callable[[Inputs], Inputs]:
    """One element of a tensor, of the first head."""

    def change(inputs: Inputs) -> Inputs:
        x = getattr(inputs, name).clone()
        x[0, 0, 70 if name in "kv" and not math.isfinite(value) else 17, 3] = value
        return inputs._replace(**{name: x})

    return change


def overflowing(sign: float, keys: Tensor) -> Callable[[Inputs], Inputs]:
    """The scores of these keys overflow under a scale of 1e30, the others are 0."""

    def change(inputs: Inputs) -> Inputs:
        q, k = torch.zeros_like(inputs.q), torch.zeros_like(inputs.k)
        q[..., 0] = 3e4
        k[..., keys.to(k.device), 0] = sign * 3e4
        return inputs._replace(q=q, k=k)

    return change


def ties(inputs: Inputs) -> Inputs:
    return inputs._replace(k=inputs.k[..., :1, :].expand_as(inputs.k).contiguous())


def nearly_the_largest(inputs: Inputs) -> Inputs:
    """Values whose sum over all keys is near the dtype's largest; gradients are small, so that theirs are within it."""
    largest = torch.finfo(inputs.v.dtype).max / inputs.v.shape[-2]
    return inputs._replace(v=inputs.v.clamp(-2, 2) * (largest / 2), dout=inputs.dout / largest)


def beyond_sums(inputs: Inputs) -> Inputs:
    """Values whose sum over all keys is beyond float32's range, though no weighted mean of them is."""
    return inputs._replace(v=inputs.v.clamp(-2, 2) * (LARGEST / 4), dout=inputs.dout / LARGEST * 4)


def denormal(names: str) -> Callable[[Inputs], Inputs]:
    return lambda inputs: times(**dict.fromkeys(names, torch.finfo(inputs.q.dtype).smallest_normal / 8))(inputs)


def entries_of_different_sizes(inputs: Inputs) -> Inputs:
    """Each entry of the batch 1000 times the one before."""
    factors = torch.tensor([1.0, 1e3], device=inputs.q.device)[:, None, None, None]
    return inputs._replace(v=inputs.v * factors, dout=inputs.dout * factors.flip(0))


def rows_of_different_sizes(inputs: Inputs) -> Inputs:
    """From 1 to 1e-6 along the length."""
    factors = torch.logspace(0, -6, inputs.q.shape[-2], device=inputs.q.device)[:, None]
    return inputs._replace(q=inputs.q * factors, dout=inputs.dout * factors)


def softmaxes() -> Iterator[Case]:
    """Maxima that move, overflow, and are NaN."""
    for mask, causal in BOTH.items():
        for name, keys in {
            "late": torch.where(COLUMN < 100, -1e4, 0.0),
            "early": torch.where(COLUMN < 70, 0.0, -1e4),
            "rising": 50.0 * (COLUMN // 16),
            "falling": -50.0 * (COLUMN // 16),
            "last_key": torch.where(COLUMN == 149, 1e4, 0.0),
            "first_key": torch.where(COLUMN == 0, 1e4, 0.0),
            "one_in_the_middle": torch.where(COLUMN == 70, 60.0, 0.0),
        }.items():
            yield Case(f"pivot-{name}-{mask}", ramp(keys), causal)
        for name, sign, seen in (
            ("first_tiles_minus", -1.0, COLUMN < 100),
            ("last_tiles_minus", -1.0, COLUMN >= 64),
            ("all_minus", -1.0, COLUMN >= 0),
            ("one_plus", 1.0, COLUMN == 70),
            ("first_tiles_plus", 1.0, COLUMN < 100),
            ("all_plus", 1.0, COLUMN >= 0),
        ):
            yield Case(f"overflow-{name}-{mask}", overflowing(sign, seen), causal, 1e30)
        for name in ("q", "k", "v", "dout"):
            yield Case(f"nan-{name}-{mask}", spot(math.nan, name), causal)
    for name in ("q", "k", "v", "dout"):
        yield Case(f"inf-{name}", spot(math.inf, name))
    for factor in (1e2, 1e3):
        yield Case(f"large-{factor:g}", times(q=factor, k=factor / 10))
    yield Case("sharp-1e7", times(q=1e10, k=1e7 / 1e10), dtypes=WIDE)


def magnitudes() -> Iterator[Case]:
    yield Case("ties", ties)
    yield Case("ties-large", lambda inputs: times(q=100.0)(ties(inputs)))
    for mask, causal in BOTH.items():
        yield Case(f"large_v-{mask}", nearly_the_largest, causal)
        yield Case(f"beyond_sums-{mask}", beyond_sums, causal, dtypes=(FLOAT,))
    for names in ("q", "k", "v", "qkv"):
        yield Case(f"denormal-{names}", denormal(names))
    for name, value in (("q", 1e8), ("k", 1e8), ("v", 1e8), ("dout", 1e6), ("dout", 1e12)):
        yield Case(f"outlier-{name}-{value:g}", spot(value, name), dtypes=WIDE)
    for name in ("q", "k", "v", "dout"):
        yield Case(f"outlier-{name}", spot(1e4, name))
    for cap in (1e-3, 0.5, 30.0, 1e3, 1e4, 1e6, 1e10, 1e20, 1e30):
        for factor in (1.0, 30.0):
            yield Case(f"softcap-{cap:g}-{factor:g}", times(q=factor), features={"softcap": cap})
    yield Case("softcap-1e4-causal", times(q=30.0), True, features={"softcap": 1e4})
    for scale in (1e-30, 1e-10, 1e-4, 10.0, 1e4, 1e10, 1e30, 0.0, -10.0, -1e10):
        # Gradients so large are beyond float16, or not, by the last digits of their terms.
        dtypes = FLOATS if abs(scale) < 1e10 else WIDE
        for mask, causal in BOTH.items():
            yield Case(f"scale-{scale:g}-{mask}", causal=causal, scale=scale, dtypes=dtypes)


def of_float32() -> Iterator[Case]:
    """Magnitudes beyond those of float16."""
    changes = {f"{factor:g}": times(q=factor, k=factor, v=factor) for factor in (1e4, 1e3, 1e2, 1e-4, 1e-20)}
    changes |= {
        "large_queries": times(q=1e10, k=1e-10),
        "large_gradients": times(dout=1e6, dlse=1e5),
        "small_gradients": times(dout=1e-12, dlse=1e-12),
        **{f"zero_{name}": times(**{name: 0.0}) for name in ("q", "k", "v", "dout")},
        "zero_gradients": times(dout=0.0, dlse=0.0),
        "all_zero": times(q=0.0, k=0.0, v=0.0),
        "rows": rows_of_different_sizes,
    }
    for name, change in changes.items():
        yield Case(f"magnitude-{name}", change, True, dtypes=(FLOAT,))
    shapes = Shapes.of(2, q_len=35, k_len=150, d=D, q_heads=2, kv_heads=1)
    yield Case("magnitude-entries", entries_of_different_sizes, True, dtypes=(FLOAT,), shapes=shapes)


def positions() -> Iterator[Case]:
    for size in (1, 16, 17, 64, 65, 128, 129, 257):
        for other, causal in ((40, "top_left"), (40, "bottom_right"), (size, True)):
            for q_len, k_len in {(size, other), (other, size)}:
                shapes = Shapes.of(1, q_len=q_len, k_len=k_len, d=D, q_heads=2, kv_heads=1)
                yield Case(f"lengths-{q_len}x{k_len}-{causal}", causal=causal, shapes=shapes)
    shapes = Shapes.of(1, q_len=130, k_len=150, d=D, q_heads=2, kv_heads=1)
    for size in (0, 1, 16, 64, 149, 150, 2**31 - 1, 2**40, 2**62):
        for window in dict.fromkeys([(size, 0), (size, None), (None, size), (size, size)]):
            yield Case(f"window-{window[0]}-{window[1]}", features={"window": window}, shapes=shapes)
        yield Case(f"window-{size}-causal", causal=True, features={"window": (size, None)}, shapes=shapes)


CASES = [*softmaxes(), *magnitudes(), *of_float32(), *positions()]
