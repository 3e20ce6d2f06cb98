"""Which calls are those of the kernels for Hopper, by metadata; and how their launches keep descriptors."""

from __future__ import annotations

import pytest
import torch
import triton

from cs336_systems.attention import explain_varlen
from cs336_systems.attention.flash import kernels_of
from cs336_systems.attention.spec import AttentionSpec, Causal
from cs336_systems.attention.variants import alibi, softcap
from cs336_systems.kernels import tuning
from cs336_systems.kernels.settings import Settings
from cs336_systems.kernels.sm90 import coverage
from cs336_systems.kernels.sm90.config import columns_of
from cs336_systems.kernels.sm90.coverage import is_aligned, why_not_computed, why_not_differentiated, why_not_forward
from cs336_systems.testing import starts_of


def tensors(*shape, dtype=torch.bfloat16, heads=4):
    """q, k and v without memory."""
    shape = shape or (2, heads, 100, 64)
    return [torch.empty(shape, dtype=dtype, device="meta") for _ in range(3)]


@pytest.mark.parametrize("head_dim", [40, 64, 80, 128, 256])
@pytest.mark.parametrize("leading", [(4,), (2, 4)])
def test_what_they_compute(leading, head_dim):
    capped = Settings(scores=softcap(5.0).expression)
    others = (Settings("top_left"), Settings("bottom_right", (5, 0)), Settings(deterministic=True))
    for settings in (Settings(), capped, *others):
        assert why_not_computed(*tensors(*leading, 100, head_dim), 0.1, settings) is None


@pytest.mark.parametrize(
    ("call", "scale", "settings", "reason"),
    [
        (tensors(dtype=torch.float32), 0.1, Settings(), "they compute in float16 and bfloat16; got torch.float32"),
        (tensors(2, 4, 9, 32), 0.1, Settings(), "got 32 and 32"),
        (tensors(2, 4, 9, 44), 0.1, Settings(), "got 44 and 44"),
        (tensors(2, 4, 9, 264), 0.1, Settings(), "got 264 and 264"),
        (tensors(), 0.0, Settings(), "they take a positive scale; got 0.0"),
        (tensors(), -1.0, Settings(), "got -1.0"),
        (tensors(), 0.1, Settings(dropout=0.5, sinks=True), "asked for sinks, dropout"),
        (tensors(), 0.1, Settings(scores=(softcap(5.0) + softcap(6.0)).expression), "asked for scores"),
        (tensors(), 0.1, Settings(scores=alibi(torch.ones(1, 4)).expression), "asked for scores"),
        (tensors(), 0.1, Settings(packed=(None, None)), "packed sequences of one entry of a batch; got 2"),
        (tensors(4, 1 << 30, 64), 0.1, Settings(packed=(None, None)), f"at most {1 << 29} rows of packed sequences"),
        (tensors(4, 9, 64), 0.1, Settings(packed=(None, None), sinks=True), "asked for sinks"),
        (tensors(2, 2, 2, 9, 64), 0.1, Settings(), "at most one batch axis before the heads'; got 2"),
        (tensors(2, 4, 0, 64), 0.1, Settings(), "there is nothing to compute"),
        ([x.expand(3, -1, -1, -1) for x in tensors(1, 4, 9, 64)], 0.1, Settings(), "strides of q"),
        ([x[..., :64] for x in tensors(1, 4, 9, 68)], 0.1, Settings(), "multiples of 16 bytes"),
        ([x.mT for x in tensors(1, 4, 64, 64)], 0.1, Settings(), "q with contiguous rows; its last stride is 64"),
    ],
)
def test_why_they_do_not_compute_a_call(call, scale, settings, reason):
    assert reason in why_not_computed(*call, scale, settings)


@pytest.mark.parametrize(
    ("dims", "columns"),
    [
        ((64, 64), (64, 0, 0)),
        ((72, 72), (64, 16, 16)),
        ((80, 80), (64, 16, 16)),
        ((96, 96), (64, 32, 32)),
        ((104, 104), (128, 0, 0)),
        ((192, 192), (128, 64, 64)),
        ((192, 128), (128, 64, 0)),
        ((200, 200), (256, 0, 0)),
        ((64, 128), None),
        ((192, 64), None),
    ],
)
def test_how_columns_are_held(dims, columns):
    assert columns_of(*dims) == columns


def test_v_may_be_narrower():
    q, k, _ = tensors(2, 4, 100, 192)
    v, *_ = tensors(2, 4, 100, 128)
    assert why_not_computed(q, k, v, 0.1, Settings()) is None


@pytest.mark.parametrize("leading", [(4,), (1, 4)])
def test_sequences_may_be_packed(leading):
    for settings in (Settings(packed=(None, None)), Settings("bottom_right", (5, 0), packed=(7, 9))):
        assert why_not_computed(*tensors(*leading, 100, 64), 0.1, settings) is None


def test_strides_of_what_is_alone_do_not_matter():
    alone = torch.empty_strided((1, 1, 100, 64), (3, 5, 64, 1), dtype=torch.bfloat16, device="meta")
    assert why_not_computed(alone, alone, alone, 0.1, Settings()) is None


def test_what_their_backward_leaves_to_others():
    narrow, wide = (torch.empty(1, 2, 8, d, dtype=torch.bfloat16, device="meta") for d in (128, 136))
    assert why_not_differentiated(wide, Settings()) is None
    assert why_not_differentiated(narrow, Settings(deterministic=True)) is None
    assert "deterministic=True" in why_not_differentiated(wide, Settings(deterministic=True))
    assert "packed" in why_not_differentiated(narrow, Settings(deterministic=True, packed=(None, None)))


@pytest.mark.parametrize(
    ("head_dim", "settings", "words"),
    [
        (64, {}, "the kernels for Hopper"),
        (
            192,
            {"deterministic": True},
            "the kernels for Hopper forward and the portable ones backward, because of the others: their backward",
        ),
        (32, {}, "the portable kernels, because of those for Hopper: they take the same head dimension"),
        (64, {"sinks": True}, "the portable kernels, because of those for Hopper: they apply causal masks, windows"),
    ],
)
def test_which_kernels_compute_a_call_is_said_in_words(monkeypatch, head_dim, settings, words):
    monkeypatch.setattr(coverage, "_why_not_here", lambda device: None)
    said = kernels_of(*tensors(2, 4, 9, head_dim), AttentionSpec(Causal.NONE, 0.1, **settings))
    assert said.startswith(words)
    assert said == words or ":" in said


def test_which_kernels_compute_packed_sequences_is_said_in_words(monkeypatch, flash_device):
    monkeypatch.setattr(coverage, "_why_not_here", lambda device: None)
    x = torch.empty(9, 4, 64, dtype=torch.float16, device=flash_device)
    call = x, x, x, starts_of([5, 4], flash_device)
    assert explain_varlen(*call, causal=True, impl="flash").kernels == "the kernels for Hopper"
    assert explain_varlen(*call, impl="naive").kernels is None
    said = str(explain_varlen(*call, sinks=torch.zeros(4, device=flash_device), impl="flash"))
    assert said.startswith("flash: chosen, with the portable kernels, because of those for Hopper: they apply")


def test_where_they_do_not_run(monkeypatch):
    call = (*tensors(), 0.1, Settings())
    assert "compute capability 9.0; got meta" in why_not_forward(*call)
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    on_gpu = torch.device("cuda:0")
    assert coverage._why_not_here(on_gpu) is None
    with tuning.portable():
        assert coverage._why_not_here(on_gpu) == "the portable kernels are asked for"
    with tuning.pin(forward=tuning.TileConfig(64, 64, 4, 2)):
        assert coverage._why_not_here(on_gpu) == "the portable kernels are asked for"
    monkeypatch.setattr(triton, "__version__", "4.0.0")
    with pytest.warns(UserWarning, match="4.0.0"):
        assert "written for triton 3.6.x, 3.7.x, 3.8.x, 3.9.x; got 4.0.0" in str(coverage._why_not_here(on_gpu))
    capability = (10, 0)
    assert "9.0; got cuda:0" in coverage._why_not_here(on_gpu)


def test_addresses_have_to_be_multiples_of_sixteen():
    assert is_aligned(0, 32, 1 << 40)
    assert not is_aligned(32, 40)


class FakeKernel:
    """Stands for a kernel and what compiling it returns."""

    arg_names = ("x_desc", "y", "length", "TILE")

    def __init__(self):
        self.compiled = 0

    def __getitem__(self, grid):
        def compile_and_run(*args, **options):
            self.compiled += 1
            return self

        return compile_and_run


def test_descriptors_are_made_once_for_an_address(monkeypatch):
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from cs336_systems.kernels.launching import Launch
    from cs336_systems.kernels.sm90 import launcher

    made, launched = [], []

    def runner_of(compiled, grid):
        def encode(descriptor, number):
            made.append((descriptor.base.data_ptr(), number))
            return [f"map of {descriptor.base.data_ptr()}", *descriptor.shape]

        return lambda *arguments: launched.append(arguments), encode

    monkeypatch.setattr(launcher, "runner_of", runner_of)
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    descriptor = TensorDescriptor(x, [64, 64], [64, 1], [64, 64], layout)
    kernel = FakeKernel()
    launch = launcher.TiledLauncher(kernel)
    launch((x.data_ptr(), 16), lambda: Launch((3, 1), (descriptor, x), (5,), {"TILE": 64}, {"num_warps": 4}))
    for address in (32, 48, 32):
        launch((address, 16), lambda: pytest.fail("it was described already"))
    assert kernel.compiled == 1
    assert made == [(32, 0), (48, 0)]
    assert launched == [(f"map of {address}", 64, 64, 16, 5, 64) for address in (32, 48, 32)]
