"""docs/measuring: the examples for users' own models run, in a process that has imported no benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest

from .pages import examples

FOLDER = Path(__file__).parents[2] / "docs/measuring"
PRINTED = {
    "attention-memory": ["saved with 0         32.5 MiB", "\n2.0\n"],
    "breakdown": ["matrix products", "milliseconds"],
    "memory": ["saved tensors", "peak after event ", "optimizer state", "tracked tensors"],
    "precision": ["float16 9.953125\n", "loss   torch.float32", "dv   largest error"],
    "steps": ["forward ", "backward ", "optimizer "],
}
FILES = {"breakdown": ["trace.json"], "memory": ["timeline.png", "timeline.html"]}


@pytest.mark.parametrize("page", PRINTED)
def test_the_example_runs(page, tmp_path, monkeypatch, capsys):
    for module in ("pandas", "matplotlib"):
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    (example,) = examples((FOLDER / f"{page}.md").read_text())
    exec(example, {})
    printed = capsys.readouterr().out
    assert [text for text in PRINTED[page] if text not in printed] == []
    assert all((tmp_path / name).exists() for name in FILES.get(page, ()))
