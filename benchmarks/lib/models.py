"""Cases of models: their sizes, what computes attention, the dtype, and how much of a step is measured.

transformer.py, training_step.py, breakdown.py and memory.py share these cases; scaling.py and data_parallel.py have
the same models.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.lib import flags
from benchmarks.lib.harness import Case, Outcome, Program, Row, Sweep, ran_out_of_memory, run
from benchmarks.lib.intervals import quotient, with_interval
from benchmarks.lib.tables import markdown, number
from cs336_systems.attention import Implementation
from cs336_systems.profiling.flops import teraflops_per_second
from cs336_systems.profiling.report import ABSENT
from cs336_systems.profiling.torch_names import COMPILER
from cs336_systems.training.config import TINY, TINY_SIZES
from cs336_systems.transformer import PRESETS, TransformerConfig, preset
from cs336_systems.transformer.presets import VOCAB_SIZE

FORWARD, FORWARD_BACKWARD, STEP = MODES = ("forward", "forward+backward", "step")
"""The forward alone, under ``no_grad``; forward and backward; or both and the optimizer's update."""
PHASES = ("forward", "backward", "optimizer")
PHASES_OF = {FORWARD: PHASES[:1], FORWARD_BACKWARD: PHASES[:2], STEP: PHASES}
"""The phases of a step in each mode."""
TORCH, CUDNN, LLAMA = "torch", "torch-cudnn", "llama"
PROVIDERS = {
    "auto": "this library's Transformer with the implementation of attention that it chooses",
    **{impl.value: f'the same with attn="{impl.value}"' for impl in Implementation},
    TORCH: "the same with torch's scaled_dot_product_attention, which chooses among all its kernels",
    CUDNN: "the same with cuDNN's kernel alone",
    LLAMA: "LlamaForCausalLM of transformers, with the same sizes and its default attention",
}
"""What --providers can name."""
NOT_COMPILED, BLOCKS, WHOLE = COMPILE = ("none", "blocks", "whole")
"""What torch.compile compiles: nothing, each block separately, or the whole model."""
BEFORE = " (before)"
MORE_IS_BETTER = ("tokens_per_second", "mfu", "mfu_causal")
"""Columns of rates."""
SIZES = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size")
AXES = ("model", "batch", "length", "provider", "dtype", "compile", "mode", "warmup_steps")
"""The columns that identify a case in tables."""
_BY_SIZES = re.compile(r"(\d+)-(\d+)-(\d+)-(\d+)-(\d+)")
_STATE_COPIES = {FORWARD: 1, FORWARD_BACKWARD: 2, STEP: 4}  # parameters; gradients; AdamW's two moments


@dataclass(frozen=True)
class ModelCase(Case):
    """A model, its batch, how it computes, and what is measured of it: one of `MODES`."""

    model: str
    suite: str
    config: TransformerConfig
    batch: int
    provider: str
    dtype: str
    tf32: bool
    compile: str = NOT_COMPILED
    mode: str = STEP
    warmup_steps: int = 1

    @property
    def columns(self) -> Row:
        """The fields, with the sizes of the model in place of its config."""
        row = {name: value for name, value in vars(self).items() if name != "config"}
        sizes = {name: getattr(self.config, name) for name in SIZES}
        return row | {"length": self.length, **sizes, "parameters": self.config.parameters()}

    @property
    def name(self) -> str:
        """The case in one line."""
        tf32 = " tf32" if self.tf32 else ""
        work = f"{self.model} {self.batch}x{self.length} {self.provider} {self.dtype}{tf32}"
        return f"{work} compile={self.compile} {self.mode} warmup={self.warmup_steps}"

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.config.context_length

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.length


def make_parser(description: str | None, usual: str) -> argparse.ArgumentParser:
    """`flags.make_parser` with --suite, and with --d-model and so on, which replace sizes of --models."""
    parser = flags.make_parser(description, f"{usual} --suite 2025", timeout=1800)
    for name in SIZES:
        text = f"in place of each model's {name}"
        parser.add_argument(f"--{name.replace('_', '-')}", type=flags.positive, metavar="N", help=text)
    parser.epilog = "\n".join(["providers:", *(f"  {name}: {text}" for name, text in PROVIDERS.items())])
    return parser


def run_models(
    program: Program[ModelCase],
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    drive: Callable[[Sweep[ModelCase], list[ModelCase]], object] = lambda sweep, cases: [*map(sweep.rows, cases)],
) -> int:
    """Run a program on the cases that its command line names; see `harness.run`."""
    options = flags.parse(parser, arguments)
    cases = model_cases(parser, options)
    return run(dataclasses.replace(program, preload=preload(options)), options, cases, drive)


def model_cases(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[ModelCase]:
    """All combinations of what the options name; an option that a program does not have keeps the field's default.

    Shorter sequences come before longer ones, and modes that need less memory before others. Ends the program with a
    message if a name is unknown or sizes do not fit.
    """
    flags.restrict(parser, options, providers=PROVIDERS, compile=COMPILE, modes=MODES, suite=PRESETS)
    work = [name for name in ("lengths", "batch", "batches") if hasattr(options, name)]
    if all(map(_BY_SIZES.fullmatch, options.models)):
        for name in work:
            if getattr(options, name) != parser.get_default(name):
                parser.error(f"--{name} cannot be given with --models of the form batch-length-d_model-layers-heads")
    axes = {"compile": [NOT_COMPILED], "modes": MODES, "warmup_steps": [1]}
    compiles, modes, warmups = (getattr(options, name, usual) for name, usual in axes.items())
    modes = [mode for mode in MODES if mode in modes]
    try:
        return [
            ModelCase(
                model, options.suite, _with_attention(config, provider), batch, provider, dtype, options.tf32, *how
            )
            for model, config, batch in sized_models(options)
            for provider, dtype, *how in itertools.product(options.providers, options.dtypes, compiles, modes, warmups)
        ]
    except ValueError as error:
        parser.error(str(error))


def sized_models(options: argparse.Namespace) -> Iterator[tuple[str, TransformerConfig, int]]:
    """Label, config and batch size of every model, length and batch size. Raises ValueError as `model_config`."""
    changes = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    for name in options.models:
        label = " ".join([name, *(f"{size}={value}" for size, value in changes.items())])
        if match := _BY_SIZES.fullmatch(name):
            batch, length, d_model, num_layers, num_heads = map(int, match.groups())
            sizes = {"d_model": d_model, "d_ff": 4 * d_model, "num_layers": num_layers, "num_heads": num_heads}
            config: dict[str, Any] = {"vocab_size": VOCAB_SIZE, **sizes, **changes, "context_length": length}
            yield label, TransformerConfig(**config), batch
            continue
        for length in sorted(options.lengths):
            for batch in getattr(options, "batches", None) or [options.batch or max(1, options.tokens // length)]:
                yield label, model_config(name, options.suite, context_length=length, **changes), batch


def model_config(name: str, suite: str, **changes: Any) -> TransformerConfig:
    """The config of `tiny`, training's default, or of a preset of the suite. Raises ValueError for another name."""
    if name == TINY:
        return TransformerConfig(**{"vocab_size": VOCAB_SIZE} | TINY_SIZES._asdict() | changes)
    if name not in PRESETS[suite]:
        known = ", ".join([TINY, *PRESETS[suite]])
        raise ValueError(f"--models must be of {known} with --suite {suite}, or sizes as 4-256-256-4-8; got {name}")
    return preset(name, suite, **changes)


def _with_attention(config: TransformerConfig, provider: str) -> TransformerConfig:
    attn = {TORCH: "sdpa", CUDNN: "sdpa", LLAMA: "sdpa"}.get(provider, provider)
    return dataclasses.replace(config, attn=attn)


def file_of(out: Path, kind: str, case: Case, suffix: str) -> Path:
    """The path of a case's file in the folder ``out``/``kind``, which is made."""
    (out / kind).mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.+]+", "-", case.name)
    return out / kind / f"{name}.{suffix}"


def smaller_out_of_memory(case: ModelCase, rows: Sequence[Row]) -> Outcome | None:
    """The outcome `skipped` if memory ran out with no more sequences, no longer ones, and no more phases."""
    # The names of the modes are in ascending order.
    return ran_out_of_memory(case.columns, rows, "batch", "length", "mode", "warmup_steps")


def preload(options: argparse.Namespace) -> tuple[str, ...]:
    """Modules that the cases import: what torch.compile needs, and transformers' Llama if it is installed."""
    compiles = COMPILER if {*options.compile} - {NOT_COMPILED} else ()
    has_llama = LLAMA in options.providers and importlib.util.find_spec("transformers") is not None
    return (*compiles, *(("transformers.models.llama.modeling_llama",) if has_llama else ()))


def least_memory(case: ModelCase, options: argparse.Namespace) -> int:
    """Bytes of the parameters, and with the mode of their gradients and of AdamW's two moments, in float32."""
    return 4 * _STATE_COPIES[case.mode] * case.config.parameters()


def step_flops(config: TransformerConfig, tokens: int, mode: str = STEP, *, every_pair: bool = True) -> float:
    """FLOPs of the matrix products of a step: the backward has twice as many as the forward, the update none.

    ``every_pair`` counts masked query-key pairs too, as torch's FlopCounterMode and most published figures do.
    """
    return (1.0 if mode == FORWARD else 3.0) * tokens * config.forward_flops_per_token(every_pair=every_pair)


def rate_columns(
    config: TransformerConfig, tokens: int, mode: str, median_ms: float, peak: float | None, processes: int = 1
) -> Row:
    """Tokens per second, and model FLOPs utilisation (MFU) with and without the pairs that the causal mask hides.

    ``peak`` is the device's rate in TFLOP/s, None if unknown; MFU is of one of the processes' devices.
    """

    def utilisation(every_pair: bool) -> float | None:
        flops = step_flops(config, tokens, mode, every_pair=every_pair)
        return None if peak is None else teraflops_per_second(flops, median_ms) / (processes * peak)

    rate = 1e3 * tokens / median_ms
    return {"tokens_per_second": rate, "mfu": utilisation(True), "mfu_causal": utilisation(False)}


def varying(frame: pd.DataFrame, axes: Iterable[str] = AXES) -> list[str]:
    """The model, batch and length, and the other axes that have several values."""
    return [name for name in axes if name in ("model", "batch", "length") or frame[name].nunique(dropna=False) > 1]


def paired(
    frame: pd.DataFrame, axis: str, baseline: object, figures: Mapping[str, str], axes: Iterable[str] = AXES
) -> str:
    """A table of rows next to those that differ in ``axis`` alone, which is ``baseline`` there; "" without any.

    A cell is `before → after (ratio)`, with the interval of the ratio: before over after, or after over before in a
    column of `MORE_IS_BETTER`, so that above 1 is always a gain. The last line has the geometric means of the ratios.
    ``figures`` are titles by column.
    """
    frame = frame[frame["status"] == "ok"]
    others = [name for name in axes if name != axis]
    before = frame[frame[axis] == baseline]
    pairs = frame[frame[axis] != baseline].merge(before, on=others, suffixes=("", BEFORE))
    if pairs.empty:
        return ""
    shown = pairs[[*varying(pairs, others), axis]].rename(columns={axis: f"{axis}: {baseline} →"})
    last = dict.fromkeys(shown, "") | {shown.columns[0]: "geometric mean"}
    rows = pairs.to_dict("records")
    for column, title in figures.items():
        pairs_of = [(row, _before(row)) if column in MORE_IS_BETTER else (_before(row), row) for row in rows]
        ratios = [quotient(above, below, column) for above, below in pairs_of]
        cells = zip(rows, ratios, strict=True)
        shown[title] = [ABSENT if ratio is None else _arrow(row, column, ratio) for row, ratio in cells]
        known = [ratio for ratio in ratios if ratio is not None and min(ratio) > 0]
        means = [statistics.geometric_mean(ends) for ends in zip(*known, strict=True)]
        last[title] = f"{with_interval(*means)}×" if means else ABSENT
    return markdown(pd.concat([shown, pd.DataFrame([last])]) if len(rows) > 1 else shown)


def _before(row: Row) -> Row:
    return {name.removesuffix(BEFORE): value for name, value in row.items() if name.endswith(BEFORE)}


def _arrow(row: Row, column: str, ratio: tuple[float, float, float]) -> str:
    before, after = (number(float(row[name])) for name in (column + BEFORE, column))
    return f"{before} → {after} ({with_interval(*ratio)}×)"
