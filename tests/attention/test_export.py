"""torch.export: a program that computes what eager does, for other lengths too, after it was saved and loaded."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import UserError
from torch.export import Dim

from cs336_systems.attention import attention, attention_varlen
from cs336_systems.attention.variants import document, relative_bias
from cs336_systems.attention.variants import window as window_rule
from cs336_systems.testing import Shapes, make_inputs

from .features import clipped
from .helpers import COMPILES, EVERY, each_function, named, slow

LENGTH, OTHER = Dim("length", min=2, max=512), Dim("other", min=2, max=512)
HEADS = 4
pytestmark = [
    *COMPILES,  # strict export traces as torch.compile does, and remembers so
    pytest.mark.filterwarnings(
        "ignore:Unable to find user code corresponding to tracepoint:UserWarning",
        "ignore:The given buffer is not writable:UserWarning",
    ),
]


class Attend(nn.Module):
    """A call whose features are parameters by name, settings, tensors, and rules made of both."""

    def __init__(self, parameters: tuple[str, ...] = (), by_distance: str | None = None, **settings: Any) -> None:
        super().__init__()
        self.settings, self.by_distance = settings, by_distance
        self.of_heads = nn.ParameterDict({name: nn.Parameter(torch.rand(HEADS)) for name in parameters})
        if by_distance:
            self.rates = nn.Parameter(torch.rand(HEADS, 7))

    def forward(self, q, k, v, bias=None, mask=None, ids=None):
        features: dict[str, Any] = {name: self.of_heads[name] for name in self.of_heads}
        features |= {"bias": bias, "mask": mask}
        if ids is not None:
            own = document(ids[:, : q.shape[-2]], ids)
            features["mask"] = own & window_rule(5, 3, k.shape[-2] - q.shape[-2])
        if self.by_distance == "traced":
            features["scores"] = clipped(self.rates, 3)
        elif self.by_distance:
            distances = torch.arange(1 - q.shape[-2], k.shape[-2], device=q.device)
            features["scores"] = relative_bias(self.rates[:, distances.clamp(-3, 3) + 3], q.shape[-2] - 1)
        return attention(q, k, v, **features, **self.settings)


EVERYTHING = {"causal": True, "window": (6, 2), "softcap": 1.5, "dropout_p": 0.3, "seed": 7, "return_lse": True}
CALLS: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]]] = {
    "causal": ((), (), {"causal": True, "return_lse": True}),
    "top_left": ((), (), {"causal": "top_left"}),
    "window": ((), (), {"causal": True, "window": (6, None)}),
    "window_and_cap": ((), (), {"window": (6, 2), "softcap": 1.5}),
    "slopes_and_sinks": (("alibi_slopes", "sinks"), (), {"causal": True}),
    "bias_and_mask": ((), ("bias", "mask"), {}),
    "rules": ((), ("ids",), {}),
    "by_distance": ((), (), {"by_distance": "table"}),
    "traced": ((), (), {"by_distance": "traced"}),
    "everything": (("alibi_slopes", "sinks"), ("bias", "mask"), EVERYTHING),
}
"""Parameters, further tensors, settings."""


def module_of(name, impl, device):
    parameters, further, settings = CALLS[name]
    return Attend(parameters, impl=impl, **settings).to(device), further


def tensors_for(q_len, k_len, device, further=()):
    """Arguments by name."""
    made = make_inputs(Shapes.of(2, q_len=q_len, k_len=k_len, d=16, dv=8, q_heads=HEADS, kv_heads=2), device=device)
    every = {
        "bias": torch.randn(HEADS, q_len, k_len, device=device),
        "mask": torch.rand(2, 1, 1, k_len, device=device) < 0.7,
        "ids": (torch.arange(k_len, device=device) // 4)[None],
    }
    return {"q": made.q, "k": made.k, "v": made.v} | {name: every[name] for name in further}


def exported(module, tensors, further=None, strict=False, lengths=(LENGTH, OTHER), **axes):
    """The program, saved and loaded again; its lengths are dynamic if ``further`` tensors are named."""
    q_len, k_len = lengths
    every = {"q": {2: q_len}, "k": {2: k_len}, "v": {2: k_len}} | axes
    every |= {"bias": {1: q_len, 2: k_len}, "mask": {3: k_len}, "ids": {1: k_len}}
    dynamic = None if further is None else {name: every[name] for name in tensors}
    try:
        program = torch.export.export(module, (), tensors, dynamic_shapes=dynamic, strict=strict)
    except (RuntimeError, ValueError, UserError) as error:
        if torch.__version__ < "2.13" and "the generated guard min(" in str(error):
            pytest.skip("torch before 2.13 does not see which of two multiples of a length is the smaller one")
        raise
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


def gradients(module, own, tensors):
    leaves = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in tensors.items()}
    results = module(**leaves)
    results = results if isinstance(results, tuple) else (results,)
    torch.manual_seed(5)
    wanted = [x for x in (*leaves.values(), *own) if x.requires_grad]
    return torch.autograd.grad(results, wanted, [torch.randn_like(x) for x in results])


def assert_alike(program, module, tensors):
    torch.testing.assert_close(program(**tensors), module(**tensors))
    expected = gradients(module, module.parameters(), tensors)
    torch.testing.assert_close(gradients(program, program.parameters(), tensors), expected)


OF_FLASH = ("top_left", "window", "slopes_and_sinks", "bias_and_mask", "rules", "everything")
WAYS = [
    *[("tiled", name, False) for name in CALLS],
    *[("flash", name, False) for name in OF_FLASH],
    *[("naive", name, False) for name in ("causal", "by_distance", "traced", "everything")],
    *[(impl, "everything", True) for impl in EVERY],
    ("tiled", "rules", True),
]
FAST = [("tiled", "window", False), ("tiled", "everything", False)]


@pytest.mark.parametrize(("impl", "name", "strict"), [pytest.param(*x, marks=[slow] * (x not in FAST)) for x in WAYS])
def test_one_program_for_all_lengths(impl, name, strict, device):
    module, further = module_of(name, impl, device)
    program = exported(module, tensors_for(7, 12, device, further), further, strict)
    # Also where queries see no key, and where lengths are equal that were not.
    for q_len, k_len in ((9, 9), (9, 35), (40, 3)):
        if q_len <= k_len or "ids" not in further:  # there is a document for each query
            assert_alike(program, module, tensors_for(q_len, k_len, device, further))


@pytest.mark.parametrize("impl", ["naive", "tiled", "flash", "sdpa", "auto", pytest.param("compiled", marks=slow)])
def test_one_length_for_queries_and_keys(impl, device):
    module = Attend(causal=True, impl=impl)
    program = exported(module, tensors_for(9, 9, device), (), lengths=(LENGTH, LENGTH))
    for length in (9, 17):
        tensors = tensors_for(length, length, device)
        torch.testing.assert_close(program(**tensors), module(**tensors))


class AttendPacked(nn.Module):
    """Packed sequences."""

    def __init__(self, impl: str) -> None:
        super().__init__()
        self.impl = impl

    def forward(self, q, k, v, starts):
        return attention_varlen(q, k, v, starts, impl=self.impl, causal=True, window=(4, None), softcap=2.0)


@pytest.mark.parametrize("impl", named(EVERY, ["tiled"]))
def test_packed_sequences(impl, device):
    def tensors(lengths):
        starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        made = make_inputs(Shapes.of(sum(lengths), q_len=HEADS, d=16), device=device)
        return {"q": made.q, "k": made.k, "v": made.v, "starts": starts}

    module, starts = AttendPacked(impl), {0: Dim("sequences", min=3, max=64)}
    program = exported(module, tensors([3, 6]), (), **{name: {0: LENGTH} for name in "qkv"}, starts=starts)
    for lengths in ([3, 6], [20, 1, 7]):
        assert_alike(program, module, tensors(lengths))


@each_function
def test_a_program_is_one_operator_and_not_differentiated_twice(impl, device):
    module, further = module_of("slopes_and_sinks", impl, device)
    program = torch.export.export(module, (), tensors_for(5, 5, device, further))
    names = [str(node.target) for node in program.graph.nodes if "cs336_systems" in str(node.target)]
    assert names == [f"cs336_systems.{impl}_forward.default"]
    tensors = {name: x.requires_grad_() for name, x in tensors_for(5, 5, device).items()}
    (first,) = torch.autograd.grad(program.module()(**tensors).square().sum(), tensors["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice; impl='naive' can"):
        first.sum().backward()


@pytest.mark.parametrize("impl", ["naive", "sdpa"])
def test_programs_of_torchs_own_operators(impl):
    """Such a program needs nothing of this library where it is loaded."""
    program = torch.export.export(Attend(causal=True, impl=impl), (), tensors_for(5, 5, "cpu"))
    assert not [node for node in program.graph.nodes if "cs336_systems" in str(node.target)]


def test_a_program_of_torchs_kernels_refuses_what_it_was_not_made_for(device):
    """A causal mask with lengths that differ: the example decides how torch is asked."""
    program = exported(Attend(causal=True, impl="sdpa"), tensors_for(7, 12, device), ())
    with pytest.raises(AssertionError, match="Guard failed"):
        program(**tensors_for(12, 12, device))


def test_a_program_draws_anew_in_each_call(flash_device):
    tensors = tensors_for(5, 5, flash_device)
    program = exported(Attend(impl="flash", dropout_p=0.5), tensors)
    assert not torch.equal(program(**tensors), program(**tensors))


@slow
def test_a_program_is_compiled(flash_device):
    module, further = module_of("everything", "flash", flash_device)
    program = exported(module, tensors_for(7, 12, flash_device, further), further)
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    tensors = tensors_for(9, 14, flash_device, further)
    expected = gradients(module, module.parameters(), tensors)
    torch.testing.assert_close(gradients(compiled, program.parameters(), tensors), expected)
