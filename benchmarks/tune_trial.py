"""Trying one tile configuration: is it right, and how long does it take?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.tune_candidates import Row
from cs336_systems.attention import attention, variants
from cs336_systems.kernels import tuning
from cs336_systems.kernels.triton import launch
from cs336_systems.kernels.settings import Settings
from cs336_systems.kernels.tuning import TileConfig
from cs336_systems.profiling.timing import TimingMethod, measure_ms
from cs336_systems.testing import Shapes, assert_within_budget, evaluate, make_inputs

MASKS = ("bottom_right", "none")
"""A causal mask, and none: a row serves both."""
RULES = ("window", "slopes", "bias", "documents")
"""What a row for rules is tried with, besides a causal mask: a window's edge, a score rule that computes and one that
reads a number for each pair, and a mask with lists of blocks."""


@dataclass(frozen=True)
class Problem:
    """What a row is tried on: q, k and v of (batch, heads, length, head_dim), plain or `with_rules`."""

    row: Row
    batch: int
    heads: int
    length: int
    with_rules: bool = False

    @property
    def cases(self) -> tuple[str, ...]:
        """What a row serves, and is timed with."""
        return RULES if self.with_rules else MASKS

    @property
    def dtype(self) -> torch.dtype:
        """What the arithmetic is that of."""
        return torch.bfloat16 if self.row.arithmetic == "half" else torch.float32

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of q, k and v."""
        return self.batch, self.heads, self.length, self.row.head_dim

    @property
    def work(self) -> tuple[int, int]:
        """The length of a matrix and how many there are, as the table's look-up takes them."""
        return self.length, self.batch * self.heads


@dataclass(frozen=True)
class Trial:
    """A configuration to be compiled and checked; `others` are the ones of the passes that run beside it."""

    problem: Problem
    config: TileConfig
    others: Mapping[str, TileConfig] = field(default_factory=dict)
    device: str = "cuda"

    @property
    def pins(self) -> dict[str, TileConfig]:
        """What is used in place of the table, by pass."""
        return {**self.others, self.problem.row.name: self.config}


def check(trial: Trial) -> str:
    """Why a configuration cannot be used, or "" when it computes what it should; compiled kernels stay in the cache.

    Its results are held to the error budget that the tests have. They are computed on fewer rows and matrices than are
    timed, but on sizes that Triton compiles the same for, so that what is compiled here is what will be timed.
    """
    problem = trial.problem
    length = _reduced(problem.length, 512)
    return _wrong(trial, _reduced(problem.batch, 16), _reduced(problem.heads, 16), length, length)


def check_ragged(trial: Trial) -> str:
    """The same on lengths that no tile divides, and that differ between queries and keys."""
    return _wrong(trial, 1, 2, 333, 405)


def _reduced(size: int, enough: int) -> int:
    """A size of about `enough`, at most `size`, that Triton compiles the same for: it tells 1 and multiples of 16."""
    return size if size <= enough else enough + size % 16


def _wrong(trial: Trial, batch: int, heads: int, q_len: int, k_len: int) -> str:
    torch.set_float32_matmul_precision("highest")
    problem = trial.problem
    shapes = Shapes.of(batch, q_len=q_len, k_len=k_len, d=problem.row.head_dim, q_heads=heads)
    generator = torch.Generator(trial.device).manual_seed(0)
    inputs = make_inputs(shapes, dtype=problem.dtype, device=trial.device, generator=generator)
    with tuning.pin(**trial.pins):
        for case in problem.cases:
            causal, features = asked(case, inputs.q, k_len)
            try:
                results = evaluate(functools.partial(attention, impl="flash", causal=causal), inputs, features)
                assert_within_budget(results, inputs, causal=causal, features=features)
            except AssertionError as error:
                return f"wrong results: {_brief(error)}"
            except Exception as error:
                if not _is_harmless(error):
                    raise
                return f"{type(error).__name__}: {_brief(error)}"
    return ""


def asked(case: str, q: Tensor, k_len: int) -> tuple[bool | str, dict[str, Any]]:
    """A case as `attention` takes it: ``causal``, and further arguments."""
    if case in MASKS:
        return (case if case != "none" else False), {}
    *_, heads, q_len, _ = q.shape
    if case == "window":
        return True, {"window": (k_len // 4, None)}
    if case == "slopes":
        return True, {"alibi_slopes": torch.logspace(-1, -8, heads, 2.0, device=q.device)}
    if case == "bias":
        return True, {"bias": torch.randn(heads, q_len, k_len, device=q.device, dtype=q.dtype)}
    documents = [(torch.arange(length, device=q.device) * 5 // length)[None] for length in (q_len, k_len)]
    return True, {"mask": variants.document(*documents).with_blocks(q_len, k_len, causal=True)}


def _is_harmless(error: Exception) -> bool:
    """Whether the compiler or the launch refused, so that the GPU's context is as good as before."""
    return type(error).__module__.startswith("triton.") or "PassManager::run failed" in str(error)


def _brief(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if "beyond" in line] or str(error).splitlines() or ["no message"]
    return " ".join(lines[-1].split())[:160]


def inputs_of(problem: Problem, device: str = "cuda") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random q, k, v and output gradient."""
    q, k, v, dout = (torch.randn(problem.shape, device=device, dtype=problem.dtype) for _ in range(4))
    return q, k, v, dout


def runs_of(problem: Problem, tensors: tuple[Tensor, Tensor, Tensor, Tensor], case: str) -> Callable[[], object]:
    """A function that runs the pass once: the forward alone, or the backward, of which both passes run."""
    q, k, v, dout = tensors
    if problem.with_rules:
        causal, features = asked(case, q, problem.length)
        attend = functools.partial(attention, causal=causal, impl="flash", **features)
        if problem.row.name == "forward":
            return lambda: attend(q, k, v)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        made = attend(*leaves)
        return lambda: torch.autograd.grad(made, leaves, dout, retain_graph=True)
    scale, settings = problem.row.head_dim**-0.5, Settings(case).text
    if problem.row.name == "forward":
        return lambda: launch.forward(q, k, v, scale, settings)
    out, lse = launch.forward(q, k, v, scale, settings)
    return lambda: launch.backward(q, k, v, out, lse, dout, None, scale, settings)


def milliseconds(
    trial: Trial, tensors: tuple[Tensor, Tensor, Tensor, Tensor], case: str, method: TimingMethod
) -> float:
    """One short measurement of the pass, in milliseconds."""
    with tuning.pin(**trial.pins):
        run = runs_of(trial.problem, tensors, case)
        run()
        return measure_ms(run, device=trial.device, method=method)
