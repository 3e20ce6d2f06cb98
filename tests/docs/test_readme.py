"""README.md: its first example runs, and explains the call that it makes."""

from __future__ import annotations

from pathlib import Path

import cs336_systems.attention
from cs336_systems.attention import Explanation

from .pages import examples

PAGE = (Path(__file__).parents[2] / "README.md").read_text()


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
