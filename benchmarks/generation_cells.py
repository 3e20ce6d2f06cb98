"""Measures cells of the generation benchmark: a model's steps in every mode, or one attention call by everyone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.comparison import relative_difference
from benchmarks.comparison import release_after_failure as release_memory_of_failure
from benchmarks.feature_cells import Measurement
from cs336_systems.attention import attention_with_cache
from cs336_systems.profiling.memory import collection_paused, release_memory, without_frames
from cs336_systems.profiling.sweep import OK, outcome_of
from cs336_systems.profiling.timing import (
    TimingMethod,
    call_milliseconds,
    compare,
    interleave,
    measure_ms,
    synchronize,
)
from cs336_systems.transformer import Decoder, Transformer, TransformerConfig


class Mode(NamedTuple):
    """How steps are run."""

    graph: bool
    compile: bool


MODES = {
    "eager": Mode(graph=False, compile=False),
    "graph": Mode(graph=True, compile=False),
    "compile": Mode(graph=False, compile=True),
    "graph+compile": Mode(graph=True, compile=True),
}

OURS, TORCH = "ours", "torch"
BACKENDS = {"torch-flash": SDPBackend.FLASH_ATTENTION, "torch-cudnn": SDPBackend.CUDNN_ATTENTION}
"""Of `scaled_dot_product_attention`, which chooses by itself as `TORCH`."""


class Shape(NamedTuple):
    """An attention call of one new token of each sequence."""

    batch: int
    cache: int
    q_heads: int
    kv_heads: int
    head_dim: int = 128

    def read_bytes(self, dtype: torch.dtype) -> int:
        """Of keys and values."""
        return 2 * self.batch * self.kv_heads * self.cache * self.head_dim * dtype.itemsize


@dataclass(frozen=True)
class Conditions:
    """Where and how a run measures."""

    device: torch.device
    dtype: torch.dtype
    method: TimingMethod


def copy_rate(conditions: Conditions) -> float:
    """GB/s of a copy in the device's memory, read plus written."""
    elements = 2**28 if conditions.device.type == "cuda" else 2**22
    source = torch.randn(elements, device=conditions.device)
    target = torch.empty_like(source)
    times = compare({"copy": lambda: target.copy_(source)}, device=conditions.device, method=conditions.method)
    return 2 * source.nbytes / times["copy"].median / 1e6


def weight_bytes(model: Transformer) -> int:
    """Of the weights that a step reads. Of an embedding that is no head it reads a few rows."""
    read = sum(parameter.nbytes for parameter in model.parameters())
    return read if model.lm_head is None else read - model.token_embeddings.weight.nbytes


def cache_bytes(config: TransformerConfig, batch: int, tokens: float, dtype: torch.dtype) -> float:
    """Of the keys and values that a step reads where each sequence has so many tokens."""
    seen = tokens if config.window is None else min(tokens, config.window)
    kv_heads = config.num_heads if config.num_kv_heads is None else config.num_kv_heads
    return 2 * config.num_layers * batch * seen * kv_heads * config.d_head * dtype.itemsize


def measure_steps(
    model: Transformer, batch: int, context: int, new_tokens: int, modes: Sequence[str], conditions: Conditions
) -> dict[str, Measurement]:
    """The time of a step of each mode, in milliseconds, greedy sampling included, as the host sees it.

    Each mode has a cache of its own, filled by random prompts of ``context`` tokens. A round is ``new_tokens`` steps in
    a row, without waiting between them, and the first, which compiles and records, is not timed.
    """
    rounds = conditions.method.rounds
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(model.config.vocab_size, (batch, context), generator=generator).tolist()
    measured: dict[str, Measurement] = {}
    measurements: dict[str, Callable[[], float]] = {}
    for name in modes:
        failure: Exception | None = None
        begin = time.perf_counter()
        try:
            steps = _Steps(model, prompts, (rounds + 1) * new_tokens, MODES[name], new_tokens)
            steps.run()
            synchronize(conditions.device)
        except Exception as error:
            failure = without_frames(error)
        if failure is None:
            measured[name] = Measurement(ready_s=time.perf_counter() - begin)
            measurements[name] = partial(steps.milliseconds, conditions.device)
        else:
            measured[name] = Measurement(outcome_of(failure, refusals=(NotImplementedError, ValueError)))
            release_memory_of_failure(conditions.device, name)
    return _rounds(measured, measurements, conditions)


class _Steps:
    """Steps of one mode, one after another."""

    def __init__(self, model: Transformer, prompts: list[list[int]], room: int, mode: Mode, new_tokens: int) -> None:
        self._decoder = Decoder(model, len(prompts), len(prompts[0]) + room, **mode._asdict())
        self._tokens = self._decoder.prefill(prompts).argmax(-1)
        self._count = new_tokens

    def run(self) -> None:
        for _ in range(self._count):
            self._tokens = self._decoder.step(self._tokens).argmax(-1)

    def milliseconds(self, device: torch.device) -> float:
        with collection_paused():
            return call_milliseconds(self.run, device) / self._count


def measure_attention(shape: Shape, contenders: Sequence[str], conditions: Conditions) -> dict[str, Measurement]:
    """The time of a call of each contender, in milliseconds, on full caches."""
    on: dict[str, Any] = {"device": conditions.device, "dtype": conditions.dtype}
    q = torch.randn(shape.batch, shape.q_heads, 1, shape.head_dim, **on)
    k, v = torch.randn(2, shape.batch, shape.kv_heads, shape.cache, shape.head_dim, **on).unbind()
    lengths = torch.full((shape.batch,), shape.cache, device=conditions.device)
    expected: Tensor | None = None
    measured: dict[str, Measurement] = {}
    measurements: dict[str, Callable[[], float]] = {}
    for name in contenders:
        call = partial(_attend, name, q, k, v, lengths)
        failure: Exception | None = None
        difference = None
        begin = time.perf_counter()
        try:
            out = call()
            synchronize(conditions.device)
            expected = out if expected is None else expected
            difference = relative_difference([out], [expected])
        except Exception as error:
            failure = without_frames(error)
        if failure is None:
            measured[name] = Measurement(ready_s=time.perf_counter() - begin, difference=difference)
            measurements[name] = partial(measure_ms, call, device=conditions.device, method=conditions.method)
        else:
            # Torch says by a RuntimeError that a backend cannot compute a call.
            refusals = (NotImplementedError, RuntimeError) if name in BACKENDS else (NotImplementedError,)
            measured[name] = Measurement(outcome_of(failure, refusals=refusals))
            release_memory_of_failure(conditions.device, name)
    return _rounds(measured, measurements, conditions)


@torch.no_grad()
def _attend(name: str, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    if name == OURS:
        return attention_with_cache(q, k, v, lengths)
    with sdpa_kernel(BACKENDS[name]) if name in BACKENDS else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def _rounds(
    measured: dict[str, Measurement], measurements: Mapping[str, Callable[[], float]], conditions: Conditions
) -> dict[str, Measurement]:
    """Everyone's measurements in rounds, with what is known of them already."""

    def failed(name: str, error: Exception) -> None:
        measured[name] = Measurement(outcome_of(error), measured[name].ready_s)
        release_memory_of_failure(conditions.device, name)

    times = interleave(measurements, method=conditions.method, on_error=failed)
    for name, own in times.items():
        known = measured[name]
        measured[name] = Measurement(OK, known.ready_s, own, known.difference)
    release_memory(conditions.device)
    return measured
