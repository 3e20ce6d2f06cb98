"""Text generation: tokens sampled from logits, one of each sequence per step."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .config import TransformerConfig, check_positive, check_size
from .decoder import Decoder, check_prompts
from .model import Transformer

NOT_FINITE = -1
"""Stands for a token whose logits were not finite."""


@dataclass(frozen=True)
class Sampling:
    """How to sample a token.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: sample from the k most likely tokens; None for all.
        top_p: sample from the fewest most likely tokens whose probabilities, among those that ``top_k`` keeps, sum to
            at least this (Holtzman et al., 2020). None or 1 for all.

    Raises TypeError or ValueError if an attribute has the wrong type or is out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.temperature != 0 or isinstance(self.temperature, bool):
            check_positive("temperature", self.temperature)
        if self.top_k is not None:
            check_size("top_k", self.top_k)
        if self.top_p is not None:
            check_positive("top_p", self.top_p)
            if self.top_p > 1:
                raise ValueError(f"top_p must be at most 1; got {self.top_p}")

    def probabilities(self, logits: Float[Tensor, "batch vocab_size"]) -> Float[Tensor, "batch vocab_size"]:
        """The probability of each token, in float32 or float64; of equal logits the first ranks higher."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.temperature < torch.finfo(torch.float32).tiny:
            # GPUs flush a subnormal divisor to 0.
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        # Without the maximum, a division by a small temperature would overflow.
        probabilities = ((logits - logits.amax(-1, keepdim=True)) / self.temperature).softmax(-1)
        if self.top_k is None and self.top_p is None:
            return probabilities
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            ordered[:, self.top_k :] = 0
            ordered /= ordered.sum(-1, keepdim=True)
        if self.top_p is not None:
            before = ordered.cumsum(-1) - ordered
            before[:, 0] = 0  # keep the most likely token, however the sums are rounded
            ordered = ordered.masked_fill(before >= self.top_p, 0)
            ordered /= ordered.sum(-1, keepdim=True)
        return torch.zeros_like(ordered).scatter_(-1, order, ordered)

    def draw(
        self, logits: Float[Tensor, "batch vocab_size"], generator: torch.Generator | None = None
    ) -> Int[Tensor, " batch"]:
        """Sample a token for each row, without a host synchronisation; ``generator`` must be on the logits' device.

        The first of independent exponential arrivals with rates p is token i with probability p[i]. That is what
        ``torch.multinomial`` computes as well, but it then synchronises to check the probabilities.
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        probabilities = self.probabilities(logits)
        return (probabilities / torch.empty_like(probabilities).exponential_(generator=generator)).argmax(-1)


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]] | Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    stop_tokens: Collection[int] = (),
    use_cache: bool = True,
    graph: bool | None = None,
    compile: bool = False,
) -> list[list[int]]:
    """The new tokens of each sequence. The arguments are those of `stream`, which returns them step by step.

    Without stop tokens the host waits for the device only at the end.
    """
    sampling = Sampling(temperature, top_k, top_p)
    steps = _steps(model, prompts, max_new_tokens, sampling, seed, generator, use_cache, graph, compile)
    stops = _check_stop_tokens(stop_tokens, model.config.vocab_size)
    if stops:
        rows = zip(*_until_stopped(steps, stops), strict=True)
        return [[token for token in row if token is not None] for row in rows]
    drawn: list[list[int]] = torch.stack([*steps], 1).tolist()
    for number, tokens in enumerate(zip(*drawn, strict=True)):
        _require_finite(tokens, number)
    return drawn


def stream(
    model: Transformer,
    prompts: Sequence[Sequence[int]] | Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    stop_tokens: Collection[int] = (),
    use_cache: bool = True,
    graph: bool | None = None,
    compile: bool = False,
) -> Iterator[list[int | None]]:
    """Yield the next token of each sequence, step by step; None for a sequence that has ended.

    >>> for (token,) in stream(model, [[1, 2, 3]], 100, temperature=0):
    ...     print(token)

    Args:
        model: on any device; runs under autocast if that is on.
        prompts: the tokens of each sequence, of any lengths, or a tensor (batch, length).
        max_new_tokens: maximum number of new tokens per sequence.
        temperature, top_k, top_p: see `Sampling`.
        seed: of the random numbers, from -2**63 to 2**64 - 1: gives the same tokens every time on one device. If None,
            they come from ``generator``, or from torch's default generator.
        generator: on the model's device; excludes ``seed``.
        stop_tokens: tokens below ``vocab_size``. A sequence ends with the first one, which is part of it.
        use_cache: whether to keep keys and values. Otherwise every step computes the whole sequences again, with the
            same tokens but for rounding.
        graph: whether to capture the steps after the prompts in a CUDA graph; None to do so where possible: on a GPU,
            without hooks and without sharded weights. See `Decoder`.
        compile: whether to compile these steps with ``torch.compile``, which takes a while.

    Raises:
        TypeError, ValueError: an argument is invalid, or a sequence would exceed the context length. Raised by the
            call, before the first step.
        FloatingPointError: a logit is NaN or +inf, or all are -inf. Raised when the tokens reach the host.
    """
    sampling = Sampling(temperature, top_k, top_p)
    steps = _steps(model, prompts, max_new_tokens, sampling, seed, generator, use_cache, graph, compile)
    return _until_stopped(steps, _check_stop_tokens(stop_tokens, model.config.vocab_size))


def _steps(
    model: Transformer,
    prompts: Sequence[Sequence[int]] | Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int | None,
    generator: torch.Generator | None,
    use_cache: bool,
    graph: bool | None,
    compile: bool,
) -> Iterator[Int[Tensor, " batch"]]:
    """Check the arguments, and return an iterator over the tokens of each step, on the model's device."""
    if not isinstance(getattr(model, "config", None), TransformerConfig):
        raise TypeError(f"model must be a Transformer; got {type(model).__name__}")
    check_size("max_new_tokens", max_new_tokens)
    rows = check_prompts(prompts, model.config.vocab_size)
    longest, limit = max(map(len, rows)), model.config.context_length
    # The last new token does not go through the model.
    if longest + max_new_tokens - 1 > limit:
        raise ValueError(
            f"prompts and max_new_tokens must fit into the context length, {limit}; got a prompt of {longest} tokens "
            f"and max_new_tokens={max_new_tokens}"
        )
    generator = _check_generator(generator, seed, next(model.parameters()).device)
    if use_cache:
        decoder = Decoder(model, len(rows), longest + max_new_tokens - 1, graph=graph, compile=compile)
        return _with_cache(decoder, rows, max_new_tokens, sampling, generator)
    for name, value in (("graph", graph), ("compile", compile)):
        if value:
            raise ValueError(f"{name} must not be set with use_cache=False, where sequences grow; got {value}")
    return _without_cache(model, rows, max_new_tokens, sampling, generator)


def _check_stop_tokens(stop_tokens: Collection[int], vocab_size: int) -> frozenset[int]:
    try:
        stops = frozenset(operator.index(token) for token in stop_tokens)
    except TypeError as error:
        raise TypeError(f"stop_tokens must be ints: {error}") from None
    wrong = [token for token in stops if not 0 <= token < vocab_size]
    if wrong:
        raise ValueError(f"stop_tokens must be from 0 to {vocab_size - 1}; got {min(wrong)}")
    return stops


def _check_generator(
    generator: torch.Generator | None, seed: int | None, device: torch.device
) -> torch.Generator | None:
    """``generator``, or one with the seed."""
    if seed is not None:
        if generator is not None:
            raise ValueError("generator must be None where seed is given; got both")
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise TypeError(f"seed must be an int; got {seed!r} of type {type(seed).__name__}")
        if not -(2**63) <= seed < 2**64:
            raise ValueError(f"seed must be from -2**63 to 2**64 - 1; got {seed}")
        return torch.Generator(device).manual_seed(seed)
    if generator is not None:
        if not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator; got {type(generator).__name__}")
        if generator.device.type != device.type:
            raise ValueError(f"generator must be on the model's device, {device}; got one on {generator.device}")
    return generator


@torch.no_grad()
def _with_cache(
    decoder: Decoder, rows: list[list[int]], count: int, sampling: Sampling, generator: torch.Generator | None
) -> Iterator[Tensor]:
    logits = decoder.prefill(rows)
    drawn = sampling.draw(logits, generator)
    yield _mark(drawn, logits)
    for _ in range(count - 1):
        logits = decoder.step(drawn)
        drawn = sampling.draw(logits, generator)
        yield _mark(drawn, logits)


@torch.no_grad()
def _without_cache(
    model: Transformer, rows: list[list[int]], count: int, sampling: Sampling, generator: torch.Generator | None
) -> Iterator[Tensor]:
    device, longest = next(model.parameters()).device, max(map(len, rows))
    padded = torch.tensor([row + [0] * (longest + count - len(row)) for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    for number in range(count):
        logits = model(padded[:, : longest + number], logits_at=lengths - 1)
        drawn = sampling.draw(logits, generator)
        yield _mark(drawn, logits)
        padded[torch.arange(len(rows), device=device), lengths] = drawn
        lengths += 1


def _mark(drawn: Int[Tensor, " batch"], logits: Float[Tensor, "batch vocab_size"]) -> Int[Tensor, " batch"]:
    """The tokens, or `NOT_FINITE` where a logit is NaN or +inf, or all are -inf; without a host synchronisation."""
    return torch.where(logits.amax(-1).isfinite(), drawn, NOT_FINITE)


def _require_finite(tokens: Sequence[int | None], number: int) -> None:
    if NOT_FINITE in tokens:
        raise FloatingPointError(
            f"model must return finite logits; got NaN or infinity for new token {number} of "
            f"prompts[{tokens.index(NOT_FINITE)}]"
        )


def _until_stopped(steps: Iterator[Tensor], stop_tokens: frozenset[int]) -> Iterator[list[int | None]]:
    """The tokens of each step on the host, None for a sequence that has ended; stops when all have."""
    ended: list[bool] = []
    for number, step in enumerate(steps):
        drawn: list[int] = step.tolist()
        ended = ended or [False] * len(drawn)
        tokens = [None if end else token for end, token in zip(ended, drawn, strict=True)]
        _require_finite(tokens, number)
        yield tokens
        ended = [end or token in stop_tokens for end, token in zip(ended, drawn, strict=True)]
        if all(ended):
            return
