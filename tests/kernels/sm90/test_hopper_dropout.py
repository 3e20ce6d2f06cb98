"""Dropout by the kernels for Hopper, emulated and on one: what is dropped, to the bit, and values and gradients."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.attention import variants
from cs336_systems.attention.call import Arguments, make_call
from cs336_systems.attention.mods import mask_mod, score_mod
from cs336_systems.attention.pairs import Pairs, kept_pairs
from cs336_systems.kernels.bound_mods import dropout_operand
from cs336_systems.kernels.call import Aux, Call, Options, Wanted
from cs336_systems.testing import Shapes, assert_within_budget, make_inputs

from .hopper import KERNELS, compute, kernels, options_of, packed_aux  # noqa: F401 - a fixture

each_kernel = pytest.mark.parametrize("kernels", KERNELS, indirect=True)
SEED = -(2**40) + 5
LENGTHS = [(70, 90), (0, 4), (129, 131), (1, 0), (40, 33)]


def one_hot(places, width, first, dtype):
    """A row for each place, with a 1 in its column if it is one of ``width`` from ``first`` on."""
    columns = first + torch.arange(width, device=places.device)
    return (places[:, None] == columns).to(dtype)


def kept_by_forward(backend, call, columns):
    """Which pairs the forward keeps, if columns have these numbers, and scores are equal: values are one-hot."""
    found = torch.zeros(*call.q.shape[:3], call.k_len, dtype=torch.bool, device=call.device)
    plan, width = backend.plan_forward(call), call.v_head_dim
    for first in range(0, int(columns.max()) + 1, width):
        v = one_hot(columns, width, first, call.dtype).expand(call.v.shape).contiguous()
        out, _ = plan(call.q, call.k, v, call.aux)
        found |= (out[..., columns % width] != 0) & (columns // width == first // width)
    return found


def kept_by_backward(backend, call, rows):
    """Which pairs the backward keeps, if rows have these numbers: from dv, as dout is one-hot in a head at a time."""
    found = torch.zeros(*call.q.shape[:3], call.k_len, dtype=torch.bool, device=call.device)
    width, heads = call.v_head_dim, call.q.shape[1]
    v = torch.zeros_like(call.v)
    out, lse = backend.plan_forward(call)(call.q, call.k, v, call.aux)
    plan = backend.plan_backward(call, out, out, False, Wanted())
    for head in range(heads):
        for first in range(0, int(rows.max()) + 1, width):
            dout = torch.zeros_like(out)
            dout[:, head] = one_hot(rows, width, first, call.dtype)
            dv = plan(call.q, call.k, v, out, lse, dout, None, call.aux).v[:, head * v.shape[1] // heads]
            found[:, head] |= (dv[..., rows % width] != 0).mT & (rows // width == first // width)[:, None]
    return found


def check_bits(backend, q, k, v, options, aux, rows, columns):
    """Both passes keep what `kept_pairs` does, among pairs of a sequence."""
    call = Call(q, k, v, options, aux)
    assert backend.unsupported_call(call) is None
    pairs = Pairs.of(options, aux, q, k, slice(0, call.q_len), slice(0, call.k_len))
    expected = kept_pairs(options, pairs, aux.seed).reshape(*q.shape[:3], call.k_len)
    same = torch.ones_like(expected) if pairs.same is None else pairs.same
    for found in (kept_by_forward(backend, call, columns), kept_by_backward(backend, call, rows)):
        assert torch.equal(found & same, expected & same)


@each_kernel
@pytest.mark.parametrize(
    ("d", "dv", "p"), [(64, 64, 0.4), (96, 96, 0.3), (128, 128, 0.9), (192, 128, 0.2), (256, 256, 0.4), (264, 264, 0.4)]
)
def test_the_same_pairs_are_kept_as_elsewhere(kernels, d, dv, p):  # noqa: F811
    backend, device = kernels
    q, k, v = (
        torch.zeros(2, heads, length, width, dtype=torch.bfloat16, device=device)
        for heads, length, width in ((2, 130, d), (1, 150, d), (1, 150, dv))
    )
    aux = Aux(seed=torch.tensor([SEED], device=device))
    rows, columns = (torch.arange(length, device=device) for length in (130, 150))
    check_bits(backend, q, k, v, options_of(d)._replace(dropout_p=p), aux, rows, columns)


@each_kernel
@pytest.mark.parametrize("d", [64, 128, 256, 400])
def test_packed_rows_and_columns_count_from_where_a_sequence_begins(kernels, d):  # noqa: F811
    """And the sequence is the entry of the batch."""
    backend, device = kernels
    q_len, k_len = (sum(lengths) + 5 for lengths in zip(*LENGTHS, strict=True))
    q, k = (
        torch.zeros(1, heads, length, d, dtype=torch.float16, device=device)
        for heads, length in ((2, q_len), (1, k_len))
    )
    aux = packed_aux(LENGTHS, device)._replace(seed=torch.tensor([7], device=device))
    rows, columns = (
        torch.cat([torch.arange(length, device=device) for length in (*lengths, 5)])
        for lengths in zip(*LENGTHS, strict=True)
    )
    check_bits(backend, q, k, k, options_of(d)._replace(dropout_p=0.5), aux, rows, columns)


def shapes_of(q_len=150, k_len=None, d=64, dv=None, heads=(2, 2)):
    return Shapes.of(2, q_len=q_len, k_len=k_len or q_len, d=d, dv=dv or d, q_heads=heads[0], kv_heads=heads[1])


def thirds(b, h, q_idx, kv_idx):
    return (q_idx + 2 * kv_idx + h) % 3 != 0


CASES = {
    "plain": (shapes_of(200), {}, {}),
    "causal_grouped": (shapes_of(130, 210, 128, heads=(4, 2)), {"causal": True}, {}),
    "window": (shapes_of(300), {"causal": True}, {"window": (90, None)}),
    "split": (shapes_of(d=192, dv=128, heads=(4, 1)), {"causal": True}, {}),
    "wide": (shapes_of(130, 200, 256, heads=(4, 2)), {"causal": "top_left"}, {}),
    "pieces": (shapes_of(130, 200, 400, heads=(4, 2)), {"causal": "top_left"}, {}),
    "pieces_cap": (shapes_of(d=264), {}, {"softcap": 2.0, "mask": mask_mod(thirds)}),
    "wide_cap": (shapes_of(d=256), {}, {"softcap": 2.0, "mask": mask_mod(thirds)}),
    "cap": (shapes_of(d=128), {"causal": True}, {"softcap": 2.0}),
    "mask_and_score": (
        shapes_of(200, heads=(4, 2)), {},
        {"mask": mask_mod(thirds), "scores": score_mod(lambda s, b, h, q, k: s.tanh() * 3 - (q - k).abs() * 0.1)},
    ),
    "listed": (
        shapes_of(400, d=128), {},
        {"mask": lambda device: variants.block_local(128).with_blocks(400, 400, device=device)},
    ),
    "sinks": (shapes_of(), {"causal": True}, {"sinks": torch.tensor([1.0, -0.5]).requires_grad_()}),
    "late_and_large": (
        shapes_of(300), {}, {"scores": score_mod(lambda s, b, h, q, k: s + torch.where(k < 70, 200.0, 0.0))}
    ),
    "nothing_kept": (shapes_of(), {}, {"dropout_p": 1.0}),
    "nothing_dropped": (shapes_of(), {}, {"dropout_p": 1e-12}),
    "most_dropped": (shapes_of(d=128), {}, {"dropout_p": 0.97}),
}  # fmt: skip


def on(device, feature):
    if isinstance(feature, torch.Tensor):
        return feature.detach().to(device).requires_grad_(feature.requires_grad)
    return feature(device) if callable(feature) else feature


@each_kernel
@pytest.mark.parametrize("name", CASES)
def test_results_are_within_the_budget(kernels, name):  # noqa: F811
    backend, device = kernels
    shapes, settings, features = CASES[name]
    torch.manual_seed(len(name))
    inputs = make_inputs(shapes, dtype=torch.bfloat16, device=device)
    given = {"dropout_p": 0.3, "seed": SEED} | {key: on(device, x) for key, x in features.items()}
    call = make_call(*inputs[:3], Arguments.of(**settings, **given))
    actual = compute(inputs, call.options, call.aux, calls=1, backend=backend)
    assert_within_budget(actual, inputs, **settings, features=given)


@each_kernel
def test_results_without_an_axis_of_heads(kernels):  # noqa: F811
    backend, device = kernels
    inputs = make_inputs(Shapes((3, 150, 64), (3, 150, 64), (3, 150, 64)), dtype=torch.float16, device=device)
    call = make_call(*inputs[:3], Arguments.of(dropout_p=0.3, seed=1))
    actual = compute(inputs, call.options, call.aux, calls=2, backend=backend)
    assert_within_budget(actual, inputs, features={"dropout_p": 0.3, "seed": 1})


@each_kernel
def test_packed_sequences_of_a_length_are_a_batch(kernels):  # noqa: F811
    backend, device = kernels
    inputs = make_inputs(shapes_of(130, 150, heads=(4, 2)), dtype=torch.bfloat16, device=device)
    packed = inputs._replace(
        dlse=inputs.dlse.transpose(0, 1).flatten(1)[None],
        **{name: x.transpose(0, 1).flatten(1, 2)[None] for name, x in zip("qkv", inputs[:3], strict=True)},
        dout=inputs.dout.transpose(0, 1).flatten(1, 2)[None],
    )
    aux = packed_aux([(130, 150)] * 2, device)._replace(seed=torch.tensor([SEED], device=device))
    options = options_of(64, causal=True)._replace(dropout_p=0.3)
    found = compute(packed, options, aux, calls=1, backend=backend)
    actual = {name: x[0].unflatten(1, (2, -1)).transpose(0, 1) for name, x in found.items()}
    assert_within_budget(actual, inputs, causal=True, features={"dropout_p": 0.3, "seed": SEED})


@pytest.mark.parametrize(
    ("p", "addend"),
    [(2.0**-15, 0x7FFF7FFF), (0.25, 0x60006000), (0.5, 0x40004000), (0.75, 0x20002000), (1.0, 0), (1 - 2**-17, 0)],
)
def test_what_is_added_to_two_random_numbers(p, addend):
    """Where it reaches bit 15 of its half of the word, a number keeps its probability."""
    seed = torch.tensor([3])
    operand = dropout_operand(Options(0.1, dropout_p=p), Aux(seed=seed), int)
    assert operand == (3, addend, 1 / (1 - p) if addend else 0.0)
    assert dropout_operand(Options(0.1, dropout_p=1e-12), Aux(seed=seed), int) is None
