"""Private names of torch and of Triton stand in a few modules, which change with them, and in no others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.every_triton

ROOT = Path(__file__).parents[2]
NAMES = {"kernels/torch_names.py", "kernels/versions.py", "cs336_systems/profiling/torch_names.py"}
"""Modules that may have them."""
OF_TRANSFORMERS = {"cs336_systems/compat/huggingface.py", "cs336_systems/compat/huggingface_masks.py"}
"""Modules that have private names of transformers, whose mask functions say what they mask by their closures alone."""
OF_PYTHON = {"_asdict", "_exit", "_fields", "_getframe", "_make", "_replace", "_vendor"}
"""Not torch's: those of named tuples, sys, os and pip."""
OVERRIDDEN = {
    name
    for owner in (torch.nn.Module, torch.Tensor, torch.autograd.Function, torch.optim.Optimizer)
    for name in dir(owner)
}
PATH = re.compile(r"(torch|triton)([.:]\w+)*[.:]_[a-z]\w*([.:]\w+)*")
OF_TRITON = re.compile(
    r"triton\._C|triton\.backends\.nvidia|language\.core|gluon\._|language\._core|_reinterpret|async_copy_global"
    r"|async_copy_shared|create_async_tma|thread_barrier|_aggregate\b|utils\.launch|co_freevars"
    r"|triton\.(compiler|backends|runtime)|arg_names|\.params\b|is_constexpr|is_gluon|backends/nvidia"
)
MOVING = re.compile(r"torch\.fx\.experimental|torch\.[\w.]*\bconfig\.patch|\b_(dynamo|inductor|functorch|pytree)\b")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in OF_PYTHON


def modules() -> Iterator[tuple[str, str]]:
    """The paths and texts of all modules."""
    for folder in ("kernels", "cs336_systems", "benchmarks", "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if not name.startswith("cs336_systems/kernels"):
                yield name, path.read_text(encoding="utf-8")


def private_names(text: str) -> Iterator[tuple[int, str]]:
    """Where a module uses a private name that is not its own, and which."""
    tree = ast.parse(text)
    own = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    own |= {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    texts = {id(node.body[0].value) for node in ast.walk(tree) if _has_text(node)}
    for node in ast.walk(tree):
        for name in _names_at(node, own, texts):
            yield node.lineno, name


def _has_text(node: ast.AST) -> bool:
    body = getattr(node, "body", None)
    return isinstance(body, list) and bool(body) and isinstance(body[0], ast.Expr)


def _names_at(node: ast.AST, own: set[str], texts: set[int]) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and is_private(node.attr):
        of_itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if not of_itself or node.attr not in own:
            yield ast.unparse(node)
    elif isinstance(node, (ast.Attribute, ast.Import, ast.ImportFrom)):
        text = ast.unparse(node)
        is_own = isinstance(node, ast.ImportFrom) and node.level
        parts = [] if isinstance(node, ast.Attribute) or is_own else re.findall(r"\w+", text)
        if MOVING.search(text) or any(map(is_private, parts)):
            yield text
    elif isinstance(node, ast.ClassDef):
        methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
        bases = ", ".join(map(ast.unparse, node.bases))
        yield from (item.name for item in methods if bases and is_private(item.name) and item.name in OVERRIDDEN)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
        if PATH.fullmatch(node.value):
            yield node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
        literals = [argument.value for argument in node.args[1:2] if isinstance(argument, ast.Constant)]
        yield from (name for name in literals if isinstance(name, str) and is_private(name))


def test_no_other_module_has_a_private_name_of_torch():
    others = [(path, text) for path, text in modules() if path not in NAMES | OF_TRANSFORMERS]
    assert not [f"{path}:{line}: {name}" for path, text in others for line, name in private_names(text)]


def test_no_other_module_has_a_private_name_of_triton():
    others = [(path, text) for path, text in modules() if path not in {"kernels/versions.py"} | OF_TRANSFORMERS]
    lines = [(f"{path}: {line}", line) for path, text in others for line in text.splitlines()]
    assert not [place for place, line in lines if OF_TRITON.search(line)]


PRIVATE = [
    "torch._C._len_torch_dispatch_stack()",
    "import torch._functorch.config as config",
    "from torch._dynamo.utils import counters",
    "from torch import _dynamo",
    "from torch.fx.experimental.symbolic_shapes import statically_known_true",
    "torch.compiler.config.patch(recompile_limit=1)",
    "module._forward_hooks",
    "function._dynamo_marked_constant = True",
    "getattr(node, '_sequence_nr')",
    "hidden = 'torch:_C._cuda_getCurrentRawStream'",
    "modules = ['torch._inductor.compile_fx']",
    "class A(nn.Module):\n    def _apply(self, fn):\n        pass",
    "class A(nn.Module):\n    def forward(self):\n        return self._buffers",
    "class A(nn.Module):\n    def reset(self, fn):\n        super()._apply(fn)",
]
OTHERS = [
    '"""What torch._dynamo does."""',
    "from .module import _own",
    "class A:\n    def __init__(self):\n        self._own = 1\n    def read(self):\n        return self._own",
    "class A:\n    def _own(self):\n        return self._own()",
    "sizes._asdict()",
    "torch.compiler.is_dynamo_compiling()",
    "operation = 'aten._to_copy'",
]


@pytest.mark.parametrize(("code", "found"), [*[(x, True) for x in PRIVATE], *[(x, False) for x in OTHERS]])
def test_private_names_and_no_others_are_found(code, found):
    assert bool([*private_names(code)]) == found
