"""Tensors that rules read at each pair, whose tiles the kernels for Hopper bring by TMA."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.attention import variants
from cs336_systems.attention.call import Arguments, make_call
from cs336_systems.attention.mods import mask_mod, score_mod
from cs336_systems.kernels.sm90.rule_arguments import entries_share_pairs, pair_tensor
from cs336_systems.testing import assert_within_budget, make_inputs

from .hopper import KERNELS, WITH_PORTABLE, check_features, kernels  # noqa: F401 - a fixture
from .test_hopper_rules import documents, listed, sizes

each_kernel = pytest.mark.parametrize("kernels", KERNELS, indirect=True)


def tiles(device, *shape, dtype=torch.bfloat16):
    return torch.randn(shape, device=device).to(dtype)


def scaled(device, *shape):
    """A score change that is affine in one tensor and not in another one, which comes first."""
    heat, added = torch.rand(shape[-3], device=device), tiles(device, *shape, dtype=torch.float16)
    return score_mod(lambda s, b, h, q, k: s * heat[h] + added[b, h, q, k] * 0.5)


def gated(device, *shape, dtype=torch.bfloat16):
    """One whose derivative by the score reads the tensor."""
    gate = tiles(device, *shape, dtype=dtype)
    return score_mod(lambda s, b, h, q, k: s * gate[h, q, k].sigmoid())


def seen(device, *shape):
    """A dense mask of half of the pairs, some of whose rows see nothing."""
    mask = torch.rand(shape, device=device) < 0.5
    mask[..., 3::50, :] = False
    return mask


def expanded(device):
    """One whose entries and heads have stride 0, read together with a distance."""
    mask = seen(device, 1, 1, 200, 336).expand(2, 4, -1, -1)
    return mask_mod(lambda b, h, q, k: (k <= q + 100) & mask[b, h, q, k])


def hidden(device, *shape):
    """The pairs that a tensor hides, but for the diagonal."""
    mask = seen(device, *shape)
    return mask_mod(lambda b, h, q, k: ~mask[b, h, q, k] | (q == k))


def near(device, *shape, dtype=torch.bfloat16):
    """Numbers that a mask reads."""
    distances = tiles(device, *shape, dtype=dtype)
    return mask_mod(lambda b, h, q, k: distances[q, k].abs() < 0.7)


def dense_listed(device, *shape):
    mask = seen(device, *shape)
    mask[..., :128, 128:256] = False
    mask[..., 128:256, :128] = True
    return listed(mask_mod(lambda b, h, q, k: mask[b, h, q, k]), *shape[-2:], batch=2)


def switched(device, *shape):
    """A score change of bools."""
    mask = seen(device, *shape)
    return score_mod(lambda s, b, h, q, k: torch.where(mask[h, q, k], s * 0.5, s + 1.0))


CASES = {
    "entries_and_heads": (sizes(130, 208), {"causal": True}, lambda on: {"bias": tiles(on, 2, 2, 130, 208)}),
    "heads": (sizes(200, d=128, heads=(4, 2)), {}, lambda on: {"bias": tiles(on, 4, 200, 200)}),
    "entries": (sizes(200, 328, d=128), {"causal": True}, lambda on: {"bias": tiles(on, 2, 1, 200, 328)}),
    "one": (sizes(300, 264, d=80, heads=(4, 1)), {}, lambda on: {"bias": tiles(on, 300, 264, dtype=torch.float16)}),
    "wider": (sizes(100, d=64), {"window": (60, 20)}, lambda on: {"bias": tiles(on, 2, 100, 160)[..., 24:124]}),
    "192": (sizes(130, 208, d=192, dv=128), {}, lambda on: {"bias": tiles(on, 2, 130, 208)}),
    "256": (sizes(130, 208, d=256), {"causal": True}, lambda on: {"bias": tiles(on, 2, 130, 208)}),
    "affine": (sizes(130, 208), {}, lambda on: {"scores": scaled(on, 2, 2, 130, 208)}),
    "gated": (sizes(128, 256, d=128), {"causal": True}, lambda on: {"scores": gated(on, 2, 128, 256), "softcap": 4.0}),
    "listed": (
        sizes(300, 304), {"causal": True},
        lambda on: {
            "bias": tiles(on, 2, 300, 304),
            "mask": listed(variants.document(documents(on, 304)), 300, 304, causal=True),
        },
    ),
    "dropout": (sizes(130, 208), {}, lambda on: {"bias": tiles(on, 2, 130, 208), "dropout_p": 0.3, "seed": 1}),
    "mask": (sizes(130, 208), {}, lambda on: {"mask": seen(on, 2, 2, 130, 208)}),
    "mask_of_entries": (
        sizes(200, 336, d=128, heads=(4, 2)), {"causal": True}, lambda on: {"mask": seen(on, 2, 1, 200, 336)},
    ),
    "mask_of_heads": (sizes(300, 272, d=80, heads=(4, 1)), {}, lambda on: {"mask": seen(on, 4, 300, 272)}),
    "mask_of_all": (sizes(100, 96, d=96), {"window": (60, 20)}, lambda on: {"mask": seen(on, 100, 160)[:, 48:144]}),
    "mask_expanded": (sizes(200, 336, d=128, heads=(4, 4)), {}, lambda on: {"mask": expanded(on)}),
    "mask_hides": (sizes(130, 208), {"causal": True}, lambda on: {"mask": hidden(on, 2, 1, 130, 208)}),
    "mask_192": (sizes(130, 208, d=192, dv=128), {}, lambda on: {"mask": seen(on, 2, 1, 130, 208)}),
    "mask_256": (sizes(130, 208, d=256), {"causal": True}, lambda on: {"mask": seen(on, 2, 1, 130, 208)}),
    "mask_of_numbers": (sizes(130, 208, d=128), {}, lambda on: {"mask": near(on, 130, 208)}),
    "mask_listed": (sizes(400, 304, d=128), {}, lambda on: {"mask": dense_listed(on, 2, 1, 400, 304)}),
    "mask_and_bias": (
        sizes(200, 208), {"causal": True},
        lambda on: {"mask": seen(on, 2, 1, 200, 208), "bias": tiles(on, 2, 200, 208)},
    ),
    "mask_and_others": (
        sizes(200, 208, d=128), {"softcap": 5.0},
        lambda on: {
            "mask": variants.document(documents(on, 208)) & hidden(on, 2, 2, 200, 208), "dropout_p": 0.3, "seed": 1,
            "alibi_slopes": torch.rand(2, device=on), "bias": tiles(on, 2, 200, 208, dtype=torch.float32),
        },
    ),
    "float32": (
        sizes(130, 208), {"causal": True}, lambda on: {"bias": tiles(on, 2, 2, 130, 208, dtype=torch.float32)},
    ),
    "float32_of_heads": (
        sizes(200, 332, d=128, heads=(4, 2)), {},
        lambda on: {"bias": tiles(on, 4, 200, 332, dtype=torch.float32), "dropout_p": 0.3, "seed": 1},
    ),
    "float32_of_entries": (
        sizes(300, 264, d=80, heads=(4, 1)), {"causal": True},
        lambda on: {"bias": tiles(on, 2, 1, 300, 264, dtype=torch.float32)},
    ),
    "float32_wider": (
        sizes(100, d=96), {"window": (60, 20)},
        lambda on: {"bias": tiles(on, 2, 100, 160, dtype=torch.float32)[..., 12:112]},
    ),
    "float32_192": (
        sizes(130, 208, d=192, dv=128), {}, lambda on: {"bias": tiles(on, 2, 130, 208, dtype=torch.float32)},
    ),
    "float32_256": (
        sizes(130, 208, d=256), {"causal": True}, lambda on: {"bias": tiles(on, 2, 130, 208, dtype=torch.float32)},
    ),
    "float32_gated": (
        sizes(128, 256, d=128), {"softcap": 4.0},
        lambda on: {"scores": gated(on, 2, 128, 256, dtype=torch.float32)},
    ),
    "float32_listed": (
        sizes(400, 304, d=128), {"causal": True},
        lambda on: {
            "bias": tiles(on, 2, 400, 304, dtype=torch.float32),
            "mask": listed(variants.document(documents(on, 400)), 400, 304, causal=True),
        },
    ),
    "float32_mask": (sizes(130, 208, d=128), {}, lambda on: {"mask": near(on, 130, 208, dtype=torch.float32)}),
    "switched": (sizes(128, 256), {}, lambda on: {"scores": switched(on, 2, 128, 256)}),
}  # fmt: skip


@each_kernel
@pytest.mark.parametrize("name", CASES)
def test_results_are_within_the_budget(kernels, name):  # noqa: F811
    torch.manual_seed(len(name))
    assert pair_tensor(check_features(kernels, CASES[name])) is not None


def learned(device, *shape, dtype=torch.bfloat16):
    return tiles(device, *shape, dtype=dtype).requires_grad_()


def learned_gate(device, *shape):
    gate = learned(device, *shape)
    return score_mod(lambda s, b, h, q, k: s * gate[h, q, k].sigmoid() + (q - k).abs() * 0.01)


def distance_gate(gate, origin):
    return score_mod(lambda s, b, h, q, k: s * gate[h, k - q + origin].sigmoid())


LEARNED = {
    "entries_and_heads": (sizes(130, 208), {"causal": True}, lambda on: {"bias": learned(on, 2, 2, 130, 208)}),
    "all_share_one": (
        sizes(200, 328, d=128, heads=(4, 2)), {"causal": True},
        lambda on: {"bias": learned(on, 200, 328), "window": (90, None), "mask": variants.dilated(3)},
    ),
    "heads_share": (
        sizes(130, 208, d=80, heads=(4, 1)), {},
        lambda on: {"bias": learned(on, 2, 1, 130, 208, dtype=torch.float16), "dropout_p": 0.3, "seed": 1},
    ),
    "gated": (
        sizes(128, 256, d=128), {"softcap": 4.0},
        lambda on: {"bias": learned(on, 2, 128, 256, dtype=torch.float32), "scores": learned_gate(on, 2, 128, 256)},
    ),
    "float32": (
        sizes(200, 332, d=128, heads=(4, 2)), {"causal": True},
        lambda on: {"bias": learned(on, 2, 1, 200, 332, dtype=torch.float32)},
    ),
    "of_entries_that_read_another": (
        sizes(130, 208), {}, lambda on: {"bias": tiles(on, 2, 2, 130, 208), "scores": learned_gate(on, 2, 130, 208)},
    ),
    "with_a_mask_of_entries": (
        sizes(130, 208), {}, lambda on: {"scores": learned_gate(on, 2, 130, 208), "mask": seen(on, 2, 1, 130, 208)},
    ),
    "odd_lengths": (sizes(131, 77), {}, lambda on: {"bias": learned(on, 2, 131, 77)}),
    "far_keys": (sizes(300, 72), {"causal": True}, lambda on: {"bias": learned(on, 2, 300, 72)}),
    "masked": (
        sizes(130, 208, heads=(4, 2)), {},
        lambda on: {"bias": learned(on, 4, 130, 208, dtype=torch.float32), "mask": seen(on, 2, 1, 130, 208)},
    ),
    "distances": (
        sizes(300, 420, heads=(4, 2)), {"causal": True},
        lambda on: {"scores": variants.relative_bias(learned(on, 4, 719, dtype=torch.float32), 299)},
    ),
    "distances_in_whole_tiles": (
        sizes(256, 384, heads=(4, 2)), {"causal": True},
        lambda on: {"scores": variants.relative_bias(learned(on, 4, 700, dtype=torch.float32), 300)},
    ),
    "distances_in_whole_tiles_128": (
        sizes(384, 256, d=128), {},
        lambda on: {"scores": variants.relative_bias(learned(on, 2, 639).flip(-1), 383), "window": (200, 100)},
    ),
    "distances_of_entries": (
        sizes(420, 300, d=128), {},
        lambda on: {"scores": variants.relative_bias(learned(on, 2, 2, 800), 450), "dropout_p": 0.3, "seed": 1},
    ),
    "distances_that_all_share": (
        sizes(257, 131, d=80, heads=(4, 1)), {"causal": "top_left"},
        lambda on: {"scores": variants.relative_bias(learned(on, 1, 387), 256), "mask": seen(on, 2, 1, 257, 131)},
    ),
    "distances_in_a_window": (
        sizes(600, d=96), {"window": (150, 20), "softcap": 4.0},
        lambda on: {"scores": variants.relative_bias(learned(on, 2, 1199, dtype=torch.float16))},
    ),
    "distances_and_pairs": (
        sizes(260, 136, d=128), {},
        lambda on: {
            "bias": learned(on, 2, 1, 260, 136, dtype=torch.float32),
            "scores": variants.relative_bias(learned(on, 2, 395), 259),
        },
    ),
    "distances_that_gate": (
        sizes(200, 300), {}, lambda on: {"scores": distance_gate(learned(on, 2, 499, dtype=torch.float32), 199)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kernels", WITH_PORTABLE, indirect=True)
@pytest.mark.parametrize("name", LEARNED)
def test_gradients(kernels, name):  # noqa: F811
    check_features(kernels, LEARNED[name], learned=True)


@each_kernel
@pytest.mark.parametrize("name", ["bias", "mask"])
def test_a_tensor_may_begin_anywhere(kernels, name):  # noqa: F811
    """A plan's later calls may have one that TMA cannot read, and one that it can."""
    backend, device = kernels
    inputs = make_inputs(sizes(130, 208), dtype=torch.bfloat16, device=device)
    memory = tiles(device, 2 * 130 * 208 + 16)
    memory = memory if name == "bias" else memory > 0
    captured = [memory[first : first + 2 * 130 * 208].view(2, 130, 208) for first in (0, 1, 16, 3)]
    calls = [make_call(*inputs[:3], Arguments.of(**{name: x})) for x in captured]
    q, k, v, dout, dlse = inputs
    forward = backend.plan_forward(calls[0])
    out, lse = forward(q, k, v, calls[0].aux)
    backward = backend.plan_backward(calls[0], out, dout, True, calls[0].wanted)
    for x, call in zip(captured, calls, strict=True):
        out, lse = forward(q, k, v, call.aux)
        dq, dk, dv, *_ = backward(q, k, v, out, lse, dout, dlse, call.aux)
        actual = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
        assert_within_budget(actual, inputs, features={name: x})


def test_which_tensors_come_in_tiles():
    q, k, v, *_ = make_inputs(sizes(130, 208), dtype=torch.bfloat16)

    def found(**arguments):
        return pair_tensor(make_call(q, k, v, Arguments.of(**arguments)))

    bias = tiles("cpu", 2, 2, 130, 208)
    slopes = torch.rand(2)
    assert found(bias=bias) == (0, False, 0, ("batch", "head", "row", "column"))
    both = found(bias=bias[0], alibi_slopes=slopes)
    assert both is not None
    assert both.position == 1
    of_all = bias[0, 0]
    assert found(scores=score_mod(lambda s, b, h, q, k: s + of_all[q, k])) == (0, False, 0, ("row", "column"))
    assert found(bias=bias.float()) == found(bias=bias)
    assert found(bias=bias.double()) is None, "float64 takes more memory"
    assert found(bias=tiles("cpu", 2, 2, 130, 210, dtype=torch.float32)[..., :208]) is None
    assert found(bias=bias[..., :1]) is None, "no element for each pair"
    assert found(bias=bias[:, :, :1]) is None
    assert found(bias=tiles("cpu", 2, 2, 130, 209)[..., :208]) is None, "rows that begin anywhere"
    assert found(bias=tiles("cpu", 2, 208, 130).mT) is None, "columns that are not contiguous"
    assert found(alibi_slopes=slopes) is None
    assert found() is None
    mask = bias > 0
    assert found(mask=mask) == (0, True, 0, ("batch", "head", "row", "column"))
    assert found(mask=variants.document(documents("cpu", 208)) & mask_mod(lambda b, h, q, k: mask[b, h, q, k])) == (
        2, True, 2, ("batch", "head", "row", "column"),
    )  # fmt: skip
    assert found(mask=mask, bias=bias) == (1, False, 0, ("batch", "head", "row", "column")), "score changes come first"
    assert found(mask=mask[:1].expand(2, -1, -1, -1)) is not None
    for entries, shared in ((mask, False), (mask[:1].expand(2, -1, -1, -1), True), (mask[0], True)):
        assert entries_share_pairs(make_call(q, k, v, Arguments.of(mask=entries))) == shared
    assert found(mask=mask_mod(lambda b, h, q, k: mask.view(torch.uint8)[b, h, q, k] > 0)) is None, "no bools"
    assert found(mask=mask[..., :1]) is None
    assert found(mask=seen("cpu", 2, 1, 130, 216)[..., :208]) is None, "strides that are no multiples of 16 bytes"
    assert found(mask=mask_mod(lambda b, h, q, k: mask[b, 0, k - 78, q] | (q > k))) is None, "not read at the pair"
    # Beyond q and k there are zeros, of which such score changes would make infinities.
    assert found(scores=score_mod(lambda s, b, h, q, k: s / bias[b, h, q, k])) is None
    assert found(scores=score_mod(lambda s, b, h, q, k: s + bias[b, h, q, k].abs().log())) is None
    assert found(scores=score_mod(lambda s, b, h, q, k: s + torch.where(bias[b, h, q, k] == 0, 9.0, 0.0))) is None
