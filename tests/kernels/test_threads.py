"""First calls in several threads at once: none takes what another has half made."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cs336_systems.kernels import rules
from cs336_systems.kernels.sm90 import launch
from cs336_systems.kernels.sm90.launcher import TiledLauncher


def in_another_thread(function):
    with ThreadPoolExecutor(1) as another:
        return another.submit(function).result(timeout=60)


@pytest.mark.parametrize("step", ["of", "after_tensors", "runner_of"])
def test_a_launcher_is_called_while_another_thread_describes_its_first_launch(monkeypatch, step):
    launched, calls = [], itertools.count()

    def during(name, result):
        """Once, at this step, another thread calls the launcher too."""

        def made(*_):
            if name == step and next(calls) == 0:
                in_another_thread(lambda: launcher((16, 32), lambda: described))
            return result

        return made

    runner = (lambda *arguments: launched.append(arguments)), lambda descriptor, number: [descriptor.base.data_ptr()]
    monkeypatch.setattr("cs336_systems.kernels.sm90.launcher.runner_of", during("runner_of", runner))
    described: Any = SimpleNamespace(
        of=during("of", None), tensors=(), grid=(1,), after_tensors=during("after_tensors", ("numbers",))
    )
    launcher = TiledLauncher(None)
    launcher((16, 32), lambda: described)
    launcher((48, 64), lambda: described)
    assert launched == [(48, 64, "numbers")]


def test_a_stream_has_one_counter(monkeypatch):
    """Another thread asks for it while it is made: both get what is kept."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launch, "raw_stream", lambda index: 0)
    monkeypatch.setattr(launch, "_counters", {})
    device, found = torch.device("cuda", 0), []

    def make(device):
        if not found:
            found.append(None)
            found[0] = in_another_thread(lambda: launch._counter(device))
        return torch.zeros(1, dtype=torch.int32)

    monkeypatch.setattr(launch, "_kept_counter", make)
    assert launch._counter(device) is found[0]
    assert launch._counter(device) is found[0]


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
