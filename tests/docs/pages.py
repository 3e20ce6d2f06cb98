"""What is read from a page to be held against the code."""

from __future__ import annotations

import re

from cs336_systems.training.config import build_parser


def examples(page: str) -> list[str]:
    """Its blocks of Python, in order."""
    return re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def flags(page: str) -> set[str]:
    """The flags that it names."""
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", page))


def flags_of_training() -> set[str]:
    """Those that the training command has."""
    return {flag for action in build_parser()._actions for flag in action.option_strings}
