"""README.md: the first example explains its call, the second runs. docs/transformer.md: the table has every preset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import cs336_systems.attention
from cs336_systems.attention import Explanation
from cs336_systems.transformer import PRESETS, preset

from .pages import examples

ROOT = Path(__file__).parents[2]
PAGE, TRANSFORMER = (ROOT / "README.md").read_text(), (ROOT / "docs/transformer.md").read_text()


def test_the_first_example_explains_the_call_that_it_makes(monkeypatch, capsys):
    calls, results = [], []

    def recorded(function):
        def call(*tensors, **options):
            calls.append((tensors, options))
            results.append(function(*tensors, **options))
            return results[-1]

        return call

    for name in ("attention", "explain"):
        monkeypatch.setattr(cs336_systems.attention, name, recorded(getattr(cs336_systems.attention, name)))
    exec(examples(PAGE)[0], {})
    (tensors, options), (explained, explained_options) = calls
    assert all(x is y for x, y in zip(tensors, explained, strict=True))
    assert options == explained_options
    assert len({x.data_ptr() for x in tensors}) == 3
    assert all(x.grad.isfinite().all() for x in tensors)
    assert isinstance(results[1], Explanation)
    assert capsys.readouterr().out == f"{results[1]}\n"


@pytest.mark.filterwarnings("default")  # transformers' own warnings
def test_the_second_example_is_for_other_libraries():
    pytest.importorskip("transformers")
    if not hasattr(torch.nn.attention, "restore_flash_attention_impl"):
        pytest.skip("needs torch 2.13")
    names: dict[str, Any] = {}
    try:
        exec(examples(PAGE)[1], names)
        assert torch.nn.attention.current_flash_attention_impl() == "cs336_systems"
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    q, k, v = torch.randn(3, 2, 8, 4, 16)  # (batch, length, heads, d)
    expected = names["flash_attn_func"](q, k, v)
    out = names["flex_attention"](*(x.transpose(1, 2) for x in (q, k, v)))
    torch.testing.assert_close(out.transpose(1, 2), expected)


def test_the_table_has_every_preset():
    written = {}
    for line in TRANSFORMER.splitlines():
        cells = [cell.strip().replace(",", "") for cell in line.strip("|").split("|")]
        if len(cells) == 7 and cells[0] in ("both", *PRESETS):
            for suite in PRESETS if cells[0] == "both" else [cells[0]]:
                written[suite, cells[1]] = tuple(map(int, cells[2:]))
    assert written == {
        (suite, name): (*sizes, preset(name, suite).parameters())
        for suite, table in PRESETS.items()
        for name, sizes in table.items()
    }
