"""Dropout: the random numbers, which weights they drop, and that every implementation drops the same ones."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import triton
import triton.language as tl

from cs336_systems.attention import attention
from cs336_systems.attention.pairs import philox
from cs336_systems.kernels.triton import tiles as tuning
from cs336_systems.kernels.triton.tiles import TileConfig
from cs336_systems.kernels.versions import compile_options
from cs336_systems.testing import Shapes, assert_within_budget, evaluate, make_inputs

from .helpers import check, each_implementation, slow

ONES = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
# Of Random123, kat_vectors: counter and key, rounds, and what Philox 4x32 makes of them.
KNOWN_ANSWERS = {
    "zeros": ((0, 0, 0, 0), (0, 0), 7, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    "ones": ((ONES, ONES, ONES, ONES), (ONES, ONES), 7, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    "pi": (*PI, 7, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    "zeros_10": ((0, 0, 0, 0), (0, 0), 10, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "pi_10": (*PI, 10, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
}


def signed(number, bits):
    return (number + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def seed_of(key):
    return torch.tensor([signed(key[1] << 32 | key[0], 64)])


@triton.jit
def philox_kernel(seed, counter, answer, ROUNDS: tl.constexpr):
    words = tl.load(counter + 0), tl.load(counter + 1), tl.load(counter + 2), tl.load(counter + 3)
    numbers = tl.philox(tl.load(seed), words[0], words[1], words[2], words[3], ROUNDS)
    for place in tl.static_range(4):
        tl.store(answer + place, numbers[place])


@pytest.mark.parametrize("name", KNOWN_ANSWERS)
def test_numbers_are_philox(flash_device, name):
    """Those of torch and those of Triton."""
    counter, key, rounds, answer = KNOWN_ANSWERS[name]
    seed = seed_of(key).to(flash_device)
    assert tuple(map(int, philox(seed, *torch.tensor(counter, device=flash_device), rounds=rounds))) == answer
    words = torch.tensor([signed(word, 32) for word in counter], dtype=torch.int32, device=flash_device)
    numbers = torch.empty_like(words)
    philox_kernel[(1,)](seed, words, numbers, rounds, **compile_options())
    assert tuple(number % 2**32 for number in numbers.tolist()) == answer


HEADS, BATCH = 2, 3
SEED = -(2**45) - 7


def kept(impl, device, seed=SEED, p=0.4, q_len=21, k_len=27, heads=(BATCH, HEADS)):
    """Which weights are kept (*heads, q_len, k_len): equal scores, and values that are a row of the identity each."""
    q, k = (torch.zeros(*heads, length, 8, device=device) for length in (q_len, k_len))
    v = torch.eye(k_len, device=device).expand(*heads, k_len, k_len)
    return attention(q, k, v, dropout_p=p, seed=seed, impl=impl) != 0


@pytest.mark.parametrize("p", [1e-3, 0.1, 0.5, 0.97])
def test_the_share_of_weights_dropped_is_p(device, p):
    dropped = ~kept("tiled", device, p=p, q_len=400, k_len=500, heads=(1, 2))
    deviations = (dropped.double().mean().item() - p) / math.sqrt(p * (1 - p) / dropped.numel())
    assert abs(deviations) < 5


def test_rows_columns_heads_and_entries_differ(device):
    mask = kept("naive", device, q_len=40, k_len=40)
    assert len({tuple(row) for row in mask.flatten(0, 2).tolist()}) == BATCH * HEADS * 40
    assert len({tuple(column) for column in mask.mT.flatten(0, 2).tolist()}) == BATCH * HEADS * 40


@pytest.mark.parametrize("tile", [(16, 64), pytest.param((16, 16), marks=slow), pytest.param((64, 16), marks=slow)])
def test_tiles_do_not_change_what_is_dropped(flash_device, tile):
    tiling = TileConfig(*tile, 4, 2)
    with tuning.pin(forward=tiling, dq=tiling, dkdv=tiling):
        mask = kept("flash", flash_device)
    assert torch.equal(mask, kept("naive", flash_device))


@pytest.mark.parametrize("tile", [(16, 32), (32, 16)])
def test_the_backward_drops_what_the_forward_did_for_every_tile(flash_device, tile):
    """With a bias, whose gradient has a kernel of its own."""
    inputs = make_inputs(Shapes.of(1, q_len=37, k_len=35, d=8), device=flash_device)
    bias = torch.randn(37, 35, device=flash_device).requires_grad_()
    features = {"dropout_p": 0.4, "seed": SEED, "bias": bias}
    tiling = TileConfig(*tile, 4, 2)
    with tuning.pin(forward=tiling, dq=tiling, dkdv=tiling):
        check("flash", inputs, features)


@pytest.mark.parametrize("seed", [0, -1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_implementations_drop_the_same_weights(flash_device, seed):
    expected = kept("naive", flash_device, seed, q_len=5, k_len=9)
    for impl in ("tiled", "flash"):
        assert torch.equal(kept(impl, flash_device, seed, q_len=5, k_len=9), expected)


def test_the_whole_seed_matters_and_it_may_be_a_tensor(device):
    masks = [kept("naive", device, 5 + (1 << bit)) for bit in (3, 31, 32, 62)]
    assert all((mask != kept("naive", device, 5)).any() for mask in masks)
    for seed in (torch.tensor([SEED], device=device), torch.tensor(SEED, device=device)):
        assert torch.equal(kept("tiled", device, seed), kept("tiled", device, SEED))


def test_a_head_axis_is_a_batch_axis_of_one_head(device):
    """Without a head axis entries of the batch are numbered as if each had one head."""
    with_heads = kept("tiled", device, heads=(BATCH, 1))
    assert torch.equal(kept("tiled", device, heads=(BATCH,)), with_heads[:, 0])


@each_implementation
def test_the_device_s_generator_decides_where_there_is_no_seed(impl, device):
    masks = [kept(impl, device, seed=None)]
    for _ in "ab":
        torch.manual_seed(11)
        masks.append(kept(impl, device, seed=None))
    assert not torch.equal(masks[0], masks[1])
    assert torch.equal(masks[1], masks[2])


@pytest.mark.parametrize("of_cpu", [True, False])
def test_a_generator_decides_instead_of_the_device_s(device, of_cpu):
    q = torch.randn(2, 9, 8, device=device)
    generator = torch.Generator("cpu" if of_cpu else device)
    state = torch.get_rng_state()
    first, second = (attention(q, q, q, dropout_p=0.5, generator=generator.manual_seed(3), impl="naive") for _ in "ab")
    third = attention(q, q, q, dropout_p=0.5, generator=generator, impl="naive")
    assert torch.equal(first, second)
    assert not torch.equal(second, third)
    assert torch.equal(torch.get_rng_state(), state)


@each_implementation
def test_no_weight_is_dropped_at_0_and_every_weight_at_1(impl, device):
    inputs = make_inputs(Shapes.of(1, q_len=9, d=8), device=device)
    attend = partial(attention, impl=impl, return_lse=True)
    plain, none, every = (evaluate(attend, inputs, {"dropout_p": p, "seed": 0} if p else {}) for p in (0, 1e-12, 1.0))
    for name, x in plain.items():
        torch.testing.assert_close(none[name], x)
    assert torch.equal(evaluate(attend, inputs, {"dropout_p": 0})["out"], plain["out"])
    assert not every["out"].any()
    assert not every["dv"].any()
    torch.testing.assert_close(every["lse"], plain["lse"])
    assert_within_budget(every, inputs, features={"dropout_p": 1.0, "seed": 0})


def test_the_mean_over_many_masks_is_attention_without_dropout(device):
    """Entries of the batch draw numbers of their own."""
    q, k, v = (x.expand(600, -1, -1) for x in torch.randn(3, 1, 3, 8, device=device))
    out = attention(q, k, v, dropout_p=0.3, seed=2, impl="tiled")
    exact = attention(q[:1], k[:1], v[:1], impl="naive")
    torch.testing.assert_close(out.mean(0, keepdim=True), exact, rtol=0, atol=5 * out.std(0).max().item() / 600**0.5)
