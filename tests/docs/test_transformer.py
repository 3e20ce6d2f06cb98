"""docs/transformer.md: its examples run, and its table of presets is theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from cs336_systems.transformer import PRESETS, preset

from .pages import examples

PAGE = (Path(__file__).parents[2] / "docs/transformer.md").read_text()

# What is used of torch.compile beyond its own warnings, and of random numbers for DTensor on a CPU.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch", "ignore:DTensor random operators:UserWarning"
)


@pytest.mark.usefixtures("compile_afresh")
def test_the_examples_run(tmp_path, monkeypatch, capsys):
    """One after another, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    found = examples(PAGE)
    assert len(found) == 9
    names: dict[str, object] = {}
    for example in found:
        exec(example, names)


def test_the_table_has_every_preset():
    written = {}
    for line in PAGE.splitlines():
        cells = [cell.strip().replace(",", "") for cell in line.strip("|").split("|")]
        if len(cells) == 7 and cells[0] in ("both", *PRESETS):
            for suite in PRESETS if cells[0] == "both" else [cells[0]]:
                written[suite, cells[1]] = tuple(map(int, cells[2:]))
    names = [(suite, name) for suite in PRESETS for name in PRESETS[suite]]
    assert written == {
        (suite, name): (*PRESETS[suite][name], preset(name, suite).parameters()) for suite, name in names
    }
