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
from cs336_systems.attention.rules import score_rule
from cs336_systems.attention.variants import document, relative_bias
from cs336_systems.attention.variants import window as window_rule
from cs336_systems.kernels.language import at, tl
from cs336_systems.testing import Shapes, make_inputs

from .helpers import COMPILES, each_function, each_implementation, slow

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
    """A call with features, some of which are parameters."""

    def __init__(self, parameters: tuple[str, ...] = (), **settings: Any) -> None:
        super().__init__()
        self.settings = settings
        self.parameters_by_name = nn.ParameterDict({name: nn.Parameter(torch.rand(HEADS)) for name in parameters})

    def forward(self, q, k, v, bias=None, mask=None, ids=None):
        features: dict[str, Any] = {name: self.parameters_by_name[name] for name in self.parameters_by_name}
        if bias is not None:
            features["bias"] = bias
        if mask is not None:
            features["mask"] = mask
        if ids is not None:
            own = document(ids[:, : q.shape[-2]], ids)
            features["mask"] = own & window_rule(5, 3, k.shape[-2] - q.shape[-2])
        return attention(q, k, v, **features, **self.settings)


CALLS: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]]] = {
    "plain": ((), (), {}),
    "causal": ((), (), {"causal": True, "return_lse": True}),
    "top_left": ((), (), {"causal": "top_left"}),
    "window": ((), (), {"causal": True, "window": (6, None)}),
    "window_and_cap": ((), (), {"window": (6, 2), "softcap": 1.5}),
    "slopes_and_sinks": (("alibi_slopes", "sinks"), (), {"causal": True}),
    "bias_and_mask": ((), ("bias", "mask"), {}),
    "rules": ((), ("ids",), {}),
    "everything": (
        ("alibi_slopes", "sinks"),
        ("bias", "mask"),
        {"causal": True, "window": (6, 2), "softcap": 1.5, "dropout_p": 0.3, "seed": 7, "return_lse": True},
    ),
}
"""Parameters, further tensors, settings."""


def tensors_for(q_len, k_len, further=(), device="cpu"):
    """Arguments by name."""
    made = make_inputs(Shapes.of(2, q_len=q_len, k_len=k_len, d=16, dv=8, q_heads=HEADS, kv_heads=2), device=device)
    every = {
        "bias": torch.randn(HEADS, q_len, k_len, device=device),
        "mask": torch.rand(2, 1, 1, k_len, device=device) < 0.7,
        "ids": (torch.arange(k_len, device=device) // 4)[None],
    }
    return {"q": made.q, "k": made.k, "v": made.v} | {name: every[name] for name in further}


def axes(further, q_len=LENGTH, k_len=OTHER):
    """Which axes of the arguments are dynamic."""
    every = {"q": {2: q_len}, "k": {2: k_len}, "v": {2: k_len}}
    every |= {"bias": {1: q_len, 2: k_len}, "mask": {3: k_len}, "ids": {1: k_len}}
    return {name: every[name] for name in ("q", "k", "v", *further)}


def exported(module, tensors, dynamic=None, strict=False):
    """The program, saved and loaded again."""
    try:
        program = torch.export.export(module, (), tensors, dynamic_shapes=dynamic, strict=strict)
    except (RuntimeError, ValueError, UserError) as error:
        if torch.__version__ < "2.13" and "the generated guard min(" in str(error):
            pytest.skip("torch before 2.13 does not see which of two multiples of a length is the smaller one")
        raise
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


FAST = ("window", "everything")
BOTH_WAYS = [
    *[pytest.param(name, False, marks=[slow] * (name not in FAST)) for name in CALLS],
    *[pytest.param(name, True, marks=slow) for name in ("rules", "everything")],
]


@pytest.mark.parametrize(("name", "strict"), BOTH_WAYS)
@each_implementation
def test_one_program_for_all_lengths(impl, name, strict, device):
    """Its values, and its gradients."""
    parameters, further, settings = CALLS[name]
    module = Attend(parameters, impl=impl, **settings).to(device)
    program = exported(module, tensors_for(7, 12, further, device), axes(further), strict).module()
    # Also where queries see no key, and where lengths are equal that were not.
    for q_len, k_len in ((7, 12), (9, 9), (40, 3)):
        if q_len > k_len and "ids" in further:
            continue  # there is no document for each query
        tensors = tensors_for(q_len, k_len, further, device)
        torch.testing.assert_close(program(**tensors), module(**tensors))
    tensors = tensors_for(9, 35, further, device)
    expected = gradients(module, module.parameters(), tensors)
    torch.testing.assert_close(gradients(program, program.parameters(), tensors), expected)


@pytest.mark.parametrize("impl", ["naive", "tiled", "flash", "sdpa", "auto", pytest.param("compiled", marks=slow)])
def test_one_length_for_queries_and_keys(impl, device):
    module = Attend(causal=True, impl=impl)
    program = exported(module, tensors_for(9, 9, (), device), axes((), LENGTH, LENGTH)).module()
    for length in (9, 17):
        tensors = tensors_for(length, length, (), device)
        torch.testing.assert_close(program(**tensors), module(**tensors))


@score_rule
def clipped(score, batch, head, row, column, rates, reach):
    return score * at(rates, (head, tl.minimum(tl.maximum(column - row, -reach), reach) + reach))


class AttendByDistance(nn.Module):
    """Numbers by distance that are parameters: of a rule with a gradient, and of one that autograd differentiates."""

    def __init__(self, traced: bool, impl: str) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.rand(HEADS, 7))
        self.traced, self.impl = traced, impl

    def forward(self, q, k, v):
        distances = torch.arange(1 - q.shape[-2], k.shape[-2], device=q.device)
        by_distance = relative_bias(self.rates[:, distances.clamp(-3, 3) + 3], q.shape[-2] - 1)
        return attention(q, k, v, scores=clipped(self.rates, 3) if self.traced else by_distance, impl=self.impl)


@pytest.mark.parametrize(
    ("impl", "traced"), [("naive", False), ("tiled", False), ("flash", False), ("naive", True), ("tiled", True)]
)
def test_numbers_by_distance(impl, traced, device):
    module = AttendByDistance(traced, impl).to(device)
    program = exported(module, tensors_for(7, 12, (), device), axes(())).module()
    tensors = tensors_for(9, 35, (), device)
    torch.testing.assert_close(program(**tensors), module(**tensors))
    expected = gradients(module, module.parameters(), tensors)
    torch.testing.assert_close(gradients(program, program.parameters(), tensors), expected)


class AttendPacked(nn.Module):
    """Packed sequences."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, q, k, v, starts):
        return attention_varlen(q, k, v, starts, **self.settings)


@each_implementation
def test_packed_sequences(impl, device):
    module = AttendPacked(impl=impl, causal=True, window=(4, None), softcap=2.0)

    def tensors(lengths):
        starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        made = make_inputs(Shapes.of(sum(lengths), q_len=HEADS, d=16), device=device)
        return {"q": made.q, "k": made.k, "v": made.v, "starts": starts}

    rows = {0: LENGTH}
    dynamic = {"q": rows, "k": rows, "v": rows, "starts": {0: Dim("sequences", min=3, max=64)}}
    program = exported(module, tensors([3, 6]), dynamic).module()
    for lengths in ([3, 6], [20, 1, 7]):
        given = tensors(lengths)
        torch.testing.assert_close(program(**given), module(**given))
        torch.testing.assert_close(gradients(program, [], given), gradients(module, [], given))


def gradients(module, own, tensors):
    leaves = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in tensors.items()}
    wanted = [x for x in leaves.values() if x.requires_grad] + list(own)
    results = module(**leaves)
    results = results if isinstance(results, tuple) else (results,)
    torch.manual_seed(5)
    return torch.autograd.grad(results, wanted, [torch.randn_like(x) for x in results])


@each_function
def test_a_program_is_not_differentiated_twice(impl, device):
    tensors = tensors_for(5, 5, (), device)
    program = exported(Attend(impl=impl), tensors).module()
    tensors = {name: x.requires_grad_() for name, x in tensors.items()}
    (first,) = torch.autograd.grad(program(**tensors).square().sum(), tensors["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice; impl='naive' can"):
        first.sum().backward()


@pytest.mark.parametrize("impl", ["naive", "sdpa"])
def test_programs_of_torchs_own_operators(impl):
    """Such a program needs nothing of this library where it is loaded."""
    program = torch.export.export(Attend(causal=True, impl=impl), (), tensors_for(5, 5))
    assert not [node for node in program.graph.nodes if "cs336_systems" in str(node.target)]


@each_function
def test_a_call_is_one_operator(impl, device):
    parameters, further, settings = CALLS["slopes_and_sinks"]
    module = Attend(parameters, impl=impl, **settings).to(device)
    program = torch.export.export(module, (), tensors_for(5, 5, further, device))
    names = [str(node.target) for node in program.graph.nodes if "cs336_systems" in str(node.target)]
    assert names == [f"cs336_systems.{impl}_forward.default"]


def test_a_program_of_torchs_kernels_refuses_what_it_was_not_made_for(device):
    """A causal mask with lengths that differ: the example decides how torch is asked."""
    program = exported(Attend(causal=True, impl="sdpa"), tensors_for(7, 12, (), device), axes(())).module()
    with pytest.raises(AssertionError, match="Guard failed"):
        program(**tensors_for(12, 12, (), device))


def test_a_program_draws_anew_in_each_call(flash_device):
    program = exported(Attend(impl="flash", dropout_p=0.5), tensors_for(5, 5, (), flash_device)).module()
    tensors = tensors_for(5, 5, (), flash_device)
    assert not torch.equal(program(**tensors), program(**tensors))


@slow
def test_a_program_is_compiled(flash_device):
    parameters, further, settings = CALLS["everything"]
    module = Attend(parameters, impl="flash", **settings).to(flash_device)
    program = exported(module, tensors_for(7, 12, further, flash_device), axes(further)).module()
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    tensors = tensors_for(9, 14, further, flash_device)
    expected = gradients(module, module.parameters(), tensors)
    torch.testing.assert_close(gradients(compiled, program.parameters(), tensors), expected)
