"""torch.export: a program that computes what eager does, for other lengths too, after it was saved and loaded."""

from __future__ import annotations

import io

import pytest
import torch
from torch._dynamo.exc import UserError
from torch.export import Dim

from .helpers import COMPILES, EVERY, each_function, named, slow
from .traced import CALLS, FAR_WINDOWS, Attend, AttendPacked, assert_alike, module_of, packed_tensors, tensors_for

LENGTH, OTHER = Dim("length", min=2, max=512), Dim("other", min=2, max=512)
pytestmark = [
    *COMPILES,  # strict export traces as torch.compile does, and remembers so
    pytest.mark.filterwarnings(
        "ignore:Unable to find user code corresponding to tracepoint:UserWarning",
        "ignore:The given buffer is not writable:UserWarning",
    ),
]


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


OF_FLASH = ("top_left", "window", *FAR_WINDOWS, "slopes_and_sinks", "bias_and_mask", "rules", "everything")
WAYS = [
    *[("tiled", name, False) for name in CALLS],
    *[("flash", name, False) for name in OF_FLASH],
    *[("naive", name, False) for name in ("causal", *FAR_WINDOWS, "by_distance", "everything")],
    *[(impl, "everything", True) for impl in EVERY],
    ("tiled", "rules", True),
]
FAST = [("tiled", name, False) for name in ("window", *FAR_WINDOWS, "everything")]


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


@pytest.mark.parametrize("impl", named(EVERY, ["tiled"]))
def test_packed_sequences(impl, device):
    module, of_k = AttendPacked(impl).to(device), {0: OTHER}
    sequences = {0: Dim("sequences", min=3, max=64)}
    dynamic = {"q": {0: LENGTH}, "k": of_k, "v": of_k, "starts": sequences, "k_starts": sequences}
    program = exported(module, packed_tensors([(3, 5), (6, 4)], device), (), **dynamic)
    for lengths in ([(3, 5), (6, 4)], [(20, 2), (1, 9), (7, 30)]):
        assert_alike(program, module, packed_tensors(lengths, device))


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
    assert_alike(compiled, module, tensors_for(9, 14, flash_device, further))
