"""Each layer alone, against its formula written out another way, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from cs336_systems.transformer import Embedding, Linear, MultiHeadAttention, RMSNorm, RotaryEmbedding, SwiGLU

F64 = torch.float64


def test_linear(device):
    linear = Linear(5, 7, device=device, dtype=F64)
    x = torch.randn(2, 3, 5, device=device, dtype=F64)
    expected = (linear.weight[None, None] * x[:, :, None]).sum(-1)
    torch.testing.assert_close(linear(x), expected)


def test_embedding(device):
    embedding = Embedding(11, 6, device=device, dtype=F64)
    token_ids = torch.tensor([[0, 10], [3, 3]], device=device)
    out = embedding(token_ids)
    assert out.shape == (2, 2, 6)
    assert torch.equal(out[1, 0], embedding.weight[3])
    assert torch.equal(out[0, 1], embedding.weight[10])


def test_rms_norm(device):
    norm = RMSNorm(6, eps=0.1, device=device, dtype=F64)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 6, device=device, dtype=F64)
    for row, out in zip(x.view(-1, 6), norm(x).view(-1, 6), strict=True):
        root = math.sqrt(sum(value**2 for value in row.tolist()) / 6 + 0.1)
        torch.testing.assert_close(out, torch.stack([row[i] * norm.weight[i] / root for i in range(6)]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rms_norm_squares_in_float32(device, dtype):
    """In float16 the square of 1000 is infinite, and in bfloat16 the sum of many squares is coarse."""
    x = torch.full((1, 4096), 1000.0, device=device, dtype=dtype)
    out = RMSNorm(4096, device=device)(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out, torch.ones_like(out), atol=torch.finfo(dtype).eps, rtol=0)


def test_swiglu(device):
    layer = SwiGLU(6, 10, device=device, dtype=F64)
    x = torch.randn(2, 6, device=device, dtype=F64)
    gate, value = x @ layer.w1.weight.T, x @ layer.w3.weight.T
    torch.testing.assert_close(layer(x), (gate / (1 + torch.exp(-gate)) * value) @ layer.w2.weight.T)


def rotated(x, positions, theta):
    """RoPE by complex numbers."""
    d = x.shape[-1]
    angles = positions[..., None] * theta ** (-torch.arange(0, d, 2, device=x.device, dtype=F64) / d)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)


def test_rope(device):
    rope = RotaryEmbedding(8, context_length=50, theta=100.0, device=device, dtype=F64)
    x = torch.randn(2, 3, 7, 8, device=device, dtype=F64)
    torch.testing.assert_close(rope(x), rotated(x, torch.arange(7, device=device, dtype=F64), 100.0))
    positions = torch.randint(50, (2, 1, 7), device=device)
    torch.testing.assert_close(rope(x, positions), rotated(x, positions.to(F64), 100.0))


def test_products_of_rotated_vectors_follow_from_their_distance(device):
    rope = RotaryEmbedding(8, context_length=50, device=device, dtype=F64)
    q, k = torch.randn(2, 1, 8, device=device, dtype=F64)
    at = [torch.tensor([position], device=device) for position in (3, 10, 33, 40)]
    products = [(rope(q, at[i]) * rope(k, at[j])).sum() for i, j in ((0, 1), (2, 3))]
    torch.testing.assert_close(*products)


def test_the_table_of_rope_is_right_wherever_it_goes(device):
    expected = RotaryEmbedding(8, 5000, device=device).table
    exact = RotaryEmbedding(8, 5000, device=device, dtype=F64).table
    for moved in (
        RotaryEmbedding(8, 5000).to(torch.bfloat16).to(device),
        RotaryEmbedding(8, 5000, device=device, dtype=torch.float16),
        RotaryEmbedding(8, 5000, device="meta").to_empty(device=device),
    ):
        assert moved.table.dtype == torch.float32
        assert torch.equal(moved.table, expected)
    assert torch.equal(RotaryEmbedding(8, 5000, device=device).double().table, exact)
    assert torch.equal(exact.float(), expected)
    assert not RotaryEmbedding(8, 5000).state_dict()


def test_rope_keeps_the_dtype(device):
    x = torch.randn(1, 4, 8, device=device, dtype=torch.bfloat16)
    out = RotaryEmbedding(8, 4, device=device)(x)
    assert out.dtype == torch.bfloat16
    # Rounded once, at the end.
    exact = RotaryEmbedding(8, 4, device=device, dtype=F64)(x.double())
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(torch.bfloat16).eps / 2, atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("kv_heads", [None, 2, 1])
def test_multi_head_attention(device, kv_heads, window):
    """Query by query and head by head, over the keys that it sees."""
    rope = RotaryEmbedding(4, 16, device=device, dtype=F64)
    layer = MultiHeadAttention(16, 4, kv_heads, rope, window, "naive", device, F64)
    x = torch.randn(2, 6, 16, device=device, dtype=F64)
    out = layer(x)
    shared = 4 // (kv_heads or 4)
    places = torch.arange(6, device=device, dtype=F64)
    for row in range(2):
        gathered = torch.zeros(6, 16, device=device, dtype=F64)
        for head in range(4):
            own, of_kv = slice(4 * head, 4 * head + 4), slice(4 * (head // shared), 4 * (head // shared) + 4)
            q = rotated(x[row] @ layer.q_proj.weight[own].T, places, 10_000.0)
            k = rotated(x[row] @ layer.k_proj.weight[of_kv].T, places, 10_000.0)
            v = x[row] @ layer.v_proj.weight[of_kv].T
            for i in range(6):
                first = 0 if window is None else max(0, i - window + 1)
                weights = torch.softmax(k[first : i + 1] @ q[i] / 2, dim=0)
                gathered[i, own] = weights @ v[first : i + 1]
        torch.testing.assert_close(out[row], gathered @ layer.output_proj.weight.T)


def test_positions_reach_rope_alone(device):
    layer = MultiHeadAttention(16, 4, rope=RotaryEmbedding(4, 64, device=device), device=device)
    x = torch.randn(2, 6, 16, device=device)
    later = torch.arange(6, device=device) + torch.tensor([[0], [20]], device=device)
    torch.testing.assert_close(layer(x, later), layer(x), atol=1e-5, rtol=1e-5)  # distances are what they were
    assert not torch.allclose(layer(x, 2 * later), layer(x), atol=1e-2)


@pytest.mark.parametrize(
    ("make", "std"),
    [
        (lambda: Linear(200, 600), math.sqrt(2 / 800)),
        (lambda: Embedding(600, 200), 1.0),
        (lambda: Embedding(600, 200, std=0.02), 0.02),
    ],
)
def test_weights_are_drawn_from_a_truncated_normal(make, std):
    weight = make().weight.detach() / std
    # A normal cut at three standard deviations has a standard deviation of 0.9866.
    assert weight.std() == pytest.approx(0.9866, abs=0.01)
    assert weight.mean() == pytest.approx(0.0, abs=0.02)
    assert 2.9 < weight.abs().max() <= 3.0001


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Linear(0, 3), ValueError, "d_in must be at least 1; got 0"),
        (lambda: Embedding(3, 2.0), TypeError, "d_model must be an int; got 2.0 of type float"),
        (lambda: RMSNorm(3, eps=0), ValueError, "eps must be positive and finite; got 0"),
        (lambda: RotaryEmbedding(3, 8), ValueError, "d_head must be even; got 3"),
        (lambda: RotaryEmbedding(4, 8, theta=-1.0), ValueError, "theta must be positive and finite; got -1.0"),
        (lambda: MultiHeadAttention(8, 3), ValueError, "num_heads must divide d_model, 8; got 3"),
        (lambda: MultiHeadAttention(8, 2, attn="fast"), ValueError, "impl must be one of .*; got 'fast'"),
        (
            lambda: RotaryEmbedding(4, 8)(torch.zeros(9, 4)),
            ValueError,
            "x must have a length of at most 8, the context length; got 9",
        ),
        (
            lambda: RotaryEmbedding(4, 8)(torch.zeros(8, 6)),
            ValueError,
            "x must have vectors of 4 elements, d_head; got 6",
        ),
    ],
)
def test_what_layers_refuse(make, error, message):
    with pytest.raises(error, match=f"^{message}$"):
        make()


@pytest.mark.parametrize("layer", [Linear(2, 3), Embedding(5, 3), RMSNorm(3), RotaryEmbedding(4, 8)])
def test_layers_say_their_sizes(layer):
    assert {Linear: "2, 3", Embedding: "5, 3, std=1", RMSNorm: "3, eps=1e-05"}.get(
        type(layer), "4, context_length=8, theta=10000.0"
    ) in repr(layer)
