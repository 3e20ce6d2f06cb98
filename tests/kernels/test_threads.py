"""First calls in several threads at once: none takes what another has half made."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait

from cs336_systems.kernels import rules


def test_rules_of_one_name_are_both_registered(monkeypatch):
    """The name that is unused is looked for and taken in one step."""
    monkeypatch.setattr(rules, "registry", {})
    others, made = [], []

    def make(name):
        made.append(name)
        if not others:
            others.append(threads.submit(rules.register, "same", make))
            wait(others, timeout=0.3)  # for one that does not wait itself
        return object()

    with ThreadPoolExecutor(1) as threads:
        names = [rules.register("same", make), others[0].result(timeout=60)]
    assert names == made == [*rules.registry] == ["same", "same_2"]
