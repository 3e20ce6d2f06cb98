"""Steps of generation: prompts once, then one token of each sequence at a time, recorded and compiled if possible."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..attention.precision import without_autocast
from ..kernels.torch_names import has_forward_hooks, recompiled
from .cache import KVCache, Step
from .layers import Linear
from .model import Transformer

WARM_UP = 2
"""Steps before one is recorded: they compile kernels, and have libraries allocate what they keep."""

MOST_VARIANTS = 256
"""Of models, batches and capacities that steps are compiled for before torch.compile gives up."""

NextLogits = Callable[[Transformer, Tensor, Step], Tensor]


class Decoder:
    """A model with a cache, that takes prompts and then tokens one at a time.

    >>> decoder = Decoder(model, batch=2, capacity=64)
    >>> logits = decoder.prefill([[1, 2, 3], [4]])
    >>> for _ in range(10):
    ...     logits = decoder.step(logits.argmax(-1))

    A step of one token is a long row of small kernels, most of which take the device less time than the host needs to
    launch them. Recorded as a CUDA graph they are launched all at once. The first step records it.

    Whether autocast is on, and with which dtype, is asked when a decoder is made. Steps that are recorded or compiled
    then use copies of the linear layers' weights in that dtype, made once, and see no later changes of the weights: a
    step that casts them reads and writes more than it computes with. A model that is in that dtype itself,
    ``model.to(torch.bfloat16)``, needs no copies.

    Args:
        model: on any device.
        batch: how many sequences.
        capacity: the longest of them in tokens, at most the model's context length. The last token that is generated
            takes no room, for it does not go through the model.
        graph: whether steps are recorded; None where that is possible (see `why_no_graph`).
        compile: whether steps are compiled by ``torch.compile``, as one graph. It takes a while, once for each model,
            batch and dtype, and again for a second capacity.

    ``cache`` is the `KVCache`, ``recorded`` says whether steps are.

    Raises:
        TypeError, ValueError: a size is not a positive int, or ``graph`` is True where steps cannot be recorded.
    """

    def __init__(
        self, model: Transformer, batch: int, capacity: int, *, graph: bool | None = None, compile: bool = False
    ) -> None:
        reason = why_no_graph(model) if graph is not False else "it was not asked for"
        if graph and reason is not None:
            raise ValueError(f"graph must be None or False here: {reason}")
        self.cache = KVCache(batch, capacity)
        self.recorded = reason is None
        self._device = next(model.parameters()).device
        kind = self._device.type
        self._dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        # What autocast keeps of weights that it has cast is freed when autocast ends, which a recorded step outlives.
        self._keeps_casts = not (self.recorded or compile)
        self._model = model if self._dtype is None or self._keeps_casts else with_cast_weights(model, self._dtype)
        self._next_logits = compiled_next_logits if compile else next_logits
        self._graph: torch.cuda.CUDAGraph | None = None
        self._tokens: Tensor | None = None
        self._logits: Tensor | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens of each sequence went through the model."""
        return self.cache.lengths

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> Float[Tensor, "batch vocab_size"]:
        """Take the first tokens of each sequence, and return the logits of what follows them.

        Args:
            prompts: of any lengths, at least one token each.

        Raises:
            TypeError, ValueError: they are not one for each sequence, or tokens are none of the vocabulary, or they do
                not fit into the cache, or there were some already.
        """
        counts = [len(prompt) for prompt in prompts]
        if len(counts) != self.cache.batch or min(counts) < 1:
            raise ValueError(
                f"prompts must be {self.cache.batch} sequences of at least one token; got lengths {counts}"
            )
        if max(self.lengths):
            raise ValueError(f"prompts must come first; got some after {max(self.lengths)} tokens")
        rows = checked_prompts(prompts, self._model.config.vocab_size)
        # Sequences begin together: what fills up the shorter ones comes after them, where causal attention hides it.
        padded = torch.tensor([row + [0] * (max(counts) - len(row)) for row in rows])
        last = torch.tensor(counts) - 1
        with self._autocast():
            logits = self._model(padded.to(self._device), cache=self.cache, logits_at=last.to(self._device))
        self.cache.advance(counts)
        return logits

    @torch.no_grad()
    def step(self, tokens: Int[Tensor, " batch"]) -> Float[Tensor, "batch vocab_size"]:
        """Take one further token of each sequence, and return the logits of what follows it.

        Nothing waits for the device. Where steps are recorded, every one writes its logits into the same memory: clone
        what is to outlive the next.

        Args:
            tokens: on the model's device.

        Raises:
            ValueError: the cache is full, there was no prompt, or tokens are not one for each sequence.
        """
        if tuple(tokens.shape) != (self.cache.batch,):
            raise ValueError(f"tokens must have shape ({self.cache.batch},); got {tuple(tokens.shape)}")
        if not max(self.lengths):
            raise ValueError("tokens must come after prompts; got some first")
        self.cache.reserve(1)
        if not self.recorded:
            logits = self._compute(tokens)
        else:
            if self._tokens is None:
                self._tokens = torch.empty_like(tokens)
            logits = self._replay(self._tokens.copy_(tokens))
        self.cache.advance([1] * self.cache.batch)
        return logits

    def _compute(self, tokens: Tensor) -> Tensor:
        with self._autocast():
            return self._next_logits(self._model, tokens, self.cache.begin(1, self._device))

    def _replay(self, tokens: Tensor) -> Tensor:
        if self._graph is None or self._logits is None:
            self._graph, self._logits = self._record(tokens)
        self._graph.replay()
        return self._logits

    def _record(self, tokens: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """The step as a graph, and where it writes its logits. It can be computed any number of times before it counts.

        Steps write what is theirs to the same slots each time, until the cache is told to advance.
        """
        with torch.cuda.device(self._device):
            beside = torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                for _ in range(WARM_UP):
                    self._compute(tokens)
            torch.cuda.current_stream().wait_stream(beside)
            graph = torch.cuda.CUDAGraph()
            # Without a stream torch records on one of the GPU where a graph was first recorded in this process. Other
            # threads may do as they please meanwhile.
            with torch.cuda.graph(graph, stream=beside, capture_error_mode="thread_local"):
                logits = self._compute(tokens)
        return graph, logits

    def _autocast(self) -> AbstractContextManager[Any]:
        """Autocast as it was when the decoder was made."""
        if self._dtype is None:
            return without_autocast(self._device)
        keeps = self._keeps_casts and torch.is_autocast_cache_enabled()
        return torch.autocast(self._device.type, self._dtype, cache_enabled=keeps)


def next_logits(model: Transformer, tokens: Int[Tensor, " batch"], step: Step) -> Float[Tensor, "batch vocab_size"]:
    """The logits of what follows one further token of each sequence, whose place is ``step``."""
    logits: Tensor = model(tokens[:, None], cache=step)
    return logits[:, 0]


def compiled_next_logits(model: Transformer, tokens: Tensor, step: Step) -> Tensor:
    """`next_logits` through ``torch.compile``."""
    with recompiled(MOST_VARIANTS) or nullcontext():
        return _compiler(tokens.is_cuda and len(tokens) == 1)(model, tokens, step)


@functools.cache
def _compiler(by_reductions: bool) -> NextLogits:
    """What compiles steps, those of one sequence with products as reductions.

    A product with a single row is a matrix read once. torch's libraries read a small one at a part of the memory's
    rate; Inductor has kernels that are at it, fused with what is around them, if it may search for their tiles.
    """
    options: dict[str, Any] | None = {"coordinate_descent_tuning": True} if by_reductions else None
    return torch.compile(next_logits, fullgraph=recompiled(MOST_VARIANTS) is not None, options=options)


def why_no_graph(model: nn.Module) -> str | None:
    """Why steps of a model cannot be recorded as a CUDA graph, or None where they can."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return f"a CUDA graph needs a model on a CUDA GPU; got one on {device}"
    if any(type(parameter) not in (Tensor, nn.Parameter) for parameter in model.parameters()):
        return "weights are spread over processes, which have to gather them in every step"
    for name, module in model.named_modules():
        if has_forward_hooks(module):
            return f"hooks would be called while a step is recorded, and not again; got some of {name or 'the model'}"
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            return "something is being recorded already"
    return None


def with_cast_weights(model: Transformer, dtype: torch.dtype) -> Transformer:
    """The same model with copies of the weights that autocast would cast, in its dtype; the others are shared."""
    kept: dict[int, Any] = {id(x): x for x in (*model.parameters(), *model.buffers())}

    def cast(weight: Tensor) -> nn.Parameter:
        # Autocast leaves float64 alone.
        return nn.Parameter(weight.detach().to(weight.dtype if weight.dtype == torch.float64 else dtype), False)

    for module in model.modules():
        if isinstance(module, Linear):
            kept[id(module.weight)] = cast(module.weight)
    copied = copy.deepcopy(model, kept)
    if copied.lm_head is None:
        # A tied head casts the embedding's matrix, which looking up tokens does not.
        copied.lm_head = Linear(model.config.d_model, model.config.vocab_size, "meta")
        copied.lm_head.weight = cast(model.token_embeddings.weight)
    return copied


def checked_prompts(prompts: Sequence[Sequence[int]] | Tensor, vocab_size: int) -> list[list[int]]:
    """Prompts as lists of tokens.

    Raises:
        TypeError, ValueError: they are not at least one sequence of at least one token each, below ``vocab_size``.
    """
    given = prompts.tolist() if isinstance(prompts, Tensor) else prompts
    try:
        # Also of NumPy's integers.
        rows = [[operator.index(token) for token in row] for row in given]
    except TypeError as error:
        raise TypeError(f"prompts must be sequences of ints, or a tensor (batch, length): {error}") from error
    if not rows:
        raise ValueError("prompts must be at least one sequence; got none")
    for index, row in enumerate(rows):
        if not row:
            raise ValueError(f"prompts must have at least one token each; got none in prompts[{index}]")
        if min(row) < 0 or max(row) >= vocab_size:
            wrong = min(row) if min(row) < 0 else max(row)
            raise ValueError(f"prompts must have tokens from 0 up to {vocab_size}; got {wrong} in prompts[{index}]")
    return rows
