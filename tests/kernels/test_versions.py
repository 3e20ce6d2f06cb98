"""On a Triton that is unknown or lacks a name, the Gluon kernels say so, with one warning; others do without."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
import triton

from cs336_systems.kernels import torch_names, versions

from .anew import without

pytestmark = pytest.mark.every_triton


def reason_with_one_warning(module, match):
    """`why_not_gluon` of a module: the first call warns, the second one does not, which pytest would make an error."""
    with pytest.warns(UserWarning, match=match) as caught:
        reason = module.why_not_gluon()
    assert len(caught) == 1
    assert module.why_not_gluon() == reason
    return reason


@pytest.mark.parametrize("package", [triton, torch], ids=["triton", "torch"])
def test_an_unknown_version_is_a_reason(monkeypatch, package):
    assert versions.why_not_gluon() is None
    assert not versions.missing
    monkeypatch.setattr(package, "__version__", "99.1.0")
    match = r"portable Triton kernels.*got 99\.1\.0.*Install one of triton"
    assert "got 99.1.0" in reason_with_one_warning(versions, match)


@pytest.mark.parametrize("names", versions.needed, ids=lambda names: names[0].rpartition(":")[2])
def test_a_missing_name_of_triton_is_a_reason(monkeypatch, names):
    module = without(monkeypatch, *names, module=versions)
    assert module.missing
    assert names[0] in reason_with_one_warning(module, f"lacks .*{re.escape(names[0])}")


@pytest.mark.parametrize("name", torch_names.needed)
def test_a_missing_name_of_torch_is_a_reason(monkeypatch, name):
    monkeypatch.setattr(torch_names, "missing", [name])
    assert name in reason_with_one_warning(versions, rf"portable Triton kernels.*torch \S+ lacks {name}")


@pytest.mark.parametrize("name", ["_ASTSource", "_GPUTarget"])
def test_compiling_without_a_gpu_says_what_it_lacks(monkeypatch, name):
    class Kernel:
        fn = staticmethod(lambda x, y: None)
        is_gluon = staticmethod(bool)

    assert [*versions.names_of(Kernel())] == ["x", "y"]  # those of its function
    monkeypatch.setattr(versions, name, None)
    with pytest.raises(RuntimeError, match=f"triton {re.escape(triton.__version__)} compiles no kernel"):
        versions.compiled_for(90, Kernel(), (), {})


def test_an_unknown_version_is_launched_by_public_names(monkeypatch):
    class Compiled:
        run = None

        def __getitem__(self, grid):
            return lambda *arguments: (grid, arguments)

    class Run:
        global_scratch_size = profile_scratch_size = 0

    monkeypatch.setattr(triton, "__version__", "99.1.0")
    compiled = Compiled()
    compiled.run = Run()
    run, encode = versions.runner_of(compiled, (3, 2))
    assert run(5, "x") == ((3, 2, 1), (5, "x"))
    assert encode("descriptor", 0) == ["descriptor"]


@pytest.mark.parametrize(("version", "given"), [("3.6.0", False), ("3.7.1", False), ("3.8.0", True), ("3.9.0", True)])
def test_registers_are_allocated_as_ptxas_does_by_itself(monkeypatch, version, given):
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("PTXAS_OPTIONS", "--verbose")
    options = versions.compile_options()
    assert options["enable_fp_fusion"] is True
    assert options.get("ptx_options") == ("--regAllocOptLevel=4 --verbose" if given else None)
    asked = {"enable_fp_fusion": False, **versions.default_ptx_options()}
    assert versions.compile_options(asked) == {"enable_fp_fusion": False, "ptx_options": "--verbose"}


@pytest.mark.parametrize(("version", "built"), [("3.6.0", True), ("3.7.1", False), ("3.8.0", False), ("3.9.0", False)])
def test_a_launcher_is_built_where_each_signature_has_one(monkeypatch, version, built):
    made = []
    driver = SimpleNamespace(launcher_cls=lambda src, metadata: made.append((src, metadata)))
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=driver))
    versions.build_launcher(SimpleNamespace(src="source", metadata="metadata"))
    assert made == [("source", "metadata")] * built


def test_the_hash_of_triton_is_computed_once():
    assert versions.hash_of_triton() is versions.hash_of_triton() is not None
