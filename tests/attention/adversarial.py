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

from cs336_systems.attention.rules import score_rule
from cs336_systems.kernels.language import tl
from cs336_systems.testing import Inputs, Results, Shapes, make_inputs

LARGEST = torch.finfo(torch.float32).max
D = 64 if torch.cuda.is_available() else 16
"""The kernels for Hopper take no heads of 16, which are quicker to interpret."""
SHAPES = Shapes.of(1, q_len=35, k_len=150, d=D, q_heads=2, kv_heads=1)
"""More than two tiles of keys, of which the last is not full."""
FLOAT32 = (torch.float32,)
WIDE = (torch.bfloat16, torch.float32)
ALL = (torch.float16, torch.bfloat16, torch.float32)


@score_rule
def within_float32(score, batch, head, row, column, largest):
    return score + tl.where(score > largest, float("inf"), tl.where(score < -largest, float("-inf"), 0.0))


@dataclass(frozen=True)
class Case:
    """A call of `attention`; ``change`` makes its inputs of normal ones."""

    name: str
    change: Callable[[Inputs], Inputs] = lambda inputs: inputs
    causal: bool | str = False
    scale: float | None = None
    features: dict[str, Any] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = ALL
    shapes: Shapes = SHAPES

    @property
    def settings(self) -> dict[str, Any]:
        return {"causal": self.causal, "scale": self.scale}

    def inputs(self, dtype: torch.dtype, device: torch.device) -> Inputs:
        return self.change(make_inputs(self.shapes, dtype=dtype, device=device))

    def expected(self, make: Callable[..., Results], inputs: Inputs, return_lse: bool) -> Results:
        """Of `oracle` or `terms`."""
        features = {**self.features, "scores": within_float32(LARGEST)}
        return make(inputs, **self.settings, features=features, return_lse=return_lse)


def ramp(keys: Tensor, factor: float = 100.0) -> Callable[[Inputs], Inputs]:
    """Scores of every row are raised by ``keys``, one number a key."""

    def change(inputs: Inputs) -> Inputs:
        q, k = inputs.q.clone(), inputs.k.clone()
        q[..., 0] = factor
        k[..., 0] = (keys * math.sqrt(D) / factor).to(k)
        return inputs._replace(q=q, k=k)

    return change


COLUMN = torch.arange(SHAPES.k[-2])


def times(**factors: float) -> Callable[[Inputs], Inputs]:
    """Tensors by name times a factor."""
    return lambda inputs: inputs._replace(**{name: getattr(inputs, name) * factor for name, factor in factors.items()})


def spot(value: float, **places: tuple[int, int]) -> Callable[[Inputs], Inputs]:
    """One element of a tensor, of the first head, by its row and column."""

    def change(inputs: Inputs) -> Inputs:
        changed = {}
        for name, (row, column) in places.items():
            changed[name] = getattr(inputs, name).clone()
            changed[name][0, 0, row, column] = value
        return inputs._replace(**changed)

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
    v, dout = inputs.v.clamp(-2, 2) * (LARGEST / 4), inputs.dout / LARGEST * 4
    return inputs._replace(v=v, dout=dout)


def denormal(*names: str) -> Callable[[Inputs], Inputs]:
    def change(inputs: Inputs) -> Inputs:
        smallest = torch.finfo(inputs.q.dtype).smallest_normal
        return inputs._replace(**{name: (getattr(inputs, name) * (smallest / 8)) for name in names})

    return change


def pivots() -> Iterator[Case]:
    for name, keys in {
        "late": torch.where(COLUMN < 100, -1e4, 0.0),
        "early": torch.where(COLUMN < 70, 0.0, -1e4),
        "rising": 50.0 * (COLUMN // 16),
        "falling": -50.0 * (COLUMN // 16),
        "last_key": torch.where(COLUMN == 149, 1e4, 0.0),
        "first_key": torch.where(COLUMN == 0, 1e4, 0.0),
        "one_in_the_middle": torch.where(COLUMN == 70, 60.0, 0.0),
    }.items():
        for causal in (False, True):
            yield Case(f"pivot-{name}-{'causal' if causal else 'full'}", ramp(keys), causal)
    for factor in (1e2, 1e3):
        yield Case(f"large-{factor:g}", times(q=factor, k=factor / 10))
    yield Case("sharp-1e7", times(q=1e10, k=1e7 / 1e10), dtypes=WIDE)


def infinite() -> Iterator[Case]:
    first, last, all_ = COLUMN < 100, COLUMN >= 64, COLUMN >= 0
    for name, sign, keys in (
        ("first_tiles_minus", -1.0, first),
        ("last_tiles_minus", -1.0, last),
        ("all_minus", -1.0, all_),
        ("one_plus", 1.0, COLUMN == 70),
        ("first_tiles_plus", 1.0, first),
        ("all_plus", 1.0, all_),
    ):
        for causal in (False, True):
            yield Case(f"overflow-{name}-{'causal' if causal else 'full'}", overflowing(sign, keys), causal, 1e30)


def not_a_number() -> Iterator[Case]:
    for causal in (False, True):
        for name, place in {"q": (17, 3), "k": (70, 3), "v": (70, 3), "dout": (17, 3)}.items():
            mask = "causal" if causal else "full"
            yield Case(f"nan-{name}-{mask}", spot(math.nan, **{name: place}), causal)
    for name, place in {"q": (17, 3), "k": (70, 3), "v": (70, 3), "dout": (17, 3)}.items():
        yield Case(f"inf-{name}", spot(math.inf, **{name: place}))


def magnitudes() -> Iterator[Case]:
    yield Case("ties", ties)
    yield Case("ties-large", lambda inputs: times(q=100.0)(ties(inputs)))
    yield Case("large_v", nearly_the_largest)
    yield Case("large_v-causal", nearly_the_largest, True)
    for causal in (False, True):
        yield Case(f"beyond_sums-{'causal' if causal else 'full'}", beyond_sums, causal, dtypes=FLOAT32)
    for names in ("q", "k", "v", "qkv"):
        yield Case(f"denormal-{names}", denormal(*names))
    for name, value in (("q", 1e4), ("k", 1e4), ("v", 1e4), ("dout", 1e4)):
        yield Case(f"outlier-{name}", spot(value, **{name: (17, 3)}))
    for name, value in (("q", 1e8), ("k", 1e8), ("v", 1e8), ("dout", 1e6), ("dout", 1e12)):
        yield Case(f"outlier-{name}-{value:g}", spot(value, **{name: (17, 3)}), dtypes=WIDE)
    for cap in (1e-3, 0.5, 30.0, 1e3, 1e4, 1e6, 1e10, 1e20, 1e30):
        for factor in (1.0, 30.0):
            yield Case(f"softcap-{cap:g}-{factor:g}", times(q=factor), features={"softcap": cap})
    yield Case("softcap-1e4-causal", times(q=30.0), True, features={"softcap": 1e4})
    for scale in (1e-30, 1e-10, 1e-4, 10.0, 1e4, 1e10, 1e30, 0.0, -10.0, -1e10):
        # Gradients so large are beyond float16, or not, by the last digits of their terms.
        dtypes = ALL if abs(scale) < 1e10 else WIDE
        for causal in (False, True):
            yield Case(f"scale-{scale:g}-{'causal' if causal else 'full'}", causal=causal, scale=scale, dtypes=dtypes)


def lengths() -> Iterator[Case]:
    for size in (1, 16, 17, 64, 65, 128, 129, 257):
        for other, causal in ((40, "top_left"), (40, "bottom_right"), (size, True)):
            for q_len, k_len in {(size, other), (other, size)}:
                shapes = Shapes.of(1, q_len=q_len, k_len=k_len, d=D, q_heads=2, kv_heads=1)
                yield Case(f"lengths-{q_len}x{k_len}-{causal}", causal=causal, shapes=shapes)


def windows() -> Iterator[Case]:
    shapes = Shapes.of(1, q_len=130, k_len=150, d=D, q_heads=2, kv_heads=1)
    for size in (0, 1, 16, 149, 150, 2**31 - 1, 2**40, 2**62):
        for window in dict.fromkeys([(size, 0), (size, None), (None, size), (size, size)]):
            yield Case(f"window-{window[0]}-{window[1]}", features={"window": window}, shapes=shapes)
    for size in (0, 64, 2**31 - 1, 2**62):
        yield Case(f"window-{size}-causal", causal=True, features={"window": (size, None)}, shapes=shapes)


CASES = [*pivots(), *infinite(), *not_a_number(), *magnitudes(), *lengths(), *windows()]
