"""FLOP counts, bytes and peak rates: what attention computes, moves and saves by formula, and what GPUs reach.

`torch.utils.flop_counter.FlopCounterMode` counts the FLOPs of a whole model. Custom kernels, such as this library's
attention, count 0 there: count the model with ``impl="naive"`` or ``"sdpa"``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Pass = Literal["forward", "backward", "both"]
"""The forward pass, the backward pass, or both together."""

_PRODUCTS: dict[Pass, tuple[int, int]] = {"forward": (1, 1), "backward": (3, 2), "both": (4, 3)}
"""How many products of a pass have the columns of q and k, and how many those of v."""

PASSES: tuple[Pass, ...] = tuple(_PRODUCTS)


def attention_flops(
    batch: int,
    heads: int,
    query_length: int,
    key_length: int,
    head_dim: int,
    *,
    v_head_dim: int | None = None,
    causal: bool = False,
    which: Pass = "forward",
) -> float:
    """FLOPs of attention: 4 · batch · heads · query_length · key_length · head_dim forward, half of it if causal.

    As in the FlashAttention papers, the backward, which recomputes the scores, has five products to the forward's two.
    Where v has ``v_head_dim`` columns, so have one of the forward's products and two of the backward's. ``heads`` are
    query heads.

    Raises ValueError if ``which`` is unknown.
    """
    _check_pass(which)
    pairs = batch * heads * query_length * key_length * (0.5 if causal else 1.0)
    wide, narrow = _PRODUCTS[which]
    return 2.0 * pairs * (wide * head_dim + narrow * (v_head_dim or head_dim))


def attention_bytes(
    batch: int,
    heads: int,
    query_length: int,
    key_length: int,
    head_dim: int,
    kv_heads: int,
    itemsize: int,
    which: Pass = "forward",
    v_head_dim: int | None = None,
) -> int:
    """The least bytes that attention reads and writes in device memory, the log-sum-exp left out.

    The forward reads q, k and v and writes the output; the backward reads these and the output's gradient, and writes
    three gradients. ``itemsize`` is in bytes.

    Raises ValueError if ``which`` is unknown.
    """
    _check_pass(which)
    rows = heads * query_length + kv_heads * key_length
    times = {"forward": 1, "backward": 2, "both": 3}[which]
    return batch * (head_dim + (v_head_dim or head_dim)) * itemsize * rows * times


def _check_pass(which: str) -> None:
    if which not in PASSES:
        raise ValueError(f"which must be one of {', '.join(PASSES)}; got {which!r}")


def naive_attention_flops(
    batch: int, heads: int, query_length: int, key_length: int, head_dim: int, *, which: Pass = "forward"
) -> dict[str, float]:
    """FLOPs of the scores, mask, softmax and values of naive attention, for n query-key pairs, masked ones included.

    Forward: 2 n head_dim for each product; n for the mask; 5 n for the softmax (maximum, difference, exponential, sum,
    quotient). Backward: 4 n head_dim for each product, which has two gradients; n for the mask; 4 n for the softmax's
    gradient P ⊙ (dP − rowsum(P ⊙ dP)). The scale of the scores does not count.

    Raises ValueError if ``which`` is unknown.
    """
    _check_pass(which)
    forward, backward = which != "backward", which != "forward"
    product = attention_flops(batch, heads, query_length, key_length, head_dim) / 2 * (forward + 2 * backward)
    pairs = float(batch * heads * query_length * key_length)
    softmax = pairs * (5 * forward + 4 * backward)
    return {"scores": product, "mask": pairs * (forward + backward), "softmax": softmax, "values": product}


def teraflops_per_second(flops: float, milliseconds: float) -> float:
    """The rate in TFLOP/s. Raises ValueError unless the time is positive."""
    if milliseconds <= 0:
        raise ValueError(f"milliseconds must be positive; got {milliseconds}")
    return flops / milliseconds * 1e-9


@dataclass(frozen=True)
class DevicePeak:
    """The vendor's dense peak rates: TFLOP/s of 16-bit, TF32 and float32 arithmetic, and GB/s of device memory."""

    half: float
    tf32: float
    float32: float
    bandwidth: float

    def rate(self, dtype: str, *, tf32: bool) -> float | None:
        """TFLOP/s for ``bfloat16``, ``float16`` or ``float32`` (with or without TF32); None for other dtypes.

        Model FLOPs utilisation (MFU; Chowdhery et al., "PaLM", 2022) is `teraflops_per_second` over this rate.
        """
        float32 = self.tf32 if tf32 else self.float32
        return {"bfloat16": self.half, "float16": self.half, "float32": float32}.get(dtype)


# The first entry whose words all occur in the device's name counts, so variants come first.
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
    """The vendor's peak rates of a GPU by its name; None if unknown."""
    return next((peak for words, peak in _PEAKS if all(word in device_name for word in words)), None)


def implausible_rate(rate: float, device_name: str, dtype: str, *, tf32: bool) -> str | None:
    """A warning if ``rate`` in TFLOP/s is above the device's peak for the dtype; None if not, or if no peak is known.

    The time is wrong, or less was computed, or in another precision: as several 16-bit or TF32 products, for float32.
    """
    peak = device_peak(device_name)
    limit = None if peak is None else peak.rate(dtype, tf32=tf32)
    if limit is None or rate <= limit:
        return None
    warning = f"{rate:.0f} TFLOP/s is above the {limit:.0f} TFLOP/s peak of {device_name} in {dtype}"
    if dtype != "float32":
        return warning
    return warning + (" with TF32" if tf32 else ": the products ran on tensor cores, in a narrower format")


def attention_memory(
    batch: int, heads: int, length: int, head_dim: int, itemsize: int, v_head_dim: int | None = None
) -> dict[str, int]:
    """Bytes of attention's tensors, with as many queries as keys, and of what it saves for the backward.

    With B, H (1 without a head axis), N and d, and s = ``itemsize`` bytes per element: inputs 3·B·H·N·d·s, output
    B·H·N·d·s, scores and probabilities B·H·N²·s each. Where v has ``v_head_dim`` columns, so has the output. "saved
    with n" is the output and n tensors of the scores' size; with 0, as in FlashAttention, the output and the float32
    log-sum-exp, 4·B·H·N.
    """
    rows = batch * heads * length
    output, scores = rows * (v_head_dim or head_dim) * itemsize, rows * length * itemsize
    inputs = 2 * rows * head_dim * itemsize + output
    tensors = {"inputs": inputs, "scores": scores, "probabilities": scores, "output": output}
    saved = {f"saved with {count}": output + count * scores for count in (3, 2, 1)}
    return tensors | saved | {"saved with 0": output + 4 * rows}
