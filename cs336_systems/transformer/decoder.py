"""Decoding: prefill of the prompts, then one token of each sequence per step, with torch.compile and CUDA graphs."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..kernels.torch_names import has_forward_hooks, recompiled
from .cache import KVCache, Step
from .layers import Linear
from .model import Transformer

WARM_UP_STEPS = 2
"""Steps before the capture of a graph: they compile kernels and initialise libraries."""

RECOMPILE_LIMIT = 256
"""Models, batches and capacities that a process compiles steps for before torch.compile gives up."""

NextLogits = Callable[[Transformer, Tensor, Step], Tensor]


class Decoder:
    """A model with a KV cache: takes prompts, and then one token of each sequence at a time.

    >>> decoder = Decoder(model, batch=2, capacity=64)
    >>> logits = decoder.prefill([[1, 2, 3], [4]])
    >>> for _ in range(10):
    ...     logits = decoder.step(logits.argmax(-1))

    The first step captures a CUDA graph where possible, because most kernels of a step take less time on the GPU than
    their launch on the host. Autocast applies as it is when the decoder is constructed: captured or compiled steps then
    use copies of the linear layers' weights, cast once, and do not see later changes of the weights.

    Args:
        model: on any device.
        batch: number of sequences.
        capacity: maximum length of a sequence in tokens, at most the model's context length. The last generated token
            needs no slot.
        graph: whether to capture steps in a CUDA graph; None to do so where possible (see `why_no_graph`).
        compile: whether to compile steps with ``torch.compile``, as one graph. This takes a while, once for each model,
            batch and dtype, and again for a second capacity.

    Attributes:
        cache: the `KVCache`.
        uses_graph: whether steps are captured in a CUDA graph.

    Raises TypeError or ValueError if a size is not a positive int, or ``graph`` is True where steps cannot be captured.
    """

    def __init__(
        self, model: Transformer, batch: int, capacity: int, *, graph: bool | None = None, compile: bool = False
    ) -> None:
        reason = "graph is False" if graph is False else why_no_graph(model)
        if graph and reason is not None:
            raise ValueError(f"graph must be None or False here: {reason}")
        self.cache = KVCache(batch, capacity)
        self.uses_graph = reason is None
        self._device = next(model.parameters()).device
        kind = self._device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        reused = self.uses_graph or compile
        self._model = with_cast_weights(model, dtype) if reused and dtype is not None else model
        # The end of autocast frees its cache of cast weights, which a captured step would still read.
        self._autocast = functools.partial(
            torch.autocast, kind, dtype, enabled=dtype is not None, cache_enabled=False if reused else None
        )
        self._next_logits = compiled_next_logits if compile else next_logits
        self._captured: tuple[torch.cuda.CUDAGraph, Tensor, Tensor] | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each sequence that went through the model."""
        return self.cache.lengths

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]] | Tensor) -> Float[Tensor, "batch vocab_size"]:
        """Process the prompts, and return the logits of the token after each.

        Args:
            prompts: one sequence of at least one token for each sequence of the batch, of any lengths.

        Raises TypeError or ValueError if prompts are not such sequences, have tokens outside of the vocabulary or more
        than the cache's capacity, or came before.
        """
        rows = check_prompts(prompts, self._model.config.vocab_size)
        if len(rows) != self.cache.batch:
            raise ValueError(f"prompts must be {self.cache.batch} sequences; got {len(rows)}")
        if max(self.lengths):
            raise ValueError(f"prompts must come first; got some after {max(self.lengths)} tokens")
        counts = [len(row) for row in rows]
        # Right padding: the causal mask hides it from all tokens of the prompt.
        padded = torch.tensor([row + [0] * (max(counts) - len(row)) for row in rows])
        last = torch.tensor(counts) - 1
        with self._autocast():
            logits = self._model(padded.to(self._device), cache=self.cache, logits_at=last.to(self._device))
        self.cache.advance(counts)
        return logits

    @torch.no_grad()
    def step(self, tokens: Int[Tensor, " batch"]) -> Float[Tensor, "batch vocab_size"]:
        """Process one token of each sequence, and return the logits of the next one, without a host synchronisation.

        With a CUDA graph all steps write their logits to the same memory: clone those to keep.

        Args:
            tokens: on the model's device.

        Raises ValueError if the cache is full, there was no prompt, or tokens are not one for each sequence.
        """
        if tuple(tokens.shape) != (self.cache.batch,):
            raise ValueError(f"tokens must have shape ({self.cache.batch},); got {tuple(tokens.shape)}")
        if not max(self.lengths):
            raise ValueError("tokens must come after prompts; got some first")
        self.cache.reserve(1)
        logits = self._replay(tokens) if self.uses_graph else self._compute(tokens)
        self.cache.advance([1] * self.cache.batch)
        return logits

    def _compute(self, tokens: Tensor) -> Tensor:
        with self._autocast():
            return self._next_logits(self._model, tokens, self.cache.begin(1, self._device))

    def _replay(self, tokens: Tensor) -> Tensor:
        self._captured = self._captured or self._capture(tokens)
        graph, inputs, logits = self._captured
        inputs.copy_(tokens)
        graph.replay()
        return logits

    def _capture(self, tokens: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        """A step as a CUDA graph, and the tensors of its tokens and logits.

        The steps before the replay change nothing: until the cache advances, all write to the same slots.
        """
        inputs = tokens.clone()
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP_STEPS):
                    self._compute(inputs)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # torch's default capture stream belongs to the GPU of the process's first capture. With "thread_local"
            # other threads may call CUDA meanwhile.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                logits = self._compute(inputs)
        return graph, inputs, logits


def next_logits(model: Transformer, tokens: Int[Tensor, " batch"], step: Step) -> Float[Tensor, "batch vocab_size"]:
    """The logits after one new token of each sequence, whose slots are ``step``."""
    logits: Tensor = model(tokens[:, None], cache=step)
    return logits[:, 0]


def compiled_next_logits(model: Transformer, tokens: Tensor, step: Step) -> Tensor:
    """`next_logits` through ``torch.compile``."""
    with recompiled(RECOMPILE_LIMIT) or nullcontext():
        return _compiler(tokens.is_cuda and len(tokens) == 1)(model, tokens, step)


@functools.cache
def _compiler(single_row: bool) -> NextLogits:
    """The compiled `next_logits`.

    For one sequence a matrix product reads a matrix once. cuBLAS does not reach the memory's bandwidth for small ones;
    Inductor does, with fused reductions whose tiles ``coordinate_descent_tuning`` searches for.
    """
    options: dict[str, Any] | None = {"coordinate_descent_tuning": True} if single_row else None
    return torch.compile(next_logits, fullgraph=recompiled(RECOMPILE_LIMIT) is not None, options=options)


def why_no_graph(model: nn.Module) -> str | None:
    """The reason why a CUDA graph cannot capture a model's steps; None if it can."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return f"a CUDA graph needs a model on a CUDA GPU; got one on {device}"
    if any(type(parameter) not in (Tensor, nn.Parameter) for parameter in model.parameters()):
        return "every step gathers the sharded weights from other processes"
    for name, module in model.named_modules():
        if has_forward_hooks(module):
            return f"a replay does not call hooks; got hooks of {name or 'the model'}"
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            return "the current stream is being captured already"
    return None


def with_cast_weights(model: Transformer, dtype: torch.dtype) -> Transformer:
    """A copy of a model with its linear layers' weights cast to ``dtype``; it shares all other tensors."""

    def cast(weight: Tensor) -> nn.Parameter:
        # Autocast does not cast float64.
        return nn.Parameter(weight.detach().to(weight.dtype if weight.dtype == torch.float64 else dtype), False)

    memo: dict[int, Any] = {id(x): x for x in (*model.parameters(), *model.buffers())}
    memo |= {id(module.weight): cast(module.weight) for module in model.modules() if isinstance(module, Linear)}
    copied = copy.deepcopy(model, memo)
    if copied.lm_head is None:
        # A tied head casts the embedding's matrix; looking up tokens does not.
        copied.lm_head = Linear(model.config.d_model, model.config.vocab_size, "meta")
        copied.lm_head.weight = cast(model.token_embeddings.weight)
    return copied


def check_prompts(prompts: Sequence[Sequence[int]] | Tensor, vocab_size: int) -> list[list[int]]:
    """Prompts as lists of Python ints.

    Raises TypeError or ValueError if prompts are not one or more sequences of one or more tokens below ``vocab_size``.
    """
    try:
        listed = prompts.tolist() if isinstance(prompts, Tensor) else prompts
        rows = [[operator.index(x) for x in row] for row in listed]  # accepts NumPy's integers too
    except TypeError as error:
        raise TypeError(f"prompts must be sequences of ints, or a tensor (batch, length): {error}") from error
    if not rows:
        raise ValueError("prompts must be at least one sequence; got none")
    for index, row in enumerate(rows):
        if not row:
            raise ValueError(f"prompts must have at least one token each; got none in prompts[{index}]")
        wrong = [token for token in row if not 0 <= token < vocab_size]
        if wrong:
            raise ValueError(f"prompts must have tokens from 0 to {vocab_size - 1}; got {wrong[0]} in prompts[{index}]")
    return rows
