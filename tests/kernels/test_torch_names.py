"""On a torch that is not known, or that lacks a name, calls are right; measurements say what they lack."""

from __future__ import annotations

import pickle
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from cs336_systems.attention import attention, features, naive, op, plan
from cs336_systems.kernels import torch_names
from cs336_systems.profiling import MemoryRecorder, ModuleRanges, module_ranges, recording
from cs336_systems.profiling import torch_names as measuring_names
from cs336_systems.testing import Shapes, assert_within_budget, evaluate, make_inputs
from cs336_systems.transformer import RotaryEmbedding, SwiGLU, decoder, layers

from . import anew
from .anew import loaded_anew
from .conftest import ROOT, environment

without = partial(anew.without, module=torch_names)


@pytest.mark.parametrize("name", [None, *torch_names.needed])
def test_a_name_that_calls_need_is_told(monkeypatch, name):
    """The installed torch lacks none."""
    module = torch_names if name is None else without(monkeypatch, name)
    assert module.missing == ([] if name is None else [name])
    assert module.why_unknown() == (None if name is None else f"torch {torch.__version__} lacks {name}")


UNKNOWN = """
import sys
import torch
torch.__version__ = "99.1.0"
from cs336_systems.attention import attention
x = torch.randn(1, 2, 5, 16, requires_grad=True)
compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
for impl in ("naive", "tiled"):
    expected = attention(x, x, x, causal=True, window=(3, 0), impl="naive")
    torch.testing.assert_close(attention(x, x, x, causal=True, window=(3, 0), impl=impl), expected)
    torch.testing.assert_close(compiled(x, x, x, causal=True, window=(3, 0), impl=impl), expected)
from cs336_systems.kernels.torch_names import why_unknown
print(why_unknown())
"""


@pytest.mark.slow
def test_calls_are_right_with_an_unknown_version():
    command = [sys.executable, "-W", "error::UserWarning:cs336_systems", "-c", UNKNOWN]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    assert "got 99.1.0" in done.stdout


def assert_right(impl, device):
    """Results and gradients of a call, and results where no gradient is wanted."""
    inputs = make_inputs(Shapes.of(1, q_len=9, d=16, q_heads=2, kv_heads=1), device=device)
    call = partial(attention, causal=True, impl=impl)
    assert_within_budget(evaluate(partial(call, return_lse=True), inputs), inputs, causal=True)
    with torch.no_grad():
        expected = attention(*inputs[:3], causal=True, impl="naive")
        torch.testing.assert_close(call(*inputs[:3]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", ["flash", "tiled"])
def test_without_modes_and_levels_calls_are_dispatched_and_transforms_known(monkeypatch, impl, device):
    """Transforms are known by what they refuse."""
    module = without(monkeypatch, "torch:_C._len_torch_dispatch_stack")
    with monkeypatch.context() as changed:
        changed.setattr(torch_names, "modes_at_work", module.modes_at_work)
        assert torch_names.must_dispatch()
        assert_right(impl, device)
    module = without(monkeypatch, "torch:_C._functorch.maybe_current_level")
    for user in (torch_names, op):
        monkeypatch.setattr(user, "transform_level", module.transform_level)
    assert not op.transforming()
    assert_right(impl, device)
    x = torch.randn(3, 1, 2, 5, 16, device=device)

    def loss(x, impl):
        assert op.transforming()
        return attention(x, x, x, causal=True, impl=impl).square().sum()

    found, expected = (torch.vmap(torch.func.grad(partial(loss, impl=each)))(x) for each in (impl, "naive"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not op.transforming()


def test_without_its_level_calls_are_right_and_forward_mode_is_refused(monkeypatch, flash_device):
    module = without(monkeypatch, "torch.autograd.forward_ad:_current_level")
    monkeypatch.setattr(plan, "in_forward_mode", module.in_forward_mode)
    assert plan.in_forward_mode()
    assert_right("flash", flash_device)
    x = torch.randn(1, 2, 5, 16, device=flash_device)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward mode AD"):
        attention(forward_ad.make_dual(x, x), x, x, impl="flash")


class Causal(nn.Module):
    def forward(self, x):
        return attention(x, x, x, causal=True, impl="naive")


def test_without_its_flag_export_is_asked_for_by_its_public_name(monkeypatch):
    module = without(monkeypatch, "torch.compiler:_is_exporting_flag")
    assert module.exporting is torch.compiler.is_exporting
    for user in (features, naive):
        monkeypatch.setattr(user, "exporting", module.exporting)
    x = torch.randn(1, 2, 6, 8)
    dynamic = {"x": {2: torch.export.Dim("length", min=2, max=64)}}
    exported = torch.export.export(Causal(), (x,), dynamic_shapes=dynamic).module()
    longer = torch.randn(1, 2, 9, 8)
    torch.testing.assert_close(exported(longer), Causal()(longer))


def test_public_names_serve_where_private_ones_are_missing(monkeypatch):
    """The stream, the mark of a constant, whole graphs, and conditions on sizes, of which none is known to hold."""
    with monkeypatch.context() as changed:
        changed.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
        module = loaded_anew(torch_names)
        changed.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=index + 5))
        assert module.raw_stream(2) == 7
    with monkeypatch.context() as changed:
        marked = []
        changed.setattr(torch, "__version__", "99.1.0")
        changed.setattr(torch.compiler, "assume_constant_result", lambda function: marked.append(function) or function)
        torch_names.constant_when_traced(assert_right)
        assert marked == [assert_right]
    with monkeypatch.context() as changed:
        made = []
        changed.setattr(torch_names, "find", lambda *names: None)
        changed.setattr(torch, "compile", lambda function, **options: made.append(options["fullgraph"]) or function)
        function, patience = naive._compiler.__wrapped__()
        assert function is naive.naive
        assert isinstance(patience, nullcontext)
        decoder._compiler.__wrapped__(False)
        assert made == [False, False]
    monkeypatch.setitem(sys.modules, "torch.fx.experimental.symbolic_shapes", None)
    assert [torch_names.holds_for_all_sizes(x) for x in (True, False, SimpleNamespace())] == [True, False, False]


def test_modules_that_do_not_tell_of_hooks_are_called(monkeypatch):
    with monkeypatch.context() as changed:
        changed.setattr(nn.Module, "__init__", lambda self: None)
        module = loaded_anew(torch_names)
    assert module.has_hooks(nn.Linear(2, 2))
    assert module.has_forward_hooks(nn.Linear(2, 2))
    layer, x = SwiGLU(8, 16), torch.randn(3, 8)
    expected = layer(x)
    monkeypatch.setattr(layers, "has_hooks", module.has_hooks)
    assert torch.equal(layer(x), expected)


def test_a_module_that_is_not_told_of_casts_looks_before_each_call(monkeypatch):
    x = torch.randn(1, 5, 8)
    expected = RotaryEmbedding(8, 5)(x)
    with monkeypatch.context() as changed:
        changed.delattr(nn.Module, "_apply")
        rope = RotaryEmbedding(8, 5)
    rope.table = rope.table.bfloat16()
    rope = pickle.loads(pickle.dumps(rope))
    assert torch.equal(rope(x), expected)
    assert rope.table.dtype is torch.float32


MEASUREMENTS = {
    "current_node": "torch:_C._current_autograd_node",
    "next_node_number": "torch:_C._autograd._get_sequence_nr",
    "TorchDispatchMode": "torch.utils._python_dispatch:TorchDispatchMode",
}


def test_recording_a_mod_says_what_it_lacks(monkeypatch):
    module = without(monkeypatch, MEASUREMENTS["TorchDispatchMode"])
    assert module.why_unknown() is None
    with pytest.raises(
        RuntimeError, match=r"recorded by torch\.utils\._python_dispatch\.TorchDispatchMode, which torch"
    ):
        module.TorchDispatchMode()


@pytest.mark.parametrize("own", MEASUREMENTS)
def test_a_measurement_says_what_it_lacks(monkeypatch, own):
    name = MEASUREMENTS[own]
    assert without(monkeypatch, name).why_unknown() is None
    module = without(monkeypatch, name, module=measuring_names)
    expected = f"needs {name.replace(':', '.')}, which torch .* lacks. Install one of torch"
    with pytest.raises(RuntimeError, match=expected):
        getattr(module, own)()
    with pytest.raises(RuntimeError, match=r"needs torch\.autograd\.graph\.Node\._sequence_nr, which torch"):
        measuring_names.node_number(object())


@pytest.mark.parametrize(
    ("own", "user", "measuring"),
    [
        ("current_node", recording, lambda model: MemoryRecorder(model, "cpu")),
        ("next_node_number", recording, lambda model: MemoryRecorder(model, "cpu")),
        ("next_node_number", module_ranges, lambda model: ModuleRanges(model, nvtx=False)),
    ],
)
def test_a_measurement_of_a_model_says_what_it_lacks(monkeypatch, own, user, measuring):
    module = without(monkeypatch, MEASUREMENTS[own], module=measuring_names)
    monkeypatch.setattr(user, own, getattr(module, own))
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="this measurement needs"), measuring(model):
        model(torch.ones(1, 2))
    assert model(torch.ones(1, 2)).shape == (1, 2)


def test_benchmarks_of_the_compiler_do_without(monkeypatch):
    monkeypatch.setattr(measuring_names, "find", lambda *names: None)
    with measuring_names.without_donated_buffers():
        pass
    with pytest.raises(RuntimeError, match=r"needs torch\._dynamo\.utils\.counters, which torch"):
        measuring_names.compiler_counters()
