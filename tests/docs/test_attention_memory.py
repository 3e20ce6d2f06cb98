"""docs/measuring/attention-memory.md: its example runs, and says what the page says."""

from __future__ import annotations

from pathlib import Path

from .pages import examples

PAGE = (Path(__file__).parents[2] / "docs/measuring/attention-memory.md").read_text()


def test_the_example_runs(capsys):
    (example,) = examples(PAGE)
    exec(example, {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["17213423616", "2.0"]
    written = dict(line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ") and "·" in line)
    for line in lines[:4]:
        name, formula, _ = line.split()
        assert [bytes_ for tensor, bytes_ in written.items() if tensor.startswith(name)] == [formula]
