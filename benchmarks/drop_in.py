"""Training throughput of models of transformers with this library as `attn_implementation`, and with each other one.

    python benchmarks/drop_in.py                                     # every model and batch; small without a GPU
    python benchmarks/drop_in.py --peers PEERS                       # with FlashAttention-4 from that folder
    python benchmarks/drop_in.py --models gemma2 --batching packed --providers cs336_systems sdpa

A step is a forward with the loss and its backward of one model with random parameters, which all implementations share
and take in turns. Its sequences have the same length (equal), are padded at the end to that of the longest (padded), or
are packed one after another and told apart by position_ids (packed). Tokens per second do not count padding. A loss
that depends on the implementation is reported.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pandas as pd
import torch

from benchmarks.lib import flags, harness
from benchmarks.lib.attention_providers import PEER_DISTRIBUTIONS, add_peers
from benchmarks.lib.comparison import Comparison, Context, plausible_difference, timing_method
from benchmarks.lib.harness import Case, Row
from benchmarks.lib.intervals import figures_with_intervals
from benchmarks.lib.tables import bullets, markdown, number, sections
from cs336_systems.profiling.timing import call_milliseconds, measure_ms
from cs336_systems.profiling.torch_names import COMPILER

OURS = "cs336_systems"
PROVIDERS = (OURS, "sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
MODELS = ("llama", "gemma2", "bert")
"""Causal with grouped heads; a soft cap, and a window of a quarter in every second layer; bidirectional."""
EQUAL, PADDED, PACKED = BATCHING = ("equal", "padded", "packed")
VOCAB_SIZE = 32_000


@dataclass(frozen=True)
class DropInCase(Case):
    """A model, its sizes, and a batch of ``batch`` × ``length`` places."""

    model: str
    batching: str
    dtype: str
    batch: int
    length: int
    layers: int
    heads: int
    head_dim: int


AXES = [field.name for field in dataclasses.fields(DropInCase)]


def make_model(case: DropInCase, device: torch.device) -> Any:
    """The model of transformers with random parameters."""
    import transformers

    from cs336_systems.compat import huggingface

    huggingface.register()
    width = case.heads * case.head_dim
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.heads,
        "max_position_embeddings": case.batch * case.length,
        "attn_implementation": OURS,
    }
    grouped = {"num_key_value_heads": max(1, case.heads // 4), "head_dim": case.head_dim}
    if case.model == "bert":
        no_dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        config: Any = transformers.BertConfig(**sizes, **no_dropout)
        model = transformers.BertForMaskedLM
    elif case.model == "gemma2":
        window = max(1, case.length // 4)
        config = transformers.Gemma2Config(
            **sizes, **grouped, query_pre_attn_scalar=case.head_dim, sliding_window=window
        )
        model = transformers.Gemma2ForCausalLM
    else:
        config, model = transformers.LlamaConfig(**sizes, **grouped), transformers.LlamaForCausalLM
    return model(config).to(device, flags.DTYPES[case.dtype])


def make_batch(case: DropInCase, device: torch.device) -> tuple[dict[str, torch.Tensor], int]:
    """The model's arguments, and how many tokens they have: sequences of a quarter to the whole of the length."""
    lengths = torch.linspace(case.length, case.length / 4, case.batch).long().tolist()
    if case.batching == EQUAL:
        lengths = [case.length] * case.batch
    rows = 1 if case.batching == PACKED else case.batch
    ids = torch.randint(VOCAB_SIZE, (rows, sum(lengths) if case.batching == PACKED else case.length), device=device)
    given = {"input_ids": ids, "labels": ids.clone()}
    if case.batching == PACKED:
        given["position_ids"] = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    elif case.batching == PADDED:
        mask = torch.arange(case.length, device=device) < torch.tensor(lengths, device=device)[:, None]
        given["attention_mask"] = mask.long()
        given["labels"][~mask] = -100
    return given, sum(lengths)


def measure(case: DropInCase, context: Context) -> list[Row]:
    """A row for each implementation."""
    options, comparison, method = context.options, Comparison(context), timing_method(context.options)
    device: torch.device = options.device
    add_peers(options.peers)
    model = make_model(case, device)
    given, tokens = make_batch(case, device)
    no_cache = {} if case.model == "bert" else {"use_cache": False}

    def step() -> torch.Tensor:
        model.zero_grad()
        loss: torch.Tensor = model(**given, **no_cache).loss
        loss.backward()
        return loss.detach()

    def milliseconds(provider: str) -> float:
        model.set_attn_implementation(provider)
        return measure_ms(step, device=device, method=method)

    def first(provider: str) -> Row:
        model.set_attn_implementation(provider)
        loss = float(step())  # compiles
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        time = call_milliseconds(step, device)
        peak = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
        return {"loss": loss, "probe_ms": time, "peak_mib": peak}

    found: dict[str, Row] = {}
    calls: dict[str, Callable[[], float]] = {}
    for name in options.providers:
        row = comparison.attempt(name, "first step", functools.partial(first, name))
        found[name] = row or dict.fromkeys(("loss", "probe_ms", "peak_mib"))
        if row and not comparison.skip_if_slow(name, row["probe_ms"], options.max_seconds):
            calls[name] = functools.partial(milliseconds, name)
    comparison.interleave(calls, method)
    rows = []
    for name in options.providers:
        columns = comparison.columns(name)
        rate = columns["median_ms"] and 1e3 * tokens / columns["median_ms"]
        ratio = comparison.speedup_columns("speedup_of_first", options.providers[0], name)
        rows.append({"provider": name, "tokens": tokens, **columns, "tokens_per_second": rate, **ratio, **found[name]})
    return rows


def wrong_losses(frame: pd.DataFrame) -> list[str]:
    """Warnings: the parameters and tokens are the same, so the loss is."""
    texts = []
    for _, rows in frame.dropna(subset=["loss"]).groupby(AXES, sort=False):
        first, low, high = rows.iloc[0], rows["loss"].min(), rows["loss"].max()
        if high - low > plausible_difference(first["dtype"], gradients=False) * abs(low):
            losses = ", ".join(f"{row.loss:.4f} with {row.provider}" for row in rows.itertuples())
            texts.append(
                f"{first['model']} {first['batching']} {first['dtype']} {first['length']}: the loss is {losses}"
            )
    return texts


def tables(frame: pd.DataFrame) -> str:
    """A line for each case and implementation, and losses that differ."""
    if "provider" not in frame:
        return ""
    figures = ["median_ms", "tokens_per_second", "peak_mib", "speedup_of_first", "status"]
    speedups = figures_with_intervals(frame, "speedup_of_first")
    shown = frame.assign(speedup_of_first=speedups).reindex(columns=[*AXES, "provider", *figures])
    for name in figures[:3]:
        shown[name] = shown[name].map(number)
    return sections({"Training steps": markdown(shown), "Losses": bullets(wrong_losses(frame))})


PROGRAM = harness.Program(
    "drop_in",
    "Models of transformers",
    measure,
    tables,
    settings=("providers", "rounds", "warmup", "rep", "max_seconds", "seed"),
    notes=(
        "forward with the loss, and backward; no optimizer, nothing compiled but flex_attention's kernels",
        "speedup of first: how many times as fast the first of the implementations is as the one of the row",
    ),
    preload=COMPILER,
    packages=("transformers", "flash-attn", *PEER_DISTRIBUTIONS),
)

_USUAL = f"--models {' '.join(MODELS)} --batching {' '.join(BATCHING)} --rounds 5 --most-rounds --warmup 0 --peers"
_ON_A_GPU = (
    f"--providers {' '.join(PROVIDERS)} --dtypes bf16 --lengths 1024 4096 --tokens 16384 --layers 8 --heads 16 "
    "--head-dims 128 --rep 200 --max-seconds 5"
)
_WITHOUT = (
    f"--providers {' '.join(PROVIDERS[:3])} --dtypes fp32 --lengths 256 --tokens 1024 --layers 2 --heads 4 "
    "--head-dims 32 --rep 100 --max-seconds 20"
)


def cases_of(options: argparse.Namespace) -> list[DropInCase]:
    """The cases; bert tells no packed sequences apart."""
    axes = (options.dtypes, options.models, options.lengths, options.head_dims, options.batching)
    return [
        DropInCase(model, batching, dtype, max(1, options.tokens // n), n, options.layers, options.heads, head_dim)
        for dtype, model, n, head_dim, batching in itertools.product(*axes)
        if (model, batching) != ("bert", PACKED)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = flags.make_parser(__doc__, f"{_USUAL} {_ON_A_GPU if flags.wants_gpu(arguments) else _WITHOUT}")
    options = flags.parse(parser, arguments)
    flags.restrict(parser, options, models=MODELS, providers=PROVIDERS, batching=BATCHING)
    if not options.heads:
        parser.error("--heads must be at least 1; got 0")
    return harness.run(PROGRAM, options, cases_of(options))


if __name__ == "__main__":
    sys.exit(main())
