"""torch.compile with its default backend, which generates code: other backends do not see what that takes."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from cs336_systems.attention import attention
from cs336_systems.testing import Shapes, assert_within_budget, evaluate, make_inputs

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch"),
    pytest.mark.usefixtures("compile_afresh"),
]


def generated(**settings):
    return torch.compile(partial(attention, **settings), fullgraph=True)


def test_a_second_length(device):
    """Tiled is what "auto" chooses on a CPU for a window; its loops over tiles are no part of the graph."""
    attend = generated(window=(5, 0), impl="tiled", return_lse=True)
    for length in (33, 47, 60):
        inputs = make_inputs(Shapes.of(1, q_len=length, d=16, q_heads=2), device=device)
        with torch.compiler.set_stance("fail_on_recompile" if length == 60 else "default"):
            results = evaluate(attend, inputs)
        assert_within_budget(results, inputs, features={"window": (5, 0)})


@pytest.mark.parametrize("impl", ["naive", "tiled", "auto"])
def test_dropout(device, impl):
    """Its random numbers are computed once, and not again for each weight that they are part of."""
    inputs = make_inputs(Shapes.of(1, q_len=32, d=16, q_heads=2), device=device)
    results = evaluate(generated(dropout_p=0.3, seed=7, impl=impl), inputs)
    assert_within_budget(results, inputs, features={"dropout_p": 0.3, "seed": 7})
