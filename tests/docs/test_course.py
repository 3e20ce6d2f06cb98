"""The adapters of docs/course.md: each is one line, and gives what the assignment asks for."""

from __future__ import annotations

import ast
from pathlib import Path

from cs336_systems import attention, course

from .pages import examples

PAGE = (Path(__file__).resolve().parents[2] / "docs/course.md").read_text()


def test_every_adapter_is_one_line_and_returns_what_is_asked_for():
    (example,) = examples(PAGE)
    functions = [node for node in ast.parse(example).body if isinstance(node, ast.FunctionDef)]
    assert len(functions) == 8
    assert all(len(function.body) == 1 for function in functions)
    names: dict[str, object] = {}
    # Beside the assignment the library has another name: tests/packaging/test_course.py runs the example as it is.
    exec(example.replace("cs336_attention", "cs336_systems"), names)
    assert names["get_flashattention_autograd_function_pytorch"]() is attention.TiledAttentionFunction
    assert names["get_flashattention_autograd_function_triton"]() is attention.FlashAttentionFunction


def test_the_page_names_all_that_there_is():
    for name in set(course.__all__) - {"is_linear_or_embedding"}:
        assert name == "MODES" or f"`{name}`" in PAGE
    assert all(f"`{mode}`" in PAGE for mode in course.MODES)
