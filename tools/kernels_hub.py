"""Build a repository for the Kernel Hub of Hugging Face; the package `kernels` loads it from there or from a folder.

    python tools/kernels_hub.py build/hub --name cs336-attention --version 1

FOLDER/build/torch-universal is `cs336_systems.attention` with its kernels, and pure Python. Its layout follows
https://huggingface.co/docs/kernels/kernel-requirements: it is loaded under another name, so every import of its
files is relative, or of Python, torch, Triton, einops and what torch and Triton need.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "cs336_systems"
VARIANT = "build/torch-universal"
PARTS = ("attention", "kernels", "ranges.py")
"""What a kernel has of the package."""

IMPORTED = {*sys.stdlib_module_names, "einops", "numpy", "torch", "triton", "typing_extensions"}

_JAXTYPING = re.compile(r"^from jaxtyping import [^(\n]+\n", re.MULTILINE)
"""For annotations alone, which are not evaluated."""
_NAMESPACE = re.compile(r'(?<=torch\.ops\.)cs336_systems\b|(?<=")cs336_systems(?=::|")')
"""Of operators. torch has it once, and several versions of a kernel may be loaded."""

_INIT = '''"""Exact attention, forward and backward: see `attention`, `attention_varlen` and `attention_with_cache`."""

from .attention import *
from .attention import __all__
'''
_OLD_INIT = '''"""Older versions of the package `kernels` load this file: the same names."""

import importlib.util
import sys
from pathlib import Path

if "{id}" not in sys.modules:
    spec = importlib.util.spec_from_file_location("{id}", Path(__file__).parents[1] / "__init__.py")
    sys.modules["{id}"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["{id}"])
globals().update({{name: getattr(sys.modules["{id}"], name) for name in sys.modules["{id}"].__all__}})
'''
_CARD = """---
license: mit
library_name: kernels
tags: [kernels, attention]
---

# {name}

Exact attention, forward and backward, of cs336_systems {version}: FlashAttention-2 in Triton, kernels for Hopper in
Gluon, and plain PyTorch. It needs Python 3.10, PyTorch 2.11 and Triton 3.6 or newer, and einops.

```python
from kernels import get_local_kernel

out = get_local_kernel("PATH/TO/THIS/FOLDER").attention(q, k, v, causal=True)  # (batch, heads, length, head dimension)
```
"""


def build(folder: Path, name: str, version: int) -> Path:
    """Write the repository of a kernel, and return the folder of its package.

    Args:
        folder: is made; must be missing or empty.
        name: of the kernel, lower-case letters, digits and "-".
        version: its major version.

    Raises:
        ValueError: ``name`` or ``version`` is invalid, ``folder`` has files, or a file imports what a kernel may not.
    """
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise ValueError(f"name must be of lower-case letters, digits and '-'; got {name!r}")
    if version < 0:
        raise ValueError(f"version must be from 0 on; got {version}")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"folder must be missing or empty; got {folder}")
    texts = dict(sources())
    module = name.replace("-", "_")
    identifier = f"_{module}_{hashlib.sha256(repr(texts).encode()).hexdigest()[:8]}"
    texts = {path: _NAMESPACE.sub(identifier, text) for path, text in texts.items()}
    texts |= {"__init__.py": _INIT, f"{module}/__init__.py": _OLD_INIT.format(id=identifier)}
    metadata = {
        "name": name,
        "id": identifier,
        "version": version,
        "license": "MIT",
        "python-depends": ["einops"],
        "backend": {"type": "cuda", "archs": ["8.0+PTX"]},  # and newer ones; elsewhere plain PyTorch computes
        "digest": {"algorithm": "sha256", "files": {path: _digest(text) for path, text in sorted(texts.items())}},
    }
    variant = folder / VARIANT
    for path, text in {**texts, "metadata.json": json.dumps(metadata, indent=2) + "\n"}.items():
        (variant / path).parent.mkdir(parents=True, exist_ok=True)
        (variant / path).write_text(text)
    (folder / "README.md").write_text(_CARD.format(name=name, version=_version()))
    shutil.copy(ROOT / "LICENSE", folder)
    return variant


def sources() -> Iterator[tuple[str, str]]:
    """The files of the package, with what differs in a kernel, by their paths in it.

    Raises ValueError for a file that imports what a kernel may not.
    """
    for part in PARTS:
        base = (PACKAGE / part).resolve()
        for path in sorted(base.rglob("*.py")) if base.is_dir() else [base]:
            relative = Path(part, path.relative_to(base)).as_posix()
            text = _JAXTYPING.sub("", path.read_text())
            for imported in _imports(text):
                if imported not in IMPORTED:
                    raise ValueError(f"{relative} must import {', '.join(sorted(IMPORTED))} alone; got {imported}")
            yield relative, text


def _imports(text: str) -> Iterator[str]:
    """The packages that a file imports other than relatively."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).partition(".")[0]


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _version() -> str:
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return found[1] if found else "unknown"


def main(arguments: Sequence[str] | None = None) -> int:
    """Build a repository as the command line says."""
    parser = argparse.ArgumentParser(description="build a repository for the Kernel Hub of Hugging Face")
    parser.add_argument("folder", type=Path, help="is made; must be missing or empty")
    parser.add_argument("--name", default="cs336-attention", help="of the kernel (default: %(default)s)")
    parser.add_argument("--version", type=int, default=0, help="its major version; 0 is a beta (default: %(default)s)")
    given = parser.parse_args(arguments)
    try:
        print(build(given.folder, given.name, given.version))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
