"""Text of a model's own: the tokens that follow prompts, one step for all sequences at a time."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .config import TransformerConfig, check_size
from .decoder import Decoder, checked_prompts
from .model import Transformer
from .sampling import Sampling

LEAST_SEED, MOST_SEED = -(2**63), 2**64 - 1
"""What torch takes."""
NOT_FINITE = -1
"""In the place of a token that was drawn from logits that are not numbers."""


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
    """The new tokens of each sequence, all at once; arguments as for `stream`, which gives them as they come.

    Without stop tokens nothing waits for the device until all are drawn.
    """
    sampling = Sampling(temperature, top_k, top_p)
    drawn = _drawn(model, prompts, max_new_tokens, sampling, seed, generator, use_cache, graph, compile)
    stops = _checked_stop_tokens(stop_tokens, model.config.vocab_size)
    if not stops:
        rows: list[list[int]] = torch.stack([*drawn], 1).tolist()
        for number, tokens in enumerate(zip(*rows, strict=True)):
            _require_finite(tokens, number)
        return rows
    steps = _until_stopped(drawn, stops)
    return [[token for token in tokens if token is not None] for tokens in zip(*steps, strict=True)]


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
    """The next token of each sequence, step by step; None for a sequence that has ended.

    >>> for (token,) in stream(model, [[1, 2, 3]], 100, temperature=0):
    ...     print(token)

    Args:
        model: a `Transformer`, on any device; under autocast, if that is on.
        prompts: the tokens of each sequence, of any lengths, or a tensor (batch, length).
        max_new_tokens: after which a sequence ends at the latest.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: how many of the likeliest tokens may be drawn; None for all.
        top_p: the least probability that those which may be drawn have together; None for all.
        seed: of the tokens drawn, from -2**63 to 2**64 - 1, for the same ones each time on one device; they come from
            torch's own generator if None.
        generator: instead of a seed, on the model's device.
        stop_tokens: below ``vocab_size``; each ends its sequence, of which it is the last token.
        use_cache: whether keys and values are kept. Without them every step computes the whole sequences again: the
            tokens are the same but for rounding.
        graph: whether the steps after the prompts are recorded as a CUDA graph and replayed; None where that is
            possible: on a GPU, without hooks, and not with weights that are spread over processes. See `Decoder`.
        compile: whether these steps are compiled by ``torch.compile``, which takes a while.

    Raises:
        TypeError, ValueError: an argument is not what it has to be, or a sequence would exceed the context length. It
            is raised at the call, not at the first step.
        FloatingPointError: a logit is NaN or +inf, or all are -inf; it is raised where tokens come to the host.
    """
    sampling = Sampling(temperature, top_k, top_p)
    drawn = _drawn(model, prompts, max_new_tokens, sampling, seed, generator, use_cache, graph, compile)
    return _until_stopped(drawn, _checked_stop_tokens(stop_tokens, model.config.vocab_size))


def _drawn(
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
    """Arguments checked, and the tokens that are drawn for each sequence, step by step, on the model's device."""
    if not isinstance(getattr(model, "config", None), TransformerConfig):
        raise TypeError(f"model must be a Transformer; got {type(model).__name__}")
    check_size("max_new_tokens", max_new_tokens)
    rows = checked_prompts(prompts, model.config.vocab_size)
    # The last new token does not go through the model.
    longest, most = max(map(len, rows)) + max_new_tokens - 1, model.config.context_length
    if longest > most:
        raise ValueError(
            f"prompts and max_new_tokens must fit into the context length, {most}; got a prompt of "
            f"{max(map(len, rows))} tokens and max_new_tokens={max_new_tokens}"
        )
    generator = _checked_generator(generator, seed, next(model.parameters()).device)
    if use_cache:
        decoder = Decoder(model, len(rows), longest, graph=graph, compile=compile)
        return _with_cache(decoder, rows, max_new_tokens, sampling, generator)
    for name, value in (("graph", graph), ("compile", compile)):
        if value:
            raise ValueError(f"{name} must not be asked for without a cache: sequences grow; got {value}")
    return _without_cache(model, rows, max_new_tokens, sampling, generator)


def _checked_stop_tokens(stop_tokens: Collection[int], vocab_size: int) -> frozenset[int]:
    try:
        stops = frozenset(operator.index(token) for token in stop_tokens)
    except TypeError as error:
        raise TypeError(f"stop_tokens must be ints: {error}") from None
    outside = sorted(token for token in stops if not 0 <= token < vocab_size)
    if outside:
        raise ValueError(f"stop_tokens must be from 0 up to {vocab_size}; got {outside[0]}")
    return stops


def _checked_generator(
    generator: torch.Generator | None, seed: int | None, device: torch.device
) -> torch.Generator | None:
    """The generator that was given, or one with the seed."""
    if seed is not None:
        if generator is not None:
            raise ValueError("generator must be None where seed is given; got both")
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise TypeError(f"seed must be an int; got {seed!r} of type {type(seed).__name__}")
        if not LEAST_SEED <= seed <= MOST_SEED:
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
    yield _marked(drawn, logits)
    for _ in range(count - 1):
        logits = decoder.step(drawn)
        drawn = sampling.draw(logits, generator)
        yield _marked(drawn, logits)


@torch.no_grad()
def _without_cache(
    model: Transformer, rows: list[list[int]], count: int, sampling: Sampling, generator: torch.Generator | None
) -> Iterator[Tensor]:
    device, longest = next(model.parameters()).device, max(map(len, rows))
    padded = torch.tensor([row + [0] * (longest + count - len(row)) for row in rows], device=device)
    ends = torch.tensor([len(row) for row in rows], device=device)
    for number in range(count):
        logits = model(padded[:, : longest + number], logits_at=ends - 1)
        drawn = sampling.draw(logits, generator)
        yield _marked(drawn, logits)
        padded[torch.arange(len(rows), device=device), ends] = drawn
        ends += 1


def _marked(drawn: Int[Tensor, " batch"], logits: Float[Tensor, "batch vocab_size"]) -> Int[Tensor, " batch"]:
    """The tokens, `NOT_FINITE` where a logit is NaN or +inf, or all are -inf. The device is not waited for."""
    return torch.where(logits.amax(-1).isfinite(), drawn, NOT_FINITE)


def _require_finite(tokens: Sequence[int | None], number: int) -> None:
    if NOT_FINITE in tokens:
        raise FloatingPointError(
            "model must give finite logits; got NaN or infinity where new token "
            f"{number} of prompts[{tokens.index(NOT_FINITE)}] is drawn"
        )


def _until_stopped(steps: Iterator[Tensor], stop_tokens: frozenset[int]) -> Iterator[list[int | None]]:
    """The tokens of each step, None for a sequence that has ended; none after all have."""
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
