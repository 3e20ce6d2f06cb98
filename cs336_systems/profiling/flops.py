"""Floating-point operations counted from shapes, and the rates that devices can reach.

Counts follow the convention of the FlashAttention papers, so that figures can be compared with published ones: only
the two matrix products of attention are counted, a causal mask halves them, and the backward pass, which recomputes
the scores, counts as five products where the forward counts two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Pass = Literal["forward", "backward", "both"]
"""Which part of a training step: the forward pass, the backward pass, or one after the other."""

PASSES: tuple[Pass, ...] = ("forward", "backward", "both")

_PASS_FACTOR: dict[Pass, float] = {"forward": 1.0, "backward": 2.5, "both": 3.5}


def attention_flops(
    batch: int,
    heads: int,
    query_length: int,
    key_length: int,
    head_dim: int,
    *,
    value_dim: int | None = None,
    causal: bool = False,
    which: Pass = "forward",
) -> float:
    """Operations of one attention call: 4·batch·heads·query_length·key_length·head_dim forward, half of it when causal.

    `heads` counts query heads; grouped key heads do not change the count. `value_dim` is the width of the values where
    it differs from `head_dim`. The backward pass counts 2.5 times the forward, both together 3.5 times.

    Raises ValueError when a size is negative or `which` is not a pass.
    """
    sizes = {
        "batch": batch,
        "heads": heads,
        "query_length": query_length,
        "key_length": key_length,
        "head_dim": head_dim,
        "value_dim": head_dim if value_dim is None else value_dim,
    }
    for name, size in sizes.items():
        if size < 0:
            raise ValueError(f"{name} must not be negative; got {size}")
    if which not in _PASS_FACTOR:
        raise ValueError(f"which must be one of {', '.join(PASSES)}; got {which!r}")
    pairs = batch * heads * query_length * key_length
    visible = 0.5 if causal else 1.0
    return 2.0 * pairs * (head_dim + sizes["value_dim"]) * visible * _PASS_FACTOR[which]


def attention_bytes(
    batch: int,
    heads: int,
    query_length: int,
    key_length: int,
    head_dim: int,
    kv_heads: int,
    itemsize: int,
    which: Pass = "forward",
) -> int:
    """Bytes of memory that one attention call has to move at the least, if nothing of it is kept on the chip.

    The forward pass reads q, k and v and writes the output; the backward pass reads these and the output's gradient,
    and writes three gradients. A number for each query, the log-sum-exp, is left out. `itemsize` is in bytes.

    Raises ValueError when `which` is not a pass.
    """
    if which not in _PASS_FACTOR:
        raise ValueError(f"which must be one of {', '.join(PASSES)}; got {which!r}")
    q, k = heads * query_length, kv_heads * key_length
    moved = {"forward": 2 * q + 2 * k, "backward": 4 * q + 4 * k}
    rows = sum(moved.values()) if which == "both" else moved[which]
    return batch * head_dim * itemsize * rows


def teraflops_per_second(flops: float, milliseconds: float) -> float:
    """The rate in TFLOP/s of `flops` operations in `milliseconds`. Raises ValueError unless the time is positive."""
    if milliseconds <= 0:
        raise ValueError(f"milliseconds must be positive; got {milliseconds}")
    return flops / milliseconds * 1e-9


@dataclass(frozen=True)
class DevicePeak:
    """Vendor's dense peak rates of one device in TFLOP/s: 16-bit and TF32 on its matrix units, and plain float32.

    The bandwidth is that of its memory, in GB/s.
    """

    half: float
    tf32: float
    float32: float
    bandwidth: float

    def of(self, dtype: str, *, tf32: bool) -> float | None:
        """The peak for a dtype by name (`bfloat16`, `float16`, `float32`); None for any other dtype."""
        if dtype in ("bfloat16", "float16"):
            return self.half
        if dtype == "float32":
            return self.tf32 if tf32 else self.float32
        return None


# The first entry whose words all occur in the device's name is taken, so the narrower names come first.
_PEAKS: tuple[tuple[tuple[str, ...], DevicePeak], ...] = (
    (("H200", "NVL"), DevicePeak(half=835.5, tf32=417.5, float32=60.0, bandwidth=4800)),
    (("H200",), DevicePeak(half=989.5, tf32=494.5, float32=67.0, bandwidth=4800)),
    (("H100", "NVL"), DevicePeak(half=835.5, tf32=417.5, float32=60.0, bandwidth=3900)),
    (("H100", "PCIe"), DevicePeak(half=756.5, tf32=378.0, float32=51.0, bandwidth=2000)),
    (("H100",), DevicePeak(half=989.5, tf32=494.5, float32=67.0, bandwidth=3350)),
    (("A100", "80GB", "PCIe"), DevicePeak(half=312.0, tf32=156.0, float32=19.5, bandwidth=1935)),
    (("A100", "80GB"), DevicePeak(half=312.0, tf32=156.0, float32=19.5, bandwidth=2039)),
    (("A100",), DevicePeak(half=312.0, tf32=156.0, float32=19.5, bandwidth=1555)),
)


def device_peak(device_name: str) -> DevicePeak | None:
    """The vendor's peak rates of a device by its name, or None for a device that is not in the table."""
    for words, peak in _PEAKS:
        if all(word in device_name for word in words):
            return peak
    return None


def implausible_rate(rate: float, device_name: str, dtype: str, *, tf32: bool) -> str | None:
    """A sentence when `rate` (TFLOP/s) is above the device's peak for the dtype; None when it is not, or none is known.

    Such a rate means that the time is wrong, that something else was computed, or that the arithmetic was not what the
    dtype says. Float32 products made of several products of narrower numbers pass the plain float32 peak honestly.
    """
    peak = device_peak(device_name)
    limit = None if peak is None else peak.of(dtype, tf32=tf32)
    if limit is None or rate <= limit:
        return None
    arithmetic = f"{dtype} with TF32" if dtype == "float32" and tf32 else dtype
    sentence = f"{rate:.0f} TFLOP/s is above the {limit:.0f} TFLOP/s that {device_name} can reach in {arithmetic}"
    if dtype == "float32" and not tf32:
        sentence += " outside its matrix units: the products ran on these, in narrower numbers, one or several for each"
    return sentence


@dataclass(frozen=True)
class AttentionParts:
    """Operations of the parts of attention, where each part is computed for every pair of a query and a key."""

    scores: float
    mask: float
    softmax: float
    values: float

    @property
    def softmax_over_products(self) -> float:
        """The softmax's operations over those of the two products; NaN where there are none."""
        products = self.scores + self.values
        return self.softmax / products if products else float("nan")


def attention_parts_flops(
    batch: int, heads: int, query_length: int, key_length: int, head_dim: int, *, which: Pass = "forward"
) -> AttentionParts:
    """What naive attention computes, part by part, for n = batch·heads·query_length·key_length pairs.

    Forward: each product is 2·n·head_dim; a mask chooses once a pair: n; softmax takes five operations a pair: the
    maximum, the difference to it, the exponential, the sum and the quotient: 5·n. Backward: each product has two for
    its gradients, 4·n·head_dim; the mask chooses again: n; the softmax's gradient P ⊙ (dP − sum(P ⊙ dP)) takes four: a
    product, the sum, a difference and a product: 4·n. A causal mask halves nothing, since naive attention computes the
    pairs that it hides, and scaling the scores does not count.

    Raises ValueError when a size is negative or `which` is not a pass.
    """
    products = attention_flops(batch, heads, query_length, key_length, head_dim) / 2
    if which not in _PASS_FACTOR:
        raise ValueError(f"which must be one of {', '.join(PASSES)}; got {which!r}")
    pairs = float(batch * heads * query_length * key_length)
    forward, backward = (float(which in (name, "both")) for name in ("forward", "backward"))
    product = products * (forward + 2 * backward)
    return AttentionParts(
        scores=product, mask=pairs * (forward + backward), softmax=pairs * (5 * forward + 4 * backward), values=product
    )
