"""From options to what a run needs: device, tokenizer, tokens, the model's config; and a trained model from a folder.

All that can be wrong with a run is found here, before anything is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.types import Device

from ..attention.choose import choose
from ..attention.validation import check
from ..devices import choose_device
from ..parallel import Layout
from ..transformer import Transformer, TransformerConfig, swiglu
from . import checkpoint
from .config import TrainingConfig
from .corpus import Tokens, tokenise
from .data import Windows, split, validation_starts
from .estimate import MemoryEstimate, estimate_memory
from .metrics import require_loggers
from .tokens import Tokenizer, open_tokenizer

CONFIG = "config.json"
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Prepared:
    """What a run needs.

    Attributes:
        config: the options.
        layout: the processes that share it, and where this one computes.
        autocast: whether matrix products are in bfloat16.
        tokenizer: of its text.
        train, validation: the tokens; None where nothing is validated.
        data: a hash of all the tokens that the order of the data comes from.
        model: the model's sizes.
        about: what was read, in a sentence.
    """

    config: TrainingConfig
    layout: Layout
    autocast: bool
    tokenizer: Tokenizer
    train: Tokens
    validation: Tokens | None
    data: str
    model: TransformerConfig
    about: str

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.layout.device

    def windows(self) -> Windows:
        """The training tokens as sequences in their order."""
        return Windows(self.train, self.model.context_length, self.config.seed)

    def prompt(self) -> list[int]:
        """The tokens that samples begin with."""
        return list(self.tokenizer.encode(self.config.sample_prompt)) or [self.tokenizer.end_of_document]

    def memory(self) -> MemoryEstimate:
        """What a step is estimated to take on the device of each process."""
        config, groups = self.config, self.layout.data_size
        micro_batch = config.micro_batch(groups)
        return estimate_memory(
            self.model,
            micro_batch,
            autocast=self.autocast,
            recompute_every=config.recompute_every,
            loss_chunk=config.loss_chunk,
            shards=self.layout.shards,
            context_size=self.layout.context_size,
            reshard=config.reshard,
            accumulates=config.batch_size > micro_batch * groups,
            fused_ffn=swiglu.has_kernels(self.layout.device.type),
        )


def prepare(config: TrainingConfig, layout: Layout | None = None) -> Prepared:
    """Read, check and, where that is not done yet, tokenise what a run needs: by the main process before the others.

    Args:
        config: the options.
        layout: the processes, each of which calls this; None for this one alone, on the device of the options.

    Raises:
        ValueError, TypeError: an option cannot be met; the message says which, and why.
    """
    layout = Layout(choose_device(config.device)) if layout is None else layout
    with layout.main_first():
        return _prepare(config, layout)


def _prepare(config: TrainingConfig, layout: Layout) -> Prepared:
    require_loggers(config.log_to)
    tokenizer = open_tokenizer(config.tokenizer)
    model = config.model(tokenizer.size)
    folder = Path(config.tokens)
    corpus = tokenise(config.data, config.files, tokenizer, folder)
    train: Tokens
    validation: Tokens | None
    if config.val_data:
        train, validation = corpus.tokens, tokenise(config.val_data, config.files, tokenizer, folder).tokens
    elif config.val_fraction:
        train, validation = split(corpus.tokens, config.val_fraction)
    else:
        train, validation = corpus.tokens, None
    about = f"{corpus.files} files, {len(train):,} tokens to train on, {0 if validation is None else len(validation):,}"
    about += f" to validate on ({'as tokenised before' if corpus.reused else 'tokenised now'})"
    prepared = Prepared(
        config=config,
        layout=layout,
        autocast=uses_autocast(config.dtype, layout.device),
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        # With another fraction to validate on, the same text has another order.
        data=f"{corpus.digest}:{len(train)}",
        model=model,
        about=about,
    )
    _check(prepared)
    return prepared


def _check(prepared: Prepared) -> None:
    prepared.windows()
    prepared.config.micro_batch(prepared.layout.data_size)
    context, sharers = prepared.model.context_length, prepared.layout.context_size
    if sharers > 1 and context < 2 * sharers:
        raise ValueError(f"context_length must be at least 2 · {sharers} to be shared by {sharers}; got {context}")
    if prepared.validation is not None:
        validation_starts(prepared.validation, context, prepared.config.eval_sequences)
    if len(prepared.prompt()) > context:
        raise ValueError(
            f"sample_prompt must be at most {context} tokens, the context length; got {len(prepared.prompt())}"
        )
    _check_attention(prepared)


def _check_attention(prepared: Prepared) -> None:
    """Raise ValueError when the attention that was asked for cannot compute the model's calls on this device."""
    model = prepared.model
    one = torch.empty(1, device=prepared.device, dtype=torch.bfloat16 if prepared.autocast else torch.float32)
    q, k = (one.expand(1, heads, 2, model.d_head) for heads in (model.num_heads, model.kv_heads))
    window = None if model.effective_window is None else (model.effective_window - 1, 0)
    try:
        choose(check(q, k, k, causal=True, scale=None, return_lse=False, window=window), model.attn)
    except ValueError as error:
        raise ValueError(f"attn must be an implementation that can compute this model's attention: {error}") from None


def uses_autocast(dtype: str, device: torch.device) -> bool:
    """Whether products are in bfloat16: where asked for, and by itself on a GPU whose tensor cores have it."""
    if dtype == "auto":
        return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return dtype == "bfloat16"


def model_maker(prepared: Prepared) -> Callable[[Device], Transformer]:
    """What makes the model of a run on a device, from torch's generator."""
    return lambda device: Transformer(
        prepared.model, checkpoint_every=prepared.config.recompute_every, device=device, dtype=torch.float32
    )


def load_run(folder: str | Path, device: str = "auto") -> tuple[Transformer, Tokenizer]:
    """The model of a run's newest checkpoint, and its tokenizer.

    >>> model, tokenizer = load_run("runs/mine")
    >>> (tokens,) = generate(model, [list(tokenizer.encode("The "))], 200, temperature=0.8)
    >>> print(tokenizer.decode(tokens))

    Raises:
        ValueError: the folder is no run's, or has no whole checkpoint.
    """
    config = read_config(Path(folder))
    newest = newest_checkpoint(Path(folder))
    tokenizer = open_tokenizer(config.tokenizer)
    model = Transformer(config.model(tokenizer.size), device=choose_device(device))
    checkpoint.load(newest, model)
    return model.eval(), tokenizer


def read_config(folder: Path) -> TrainingConfig:
    """The options of the run in a folder. Raises ValueError when there are none."""
    path = folder / CONFIG
    if not path.exists():
        raise ValueError(f"the folder of a run must have a {CONFIG}; got {folder}, which has none")
    return TrainingConfig.load(path)


def newest_checkpoint(folder: Path) -> checkpoint.Checkpoint:
    """The newest whole checkpoint of the run in a folder. Raises ValueError when there is none."""
    newest = checkpoint.latest(folder / CHECKPOINTS)
    if newest is None:
        raise ValueError(f"the folder of a run must have a whole checkpoint; {folder} has none: begin anew")
    return newest
