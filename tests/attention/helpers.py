"""What tests of attention share: calls within the error budget, parameters by implementation, graphs, operators."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cs336_systems.attention import attention, attention_varlen
from cs336_systems.attention.blocks import Blocks
from cs336_systems.attention.rules import Mask
from cs336_systems.testing import (
    Inputs,
    Results,
    Shapes,
    assert_packed_within_budget,
    assert_within_budget,
    evaluate,
    poisoned_memory,
    starts_of,
)

HALF, BFLOAT, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
FLOATS = (HALF, BFLOAT, FLOAT)
EVERY = ("flash", "tiled", "naive")

slow = pytest.mark.slow
each_implementation = pytest.mark.parametrize("impl", EVERY)
each_function = pytest.mark.parametrize("impl", ["flash", "tiled"])

COMPILES = [
    # What torch.compile and torch.export use of torch beyond its own warnings.
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning:torch",
        "ignore::FutureWarning:torch",
        "ignore:The .grad attribute of a Tensor:UserWarning",
        "ignore:There is a performance drop:UserWarning",
    ),
    pytest.mark.usefixtures("compile_afresh"),
]


def named(
    table: Mapping[str, Any] | Iterable[str], fast: Iterable[str] | None = None, every_triton: Iterable[str] = ()
) -> list[Any]:
    """The names of a table as parameters; those not in ``fast`` are slow, those in ``every_triton`` marked so."""
    names, quick, everywhere = [*table], {*(table if fast is None else fast)}, {*every_triton}
    assert quick | everywhere <= {*names}, (quick | everywhere) - {*names}
    marks = {name: [slow] * (name not in quick) + [pytest.mark.every_triton] * (name in everywhere) for name in names}
    return [pytest.param(name, marks=marks[name]) for name in names]


def rows(table: Mapping[str, tuple[Any, ...]]) -> list[Any]:
    """The rows of a table as parameters, with their names for ids."""
    return [pytest.param(*row, id=name) for name, row in table.items()]


def wrong(types: Mapping[str, tuple[Any, str]], values: Mapping[str, tuple[Any, str]]) -> Any:
    """Parametrizes ``wrong``, ``error`` and ``message``: TypeError and ValueError for these arguments."""
    made = {name: (given, TypeError, message) for name, (given, message) in types.items()}
    made |= {name: (given, ValueError, message) for name, (given, message) in values.items()}
    assert len(made) == len(types) + len(values)
    return pytest.mark.parametrize(("wrong", "error", "message"), rows(made))


def says(message: str) -> str:
    """A pattern of this message, whole."""
    return f"^{re.escape(message)}$"


def each_dtype(**implementations: tuple[torch.dtype, ...]) -> Any:
    """Parametrizes ``impl`` and ``dtype``; all but the first dtype of an implementation are slow."""
    made = []
    for impl, dtypes in implementations.items():
        for number, dtype in enumerate(dtypes):
            name = f"{impl}-{str(dtype).removeprefix('torch.')}"
            made.append(pytest.param(impl, dtype, id=name, marks=[slow] * (number > 0)))
    return pytest.mark.parametrize(("impl", "dtype"), made)


def check(
    impl: str,
    inputs: Inputs,
    features: Mapping[str, Any] | None = None,
    *,
    eps: float | None = None,
    during: AbstractContextManager[None] | None = None,
    **settings: Any,
) -> Results:
    """What `attention` returns and its gradients, which are within the budget; nobody reads memory nobody wrote.

    ``during`` is what the call is made in, and what it is compared with is not.
    """
    with during or nullcontext(), poisoned_memory():
        results = evaluate(partial(attention, impl=impl, return_lse=True, **settings), inputs, features)
    assert_within_budget(results, inputs, features=features, eps=eps, **settings)
    return results


def blocks_of(mask: Mask, q_len: int = 300, k_len: int = 300, **arguments: Any) -> Blocks:
    """The lists of blocks of a mask."""
    blocks = mask.with_blocks(q_len, k_len, **arguments).blocks
    assert blocks is not None
    return blocks


def packed_arguments(lengths: Iterable[tuple[int, int]], device: torch.device) -> dict[str, Any]:
    """cu_seqlens and max_seqlen of sequences of these lengths."""
    columns = [*zip(*lengths, strict=True)]
    starts = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), [starts_of(x, device) for x in columns], strict=True))
    return starts | dict(zip(("max_seqlen_q", "max_seqlen_k"), map(max, columns), strict=True))


def check_packed(
    impl: str,
    inputs: Inputs,
    lengths: list[tuple[int, int]],
    causal: bool | str,
    features: Mapping[str, Any] | None = None,
) -> None:
    """The same of `attention_varlen`."""
    given = packed_arguments(lengths, inputs.q.device)
    attend = partial(attention_varlen, causal=causal, impl=impl, return_lse=impl != "sdpa", **given)
    with poisoned_memory():
        results = evaluate(attend, inputs, features)
    assert_packed_within_budget(results, inputs, lengths, causal=causal, features=features)


def assert_same(results: Results, expected: Results, *, exact: bool = False) -> None:
    """The same results by name, to the bit if ``exact``."""
    assert results.keys() == expected.keys()
    for name, x in expected.items():
        tolerances = {"rtol": 0.0, "atol": 0.0} if exact else {}
        torch.testing.assert_close(results[name], x, msg=lambda text, name=name: f"{name}: {text}", **tolerances)


def one_graph(function: Callable[..., Any], *, backend: Any = "aot_eager", dynamic: bool | None = None) -> Any:
    """The function through torch.compile, which raises where it needs a second graph."""
    return torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)


def sizes_of(shapes: Shapes) -> tuple[int, int, int, int]:
    """Batch entries, heads, q_len and k_len."""
    heads = shapes.q[-3] if len(shapes.q) > 3 else 1
    return math.prod(shapes.q[:-3] if len(shapes.q) > 3 else shapes.q[:-2]), heads, shapes.q[-2], shapes.k[-2]


@contextmanager
def compiled_once(number: int) -> Iterator[None]:
    """Inside, nothing may be compiled again, from the second call on."""
    with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
        yield


class Record(TorchDispatchMode):
    """Lists the operators of this library that are called inside, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "cs336_systems":
            self.calls.append((function, args))
        return function(*args, **(kwargs or {}))


def operator_calls(attend: Callable[..., Any], inputs: Inputs, features: Any = None) -> list[tuple[Any, Any]]:
    """The operators that a call and its backward reach, with detached arguments."""
    with Record() as record:
        evaluate(attend, inputs, features)
    return [(operator, detached(arguments)) for operator, arguments in record.calls]


def detached(argument: Any) -> Any:
    if isinstance(argument, (list, tuple)):
        return type(argument)(map(detached, argument))
    return argument.detach() if isinstance(argument, Tensor) else argument


def flat(results: Any) -> list[Tensor]:
    """The tensors of nested lists and tuples."""
    if isinstance(results, Tensor):
        return [results]
    return [x for result in results for x in flat(result)] if isinstance(results, (list, tuple)) else []
