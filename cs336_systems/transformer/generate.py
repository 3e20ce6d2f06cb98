"""Text of a model's own: the tokens that follow prompts, one step for all sequences at a time."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from .cache import KVCache
from .config import check_size
from .model import Transformer
from .sampling import Sampling


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
) -> list[list[int]]:
    """The new tokens of each sequence, all at once; arguments as for `stream`, which gives them as they come."""
    steps = stream(
        model,
        prompts,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        generator=generator,
        stop_tokens=stop_tokens,
        use_cache=use_cache,
    )
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
        seed: of the tokens drawn, for the same ones each time on one device; from torch's own generator if None.
        generator: instead of a seed, on the model's device.
        stop_tokens: each ends its sequence, of which it is the last token.
        use_cache: whether keys and values are kept. Without them every step computes the whole sequences again: the
            tokens are the same but for rounding.

    Raises:
        TypeError, ValueError: an argument is not what it has to be, or a sequence would exceed the context length. It
            is raised at the call, not at the first step.
    """
    check_size("max_new_tokens", max_new_tokens)
    sampling = Sampling(temperature, top_k, top_p)
    rows = _checked(prompts, model.config.vocab_size)
    # The last new token does not go through the model.
    longest, most = max(map(len, rows)) + max_new_tokens - 1, model.config.context_length
    if longest > most:
        raise ValueError(
            f"prompts and max_new_tokens must fit into the context length, {most}; got a prompt of "
            f"{max(map(len, rows))} tokens and max_new_tokens={max_new_tokens}"
        )
    if seed is not None:
        if generator is not None:
            raise ValueError("generator must be None where seed is given; got both")
        generator = torch.Generator(_device_of(model)).manual_seed(seed)
    return _steps(model, rows, max_new_tokens, sampling, generator, frozenset(stop_tokens), use_cache)


@torch.no_grad()
def _steps(
    model: Transformer,
    rows: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator | None,
    stop_tokens: frozenset[int],
    use_cache: bool,
) -> Iterator[list[int | None]]:
    device = _device_of(model)
    capacity = max(map(len, rows)) + max_new_tokens - 1
    cache = KVCache(len(rows), capacity) if use_cache else None
    ended = [False] * len(rows)
    new = rows
    for _ in range(max_new_tokens):
        counts = [len(row) for row in new]
        # Sequences begin together: what fills up the shorter ones comes after them, where causal attention hides it.
        padded = [row + [0] * (max(counts) - len(row)) for row in new]
        last = torch.tensor(counts, device=device) - 1
        logits = model(torch.tensor(padded, device=device), cache=cache, logits_at=last)
        if cache is not None:
            cache.advance(counts)
        drawn = sampling.draw(logits, generator).tolist()
        yield [None if end else token for end, token in zip(ended, drawn, strict=True)]
        ended = [end or token in stop_tokens for end, token in zip(ended, drawn, strict=True)]
        if all(ended):
            return
        grown = [[token] for token in drawn]
        new = grown if use_cache else [row + one for row, one in zip(new, grown, strict=True)]


def _checked(prompts: Sequence[Sequence[int]] | Tensor, vocab_size: int) -> list[list[int]]:
    """Prompts as lists of tokens."""
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


def _device_of(model: Transformer) -> torch.device:
    return next(model.parameters()).device
