"""Generation: the time of a token, of a model or of attention alone, and the rate at which it reads memory.

    python benchmarks/generation.py                                  # steps of a model; a short run without a GPU
    python benchmarks/generation.py --models large --batches 1 32 --lengths 2048 --modes eager graph graph+compile
    python benchmarks/generation.py --attention                      # attention_with_cache and torch's function

A step of one token reads all weights once, and the keys and values of every sequence: these bytes over its time are
compared with the rate of a copy in the device's memory, measured in the same rounds.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.lib import flags
from benchmarks.lib.comparison import relative_difference
from benchmarks.lib.harness import Case, Comparison, Context, Program, Row, run, timing_method
from benchmarks.lib.results import outcome_of
from benchmarks.lib.tables import markdown
from cs336_systems.attention import attention_with_cache
from cs336_systems.kernels.garbage import collection_paused
from cs336_systems.profiling.timing import call_milliseconds, measure_ms, synchronize
from cs336_systems.transformer import PRESETS, Decoder, Transformer, TransformerConfig, preset

MODES = {
    "eager": {"graph": False, "compile": False},
    "graph": {"graph": True, "compile": False},
    "compile": {"graph": False, "compile": True},
    "graph+compile": {"graph": True, "compile": True},
}
OURS, TORCH, COPY = "attention_with_cache", "torch", "copy"
BACKENDS = {"torch-flash": SDPBackend.FLASH_ATTENTION, "torch-cudnn": SDPBackend.CUDNN_ATTENTION}
"""Of `scaled_dot_product_attention`; as `TORCH` it chooses one by itself."""
# (batch, length of the cache, query heads, key and value heads, head dimension)
SHAPES = [
    *((1, 131_072, 32, 8, 128), (8, 16_384, 32, 8, 128), (64, 4096, 32, 8, 128)),
    *((16, 8192, 32, 32, 128), (128, 1024, 32, 8, 128), (1, 4096, 32, 8, 128)),
]
SMALL_SHAPES = [(1, 512, 4, 2, 64), (4, 128, 4, 4, 64)]


@dataclass(frozen=True)
class GenerationCase(Case):
    """A step of a model after ``length`` tokens, or an attention call on caches of that length if ``model`` is ""."""

    model: str
    layers: int
    dtype: str
    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int

    def cache_bytes(self, length: float, window: int | None = None) -> int:
        """The bytes of keys and values that a step reads if each sequence has ``length`` tokens."""
        seen = length if window is None else min(length, window)
        size = self.layers * self.batch * self.kv_heads * self.head_dim * flags.DTYPES[self.dtype].itemsize
        return int(2 * size * seen)


def config_of(name: str, layers: int | None, length: int) -> TransformerConfig:
    """A preset with another context length, and other layers if given."""
    changes: dict[str, Any] = {} if layers is None else {"num_layers": layers}
    return preset(name, context_length=length, **changes)


def weight_bytes(model: Transformer) -> int:
    """The bytes of the weights that a step reads. Of an embedding that is not the head it reads a few rows."""
    size = sum(parameter.nbytes for parameter in model.parameters())
    return size if model.lm_head is None else size - model.token_embeddings.weight.nbytes


class Steps:
    """Steps of a mode on a cache that random prompts fill; the first ones, which compile and record, are not timed."""

    def __init__(self, mode: str, model: Transformer, prompts: list[list[int]], capacity: int, steps: int) -> None:
        begin, self._device, self._steps = time.perf_counter(), model.token_embeddings.weight.device, steps
        self._decoder = Decoder(model, len(prompts), capacity, **MODES[mode])
        self._tokens = self._decoder.prefill(prompts).argmax(-1)
        self._run()
        synchronize(self._device)
        self.ready_s = round(time.perf_counter() - begin, 2)

    def _run(self) -> None:
        for _ in range(self._steps):
            self._tokens = self._decoder.step(self._tokens).argmax(-1)

    def __call__(self) -> float:
        """Milliseconds per step with greedy sampling, of steps in a row that wait for nothing but the last."""
        with collection_paused():
            return call_milliseconds(self._run, self._device) / self._steps


def measure(case: GenerationCase, context: Context) -> list[Row]:
    """A row for each provider, and for a copy in memory."""
    options, comparison, method = context.options, Comparison(context), timing_method(context.options)
    prepare = prepare_steps if case.model else prepare_attention
    measurements, columns, read = prepare(case, options, comparison)
    source = torch.randn(2**28 if options.device.type == "cuda" else 2**22, device=options.device)
    read_bytes = dict.fromkeys(measurements, sum(read.values())) | {COPY: 2 * source.nbytes}
    copy = partial(torch.empty_like(source).copy_, source)
    comparison.attempt(COPY, "first call", copy)
    measurements[COPY] = partial(measure_ms, copy, device=options.device, method=method)
    comparison.interleave(measurements, method)
    rates = {name: read_bytes[name] / times.median / 1e6 for name, times in comparison.times.items()}
    rows = []
    for name in comparison.outcomes:
        row, rate = {"provider": name, **comparison.columns(name)}, rates.get(name)
        step = case.model and name in rates and name != COPY
        row |= {"tokens_per_s": case.batch / row["median_ms"] * 1e3 if step else None, "gb_per_s": rate, **read}
        row["of_copy"] = rate / rates[COPY] if rate and COPY in rates else None
        rows.append(row | {"ready_s": None, "difference": None} | columns.get(name, {}))
    return rows


Prepared = tuple[dict[str, Callable[[], float]], dict[str, Row], dict[str, int]]
"""By provider, a measurement and further columns; and the bytes that each call reads, by column."""


def prepare_steps(case: GenerationCase, options: argparse.Namespace, comparison: Comparison) -> Prepared:
    """Steps of the model in each mode."""
    tokens = (options.rounds + 1) * options.steps
    config = config_of(case.model, options.layers, case.length + tokens)
    model = Transformer(config, device=options.device, dtype=flags.DTYPES[case.dtype])
    prompts = torch.randint(config.vocab_size, (case.batch, case.length)).tolist()
    make = partial(Steps, model=model, prompts=prompts, capacity=case.length + tokens, steps=options.steps)
    refused = partial(outcome_of, refusals=(NotImplementedError, ValueError))
    attempts = {name: comparison.attempt(name, "first steps", partial(make, name), refused) for name in options.modes}
    made = {name: steps for name, steps in attempts.items() if steps is not None}
    # The mean over the steps that are timed.
    cache = case.cache_bytes(case.length + (options.steps + tokens) / 2, config.window)
    read = {"weight_bytes": weight_bytes(model), "cache_bytes": cache}
    return {**made}, {name: {"ready_s": steps.ready_s} for name, steps in made.items()}, read


def prepare_attention(case: GenerationCase, options: argparse.Namespace, comparison: Comparison) -> Prepared:
    """Attention of one new token in each sequence to a full cache; outputs are compared with torch's."""
    draw = partial(torch.randn, device=options.device, dtype=flags.DTYPES[case.dtype])
    q = draw(case.batch, case.heads, 1, case.head_dim)
    k, v = (draw(case.batch, case.kv_heads, case.length, case.head_dim) for _ in range(2))
    lengths = torch.full((case.batch,), case.length, device=options.device)

    @torch.no_grad()
    def call(name: str) -> Tensor:
        if name == OURS:
            return attention_with_cache(q, k, v, lengths)
        with nullcontext() if name == TORCH else sdpa_kernel(BACKENDS[name]):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=case.heads != case.kv_heads)

    measurements, columns, outputs = dict[str, Callable[[], float]](), dict[str, Row](), list[Tensor]()
    for name in [TORCH, OURS, *(BACKENDS if options.device.type == "cuda" else ())]:
        # torch raises RuntimeError where a backend cannot compute a call.
        refusals = (NotImplementedError, RuntimeError) if name in BACKENDS else (NotImplementedError,)
        output = comparison.attempt(name, "first call", partial(call, name), partial(outcome_of, refusals=refusals))
        if output is not None:
            outputs.append(output)
            columns[name] = {"difference": relative_difference([output], outputs[:1])}
            method, timed = timing_method(options), partial(call, name)
            measurements[name] = partial(measure_ms, timed, device=options.device, method=method)
    return measurements, columns, {"weight_bytes": 0, "cache_bytes": case.cache_bytes(case.length)}


def tables(frame: pd.DataFrame) -> str:
    """The rows that have a time."""
    if "median_ms" not in frame:
        return ""  # no case could be measured at all
    frame = frame[frame["median_ms"].notna()]
    columns: dict[str, Any] = {name: frame[name] for name in ("model", "dtype", "batch", "length")}
    columns["heads"] = [f"{r.heads}/{r.kv_heads} × {r.head_dim}" for r in frame.itertuples()]
    columns |= {"provider": frame["provider"], "ms": frame["median_ms"], "tokens/s": frame["tokens_per_s"]}
    columns |= {"weights, GB": frame["weight_bytes"] / 1e9, "keys and values, GB": frame["cache_bytes"] / 1e9}
    columns |= {"GB/s": frame["gb_per_s"], "of a copy, %": 100 * frame["of_copy"], "ready after, s": frame["ready_s"]}
    return markdown(pd.DataFrame(columns).replace({"model": {"": "attention"}}))


PROGRAM = Program(
    "generation",
    "Generation",
    measure,
    tables,
    settings=("steps", "modes", "layers", "rounds", "warmup", "rep", "seed"),
)


_ON_A_GPU = "--models large --dtypes bf16 --batches 1 32 --lengths 2048 --modes eager graph graph+compile --steps 32"
_ON_A_GPU += " --rounds 5 --warmup 5 --rep 15"
_WITHOUT = (
    "--models small --dtypes fp32 --batches 1 --lengths 64 --modes eager --steps 4 --rounds 3 --warmup 5 --rep 30"
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = flags.make_parser(__doc__, _ON_A_GPU if flags.wants_gpu(arguments) else _WITHOUT)
    parser.add_argument("--layers", type=flags.positive, metavar="N", help="layers of the model (default: the model's)")
    parser.add_argument("--attention", action="store_true", help="measure attention alone, of a few shapes")
    options = flags.parse(parser, arguments)
    models = sorted({name for names in PRESETS.values() for name in names})
    flags.restrict(parser, options, modes=[*MODES], models=models)
    return options


def cases_of(options: argparse.Namespace) -> list[GenerationCase]:
    """The cases: models × dtypes × batches × lengths, or attention calls."""
    if options.attention:
        shapes = SHAPES if options.device.type == "cuda" else SMALL_SHAPES
        return [GenerationCase("", 1, dtype, *shape) for dtype in options.dtypes for shape in shapes]
    cases = []
    sizes = itertools.product(options.models, options.dtypes, options.batches, options.lengths)
    for name, dtype, batch, length in sizes:
        config = config_of(name, options.layers, length)
        heads = (config.num_heads, config.num_kv_heads or config.num_heads, config.d_head)
        cases.append(GenerationCase(name, config.num_layers, dtype, batch, length, *heads))
    return cases


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    return run(PROGRAM, options, cases_of(options))


if __name__ == "__main__":
    sys.exit(main())
