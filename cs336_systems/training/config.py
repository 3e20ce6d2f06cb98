"""The options of a training run: one frozen dataclass, from which argparse makes the flags."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..attention.validation import IMPLEMENTATIONS
from ..parallel.layout import MODES
from ..transformer import Sampling, TransformerConfig, preset
from ..transformer.presets import Sizes

TINY = "tiny"
TINY_SIZES = Sizes(d_model=128, d_ff=384, num_layers=4, num_heads=4)
"""About 0.9 million parameters with bytes as tokens: trains on a laptop in minutes."""
TINY_CONTEXT_LENGTH = 128
VOCAB_MULTIPLE = 64
"""Tensor cores take a slower path for 257 columns than for 320."""
DTYPES = ("auto", "float32", "bfloat16")

_EPILOG = """\
examples:
  python -m cs336_systems.training --data README.md docs/*.md
  torchrun --nproc-per-node 8 -m cs336_systems.training --data text/ --preset large --parallel fsdp --compile
  python -m cs336_systems.training --resume runs/tiny-2026-01-31-120000

exit codes: 0 done; 1 training failed; 2 the options cannot be used; 130 or 143 stopped by SIGINT or SIGTERM, after a
checkpoint
"""


def _free(default: Any, text: str, *, fixed: bool = False) -> Any:
    """An option that a resumed run can change."""
    return dataclasses.field(default=default, metadata={"help": text, "fixed": fixed})


_fixed = functools.partial(_free, fixed=True)
"""An option that defines the data, the model or the update: a resumed run cannot change it."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Every option of a training run; ``--help`` describes each. Raises ValueError if one is out of range."""

    data: tuple[str, ...] = _fixed((), "text files, and folders that are searched for text files")
    files: str = _fixed("*.txt", "pattern for the names of the files in these folders")
    val_data: tuple[str, ...] = _fixed((), "files and folders for validation, instead of --val-fraction")
    val_fraction: float = _fixed(0.05, "fraction of the tokens, at the end, held out for validation; 0 for none")
    tokenizer: str | None = _fixed(None, "a tokenizer.json of the package tokenizers (default: bytes)")

    preset: str = _fixed(TINY, "model sizes: tiny, or a name in cs336_systems.transformer.PRESETS")
    suite: str = _fixed("2025", "suite of the preset")
    context_length: int | None = _fixed(None, "tokens in a sequence (default: the preset's)")
    d_model: int | None = _fixed(None, "width of the residual stream (default: the preset's)")
    d_ff: int | None = _fixed(None, "inner width of the feed-forward network (default: the preset's)")
    num_layers: int | None = _fixed(None, "number of blocks (default: the preset's)")
    num_heads: int | None = _fixed(None, "query heads (default: the preset's)")
    num_kv_heads: int | None = _fixed(None, "key and value heads (default: as many as query heads)")
    window: int | None = _fixed(None, "sliding window in tokens (default: full causal attention)")
    tie_embeddings: bool = _fixed(False, "share one matrix between the embedding and the head")
    attn: str = _free("auto", f"attention implementation: {', '.join(IMPLEMENTATIONS)}")

    steps: int = _free(400, "optimizer steps of the whole run")
    batch_size: int = _fixed(16, "sequences per optimizer step, over all processes")
    learning_rate: float = _fixed(3e-3, "peak learning rate, reached after the warm-up")
    min_learning_rate: float | None = _fixed(None, "learning rate of the last step (default: a tenth of the peak)")
    warmup_steps: int = _fixed(40, "steps of linear warm-up")
    weight_decay: float = _fixed(0.1, "AdamW's weight decay, of matrices only")
    beta1: float = _fixed(0.9, "AdamW's decay rate of the first moment")
    beta2: float = _fixed(0.95, "AdamW's decay rate of the second moment")
    grad_clip: float | None = _fixed(1.0, "largest global norm of the gradient; 0 for no clipping")
    seed: int = _fixed(0, "seed of the initial parameters and of the order of the data")

    device: str = _free("auto", "cuda, cuda:1, mps or cpu (default: the first available)")
    threads: int | None = _free(None, "threads on a CPU (default: OMP_NUM_THREADS, else the fastest number)")
    dtype: str = _free("auto", "bfloat16 autocast, or float32 (default: bfloat16 on GPUs that support it)")
    micro_batch_size: int | None = _free(None, "sequences per forward pass (default: the whole batch)")
    parallel: str = _free("none", f"how torchrun's processes share the work: {', '.join(MODES)}")
    context_size: int | None = _free(None, "processes that share a sequence; 0 for all (default: all)")
    reshard: bool = _free(True, "with fsdp, free parameters after the forward pass and gather them again")
    compile: bool = _free(False, "use torch.compile")
    recompute_every: int | None = _free(None, "activation checkpointing: keep only the input of every n-th block")
    loss_chunk: int | None = _free(None, "tokens whose logits are in memory at a time (default: all)")

    out: str | None = _free(None, "the run's folder (default: runs/<preset>-<date>)")
    log_every: int = _free(10, "steps between progress lines")
    eval_every: int = _free(100, "steps between validations; 0 for none")
    eval_sequences: int = _free(64, "sequences in a validation, at most")
    sample_every: int = _free(100, "steps between samples of text; 0 for none")
    sample_tokens: int = _free(200, "tokens in a sample")
    sample_prompt: str = _free("", "prompt of the samples (default: the end-of-document token)")
    temperature: float = _free(0.8, "temperature of the samples; 0 for greedy decoding")
    top_p: float | None = _free(None, "nucleus sampling: probability mass to sample from")
    checkpoint_every: int = _free(100, "steps between checkpoints")
    keep: int = _free(3, "number of checkpoints kept")

    def __post_init__(self) -> None:
        for name in ("data", "val_data"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("grad_clip", "context_size"):
            object.__setattr__(self, name, getattr(self, name) or None)
        if not self.data:
            raise ValueError("data must be at least one file or folder; got none")
        sizes = "steps batch_size micro_batch_size context_size recompute_every loss_chunk log_every eval_sequences"
        sizes += " threads sample_tokens checkpoint_every keep"
        self._check(sizes, lambda value: 1 <= value < 10**8, "from 1 to 99999999")
        self._check("warmup_steps eval_every sample_every", lambda value: value >= 0, "at least 0")
        self._check("seed", lambda value: 0 <= value < 2**64, "from 0 to 2**64 - 1")
        self._check("weight_decay min_learning_rate", lambda value: 0 <= value < math.inf, "at least 0 and finite")
        self._check("learning_rate grad_clip", lambda value: 0 < value < math.inf, "positive and finite")
        self._check("val_fraction beta1 beta2", lambda value: 0 <= value < 1, "at least 0 and below 1")
        self._check("dtype", lambda value: value in DTYPES, f"one of {', '.join(DTYPES)}")
        Sampling(self.temperature, None, self.top_p)
        self._check("min_learning_rate", lambda value: value <= self.learning_rate, "at most learning_rate")

    def _check(self, names: str, condition: Callable[[Any], bool], expected: str) -> None:
        for name in names.split():
            value = getattr(self, name)
            if value is not None and not condition(value):
                raise ValueError(f"{name} must be {expected}; got {value}")

    def micro_batch(self, data_size: int) -> int:
        """Sequences per forward pass of each of ``data_size`` groups; ValueError if they do not divide a batch."""
        if self.batch_size % data_size:
            raise ValueError(f"batch_size must be a multiple of {data_size} groups of processes; got {self.batch_size}")
        local = self.batch_size // data_size
        micro_batch = self.micro_batch_size or local
        if local % micro_batch:
            raise ValueError(f"micro_batch_size must divide the {local} sequences of each group; got {micro_batch}")
        return micro_batch

    @property
    def lowest_rate(self) -> float:
        """Learning rate of the last step."""
        return self.learning_rate / 10 if self.min_learning_rate is None else self.min_learning_rate

    def model(self, vocab_size: int) -> TransformerConfig:
        """The model's config for a tokenizer with ``vocab_size`` tokens. Raises ValueError if sizes do not fit."""
        names = {field.name for field in dataclasses.fields(TransformerConfig)} & {*vars(self)}
        sizes: dict[str, Any] = {"vocab_size": -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE}
        sizes |= {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.preset != TINY:
            return preset(self.preset, self.suite, **sizes)
        return TransformerConfig(**{"context_length": TINY_CONTEXT_LENGTH} | TINY_SIZES._asdict() | sizes)

    def resumed(self, changes: dict[str, Any]) -> TrainingConfig:
        """These options with changes, for a resumed run. Raises ValueError if one of them is fixed."""
        new = dataclasses.replace(self, **changes)
        for field in dataclasses.fields(self):
            before, after = getattr(self, field.name), getattr(new, field.name)
            if before != after and field.metadata["fixed"]:
                raise ValueError(f"{field.name} must stay {before!r} in a resumed run; got {after!r}")
        return new

    @classmethod
    def load(cls, path: Path) -> TrainingConfig:
        """The options in a JSON file. Raises ValueError if the file is missing or holds something else."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} must hold the options of a training run: {error}") from error


def build_parser() -> argparse.ArgumentParser:
    """``--resume`` and a flag for each field of `TrainingConfig`; only flags that are given appear in the result."""
    parser = argparse.ArgumentParser(
        prog="python -m cs336_systems.training",
        description="Train a Transformer on text files. A run that was interrupted, or killed, can be resumed.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="resume the run in this folder")
    hints = typing.get_type_hints(TrainingConfig)
    for field in dataclasses.fields(TrainingConfig):
        hint, text = hints[field.name], field.metadata["help"].replace("%", "%%")
        if field.default not in (None, (), "", "auto"):
            text += f" (default: {field.default})"
        how: dict[str, Any] = {"type": typing.get_args(hint)[0] if isinstance(hint, types.UnionType) else hint}
        if hint is bool:
            how = {"action": argparse.BooleanOptionalAction}
        elif typing.get_origin(hint) is tuple:
            how = {"nargs": "+"}
        parser.add_argument(f"--{field.name.replace('_', '-')}", help=text, **how)
    return parser
