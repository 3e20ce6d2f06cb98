"""Packed sequences under torch.compile: one graph, which other lengths and numbers of sequences do not change."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from cs336_systems.attention import attention_varlen
from cs336_systems.kernels.settings import Settings
from cs336_systems.testing import evaluate, make_packed, starts_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch"),
    pytest.mark.usefixtures("compile_afresh"),
]


@pytest.mark.parametrize(
    ("impl", "dynamic"), [("flash", True), ("naive", True), ("tiled", None)], ids=["flash", "naive", "tiled"]
)
def test_one_graph(impl, dynamic, device):
    attend = partial(attention_varlen, causal=True, impl=impl, return_lse=True)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for number, lengths in enumerate(([(3, 5), (6, 8)], [(8, 11), (22, 30)], [(7, 9), (7, 3), (9, 50)])):
        inputs = make_packed(lengths, heads=(4, 2), d=16, device=device)
        q_starts, k_starts = (starts_of(column, device) for column in zip(*lengths, strict=True))
        settings = {
            "alibi_slopes": torch.rand(4, device=device).requires_grad_(),
            "sinks": torch.rand(4, device=device).requires_grad_(),
        }
        given = {"cu_seqlens_q": q_starts, "cu_seqlens_k": k_starts}
        expected = evaluate(partial(attend, **given), inputs, settings)
        stance = "fail_on_recompile" if number and dynamic else "default"
        with torch.compiler.set_stance(stance):
            results = evaluate(partial(compiled, **given), inputs, settings)
        for name, x in results.items():
            torch.testing.assert_close(x, expected[name])


def test_operators(flash_device):
    """Their fake implementations, and what autograd and torch.compile ask of them."""
    inputs = make_packed([(3, 5), (6, 8)], heads=(4, 2), d=16, device=flash_device)
    q, k, v, dout = (x.transpose(0, 1)[None] for x in inputs[:4])
    starts = [starts_of(column, flash_device) for column in ((3, 6), (5, 8))]
    settings = Settings(causal="bottom_right", packed=(None, 8))
    forward = (q, k, v, 0.25, settings.text, settings.numbers, starts)
    out, lse = torch.ops.cs336_systems.flash_forward(*forward)
    backward = (q, k, v, out, lse, dout, inputs.dlse[None], *forward[3:], [])
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.cs336_systems.flash_forward.default, forward, test_utils=checks)
    torch.library.opcheck(torch.ops.cs336_systems.flash_backward.default, backward, test_utils=checks)
