"""What a training run is: every option once, with its default, its help and its check, in a frozen value kept as JSON.

The command line and the TOML file are both read from the fields of `TrainingConfig`: see `options`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..attention.dispatch import NAMES
from ..files import write_text
from ..parallel.layout import MODES, NONE
from ..transformer import PRESETS, TransformerConfig, preset
from ..transformer.presets import Sizes

TINY = "tiny"
TINY_SIZES = Sizes(d_model=128, d_ff=384, num_layers=4, num_heads=4)
"""About 0.9 million parameters with bytes as tokens: what a laptop trains in minutes."""
TINY_CONTEXT = 128

VOCABULARY_MULTIPLE = 64
"""The head's matrix has rows in multiples of this: with 257, tensor cores would take a slower path."""

MOST, MOST_SEED = 2**31 - 1, 2**64 - 1
"""Of whole numbers, and of the seed, which is what torch takes; a window may be any number."""

LOGGERS = ("tensorboard", "wandb")
DTYPES = ("auto", "float32", "bfloat16")

T = TypeVar("T")


def _option(default: T, group: str, text: str, *, on_resume: bool = False) -> T:
    """A field with its help; `on_resume`: whether a resumed run may change it, because it does not enter the order of
    the data, the model's sizes, or what an update is."""
    return dataclasses.field(default=default, metadata={"group": group, "help": text, "on_resume": on_resume})


DATA, MODEL, UPDATE, COMPUTE, OUTPUT = "data", "model", "optimisation", "computation", "what comes out"


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Every option of a training run. Units: tokens, sequences and optimizer steps, as each help text says.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option is out of its range; the message names it, what was expected and what came.
    """

    data: tuple[str, ...] = _option((), DATA, "text files, and folders that are searched for them")
    files: str = _option("*", DATA, "which files of the folders are read, by name: '*.md'")
    val_data: tuple[str, ...] = _option((), DATA, "files and folders to validate on, in place of --val-fraction")
    val_fraction: float = _option(0.05, DATA, "the part of the tokens, at their end, to validate on; 0 for none")
    tokenizer: str | None = _option(None, DATA, "a tokenizers JSON file, or a tiktoken file (default: bytes)")
    tokens: str = _option("runs/tokens", DATA, "the folder where tokenised text is kept for later runs")

    preset: str = _option(TINY, MODEL, "the model's sizes: tiny, or a name of cs336_systems.transformer.PRESETS")
    suite: str = _option("2025", MODEL, "the suite that the preset belongs to")
    context_length: int | None = _option(None, MODEL, "tokens in a sequence (default: the preset's)")
    vocab_size: int | None = _option(None, MODEL, "rows of the embedding (default: the tokenizer's, rounded up to 64)")
    d_model: int | None = _option(None, MODEL, "width of the residual stream (default: the preset's)")
    d_ff: int | None = _option(None, MODEL, "inner width of the feed-forward networks (default: the preset's)")
    num_layers: int | None = _option(None, MODEL, "blocks (default: the preset's)")
    num_heads: int | None = _option(None, MODEL, "query heads (default: the preset's)")
    num_kv_heads: int | None = _option(None, MODEL, "key and value heads (default: as query heads)")
    window: int | None = _option(None, MODEL, "how many tokens a query sees (default: all before it)")
    tie_embeddings: bool = _option(False, MODEL, "use the embedding's matrix as the head's")
    attn: str = _option("auto", MODEL, f"what computes attention: {', '.join(NAMES)}", on_resume=True)

    steps: int = _option(400, UPDATE, "optimizer steps of the whole run", on_resume=True)
    batch_size: int = _option(16, UPDATE, "sequences in an optimizer step")
    learning_rate: float = _option(3e-3, UPDATE, "at its highest, after the warm-up")
    min_learning_rate: float | None = _option(None, UPDATE, "at the last step (default: a tenth of the highest)")
    warmup_steps: int = _option(40, UPDATE, "steps in which the learning rate rises")
    weight_decay: float = _option(0.1, UPDATE, "of matrices, embeddings among them; gains of norms have none")
    beta1: float = _option(0.9, UPDATE, "AdamW's average of gradients")
    beta2: float = _option(0.95, UPDATE, "AdamW's average of squared gradients")
    grad_clip: float | None = _option(1.0, UPDATE, "the largest global norm of a gradient; 0 for no limit")
    seed: int = _option(0, UPDATE, "of the parameters, and of the order of the data")

    device: str = _option("auto", COMPUTE, "cuda, cuda:1, mps or cpu (default: the first there is)", on_resume=True)
    dtype: str = _option("auto", COMPUTE, "bfloat16 autocast, or float32 (default: bfloat16 on GPUs)", on_resume=True)
    micro_batch_size: int | None = _option(
        None, COMPUTE, "sequences at a time, whose gradients accumulate (default: all of a step)", on_resume=True
    )
    parallel: str = _option(
        NONE, COMPUTE, f"how the processes that torchrun starts share the work: {', '.join(MODES)}", on_resume=True
    )
    context_size: int | None = _option(
        None, COMPUTE, "processes that share each sequence; 0 for all (default: all, with context)", on_resume=True
    )
    reshard: bool = _option(
        True,
        COMPUTE,
        "with fsdp, gather parameters anew for the backward pass instead of keeping them",
        on_resume=True,
    )
    compile: bool = _option(False, COMPUTE, "compile the model with torch.compile", on_resume=True)
    recompute_every: int | None = _option(
        None, COMPUTE, "keep only the input of every so many blocks for the backward pass", on_resume=True
    )
    loss_chunk: int | None = _option(None, COMPUTE, "tokens whose logits are in memory at a time", on_resume=True)

    out: str | None = _option(None, OUTPUT, "the run's folder (default: runs/<preset>-<date>)")
    log_every: int = _option(10, OUTPUT, "steps between lines of progress", on_resume=True)
    eval_every: int = _option(100, OUTPUT, "steps between validations; 0 for none", on_resume=True)
    eval_sequences: int = _option(64, OUTPUT, "sequences of a validation, at most", on_resume=True)
    sample_every: int = _option(100, OUTPUT, "steps between samples of text; 0 for none", on_resume=True)
    sample_tokens: int = _option(200, OUTPUT, "tokens of a sample", on_resume=True)
    sample_prompt: str = _option("", OUTPUT, "what samples begin with (default: the end of a document)", on_resume=True)
    temperature: float = _option(0.8, OUTPUT, "of samples; 0 for the likeliest token", on_resume=True)
    top_p: float | None = _option(None, OUTPUT, "draw samples from the likeliest tokens of this mass", on_resume=True)
    checkpoint_every: int = _option(100, OUTPUT, "steps between checkpoints", on_resume=True)
    keep: int = _option(3, OUTPUT, "how many checkpoints are kept", on_resume=True)
    plot: bool = _option(True, OUTPUT, "draw the loss, where matplotlib is installed", on_resume=True)
    log_to: tuple[str, ...] = _option((), OUTPUT, f"also log to: {', '.join(LOGGERS)}", on_resume=True)

    def __post_init__(self) -> None:
        for name, kind in field_types().items():
            object.__setattr__(self, name, _typed(name, getattr(self, name), kind))
        if not self.data:
            raise ValueError("data must be at least one file or folder; got none")
        if self.grad_clip == 0:
            object.__setattr__(self, "grad_clip", None)
        if self.context_size == 0:
            object.__setattr__(self, "context_size", None)
        self._check_ranges()
        self._check_choices()

    def _check_ranges(self) -> None:
        at_least_one = "steps batch_size micro_batch_size recompute_every loss_chunk log_every eval_sequences "
        at_least_one += "sample_tokens checkpoint_every keep context_size"
        not_negative = "warmup_steps weight_decay eval_every sample_every temperature seed min_learning_rate"
        for least, names in ((1, at_least_one), (0, not_negative)):
            for name in names.split():
                value = getattr(self, name)
                if value is not None and not value >= least:
                    raise ValueError(f"{name} must be at least {least}; got {value}")
        for name, kind in field_types().items():
            most = {"window": None, "seed": MOST_SEED}.get(name, MOST)
            if kind in (int, int | None) and most is not None and (getattr(self, name) or 0) > most:
                raise ValueError(f"{name} must be at most {most}; got {getattr(self, name)}")
        for name in ("learning_rate", "grad_clip"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive; got {value}")
        for name in ("val_fraction", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1; got {getattr(self, name)}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1; got {self.top_p}")
        if self.lowest_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate must be at most learning_rate, {self.learning_rate}; got {self.min_learning_rate}"
            )
        self.micro_batch()

    def _check_choices(self) -> None:
        suites = {suite: (TINY, *names) for suite, names in PRESETS.items()}
        _check_choice("suite", self.suite, tuple(suites))
        _check_choice("preset", self.preset, suites[self.suite])
        _check_choice("attn", self.attn, NAMES)
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("parallel", self.parallel, MODES)
        for name in self.log_to:
            _check_choice("log_to", name, LOGGERS)

    def micro_batch(self, groups: int = 1) -> int:
        """Sequences that go through the model at a time, where so many groups of processes divide a step among them.

        Raises:
            ValueError: the sequences of a step cannot be divided so.
        """
        if self.batch_size % groups:
            raise ValueError(
                f"batch_size must be a multiple of {groups}, the groups of processes with sequences of their own; got "
                f"{self.batch_size}"
            )
        of_a_group = self.batch_size // groups
        micro_batch = of_a_group if self.micro_batch_size is None else self.micro_batch_size
        if of_a_group % micro_batch:
            divided = "batch_size" if groups == 1 else f"batch_size / {groups}"
            raise ValueError(f"micro_batch_size must divide {divided}, {of_a_group}; got {micro_batch}")
        return micro_batch

    @property
    def lowest_rate(self) -> float:
        """The learning rate at the last step."""
        return self.learning_rate / 10 if self.min_learning_rate is None else self.min_learning_rate

    def model(self, tokens: int) -> TransformerConfig:
        """The model's config for a tokenizer of so many tokens.

        Raises:
            ValueError: ``vocab_size`` is less than ``tokens``, or the sizes do not fit together.
        """
        if self.vocab_size is not None and self.vocab_size < tokens:
            raise ValueError(f"vocab_size must be at least the tokenizer's {tokens}; got {self.vocab_size}")
        rounded = -(-tokens // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        sizes = {"vocab_size": self.vocab_size or rounded, "tie_embeddings": self.tie_embeddings, "attn": self.attn}
        names = ("context_length", "d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads", "window")
        changes = sizes | {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.preset != TINY:
            return preset(self.preset, self.suite, **changes)
        settings: dict[str, Any] = {"context_length": TINY_CONTEXT} | TINY_SIZES._asdict() | changes
        return TransformerConfig(**settings)

    def save(self, path: Path) -> None:
        """Write the options as JSON, in one step."""
        write_text(path, json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> TrainingConfig:
        """The options that `save` wrote. Raises ValueError when they are others than those of this version, or none."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} must hold the options of a run as JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold the options of a run as JSON; got a {type(values).__name__}")
        check_names(values, str(path))
        return cls(**values)


def field_types() -> dict[str, Any]:
    """The type of every option, by name."""
    return typing.get_type_hints(TrainingConfig)


def check_names(values: Mapping[str, object], where: str) -> None:
    """Raise ValueError, naming them, when there are keys that are no options."""
    unknown = sorted(set(values) - set(field_types()))
    if unknown:
        raise ValueError(f"{where} must hold options of the training command alone; got unknown {', '.join(unknown)}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")


def _typed(name: str, value: Any, kind: Any) -> Any:
    """The value as its field has it: whole numbers do for floats, and lists, which JSON and TOML have, for tuples."""
    optional = typing.get_origin(kind) in (typing.Union, types.UnionType)
    if optional and value is None:
        return None
    inner = typing.get_args(kind)[0] if optional else kind
    if typing.get_origin(inner) is tuple:
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise TypeError(f"{name} must be a list of strings; got {value!r}")
        return tuple(value)
    if inner is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, inner) or (inner is int and isinstance(value, bool)):
        raise TypeError(f"{name} must be of type {inner.__name__}; got {value!r} of type {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be finite; got {value}")
    return value
