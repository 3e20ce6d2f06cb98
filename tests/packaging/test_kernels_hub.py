"""The kernel repository for the Hub: its layout, and attention by what is loaded from it under another name."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from cs336_systems.attention import op
from cs336_systems.testing import Shapes, assert_within_budget, evaluate, make_inputs
from tools import kernels_hub

NAME = "some-attention"


def load(path: Path, name: str):
    """As the package `kernels` does."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def variant(tmp_path_factory):
    """Once: its operators stay registered."""
    return kernels_hub.build(tmp_path_factory.mktemp("hub"), NAME, 3)


@pytest.fixture(scope="module")
def metadata(variant):
    return json.loads((variant / "metadata.json").read_text())


@pytest.fixture(scope="module")
def kernel(variant, metadata):
    return load(variant / "__init__.py", metadata["id"])


def test_layout(variant, metadata):
    assert variant.parts[-2:] == ("build", "torch-universal")
    assert (metadata["name"], metadata["version"], metadata["license"]) == (NAME, 3, "MIT")
    assert metadata["id"].isidentifier()
    files = {path.relative_to(variant).as_posix() for path in variant.rglob("*") if path.is_file()}
    files -= {name for name in files if "__pycache__" in name}
    assert files == {"metadata.json", *metadata["digest"]["files"]}
    assert {"__init__.py", "some_attention/__init__.py", "attention/api.py", "kernels/triton/forward.py"} < files
    assert (variant.parents[1] / "LICENSE").exists()


def test_imports_are_relative_or_of_what_there_is(variant):
    for path in variant.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                below = len(path.relative_to(variant).parts)
                assert node.level <= below, f"{path} imports from outside of the kernel"
        assert "jaxtyping" not in path.read_text()


@pytest.mark.parametrize("impl", ["flash", "tiled", "naive"])
def test_values_and_gradients(kernel, flash_device, impl):
    """In the same process as this library, whose operators have another namespace."""
    inputs = make_inputs(Shapes.of(2, q_len=20, k_len=33, d=16, q_heads=4, kv_heads=2), device=flash_device)
    attend = partial(kernel.attention, impl=impl, causal=True, return_lse=True)
    assert_within_budget(evaluate(attend, inputs), inputs, causal=True)
    assert kernel.attention.__module__ == f"{kernel.__name__}.attention.api"


def test_operators_have_a_namespace_of_their_own(kernel, metadata):
    loaded = sys.modules[f"{metadata['id']}.attention.op"]
    assert loaded.NAMESPACE == metadata["id"] != op.NAMESPACE
    registered = torch._C._dispatch_get_all_op_names()
    ours, theirs = (
        {name.partition("::")[2] for name in registered if name.startswith(f"{space}::")}
        for space in (op.NAMESPACE, metadata["id"])
    )
    assert {"flash_forward", "seed", "statistics_forward", "dropout_mask"} <= theirs <= ours


def test_older_loaders_find_the_same(kernel, variant):
    old = load(variant / "some_attention/__init__.py", "some_attention")
    assert {name: getattr(old, name) for name in kernel.__all__} == {
        name: getattr(kernel, name) for name in kernel.__all__
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("A_b", 1), "name must be of lower-case letters, digits and '-'; got 'A_b'"),
        (("a", -1), "version must be from 0 on; got -1"),
        (("a", 1), "folder must be missing or empty; got "),
    ],
)
def test_refused(tmp_path, arguments, message):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"^{message}"):
        kernels_hub.build(tmp_path, *arguments)


def test_an_import_that_a_kernel_may_not_have(tmp_path, monkeypatch, capsys):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/ranges.py").write_text("import torch\nimport pandas.api\n")
    monkeypatch.setattr(kernels_hub, "PACKAGE", tmp_path / "package")
    monkeypatch.setattr(kernels_hub, "PARTS", ("ranges.py",))
    assert kernels_hub.main([str(tmp_path / "hub")]) == 2
    assert capsys.readouterr().err.endswith("got pandas\n")
