"""Each layer against its formula, written in another way, in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from cs336_systems.transformer import Embedding, Linear, MultiHeadAttention, RMSNorm, RotaryEmbedding, SwiGLU

F64 = torch.float64


def test_linear_embedding_and_swiglu(device):
    linear, x = Linear(5, 7, device, F64), torch.randn(2, 3, 5, device=device, dtype=F64)
    torch.testing.assert_close(linear(x), (linear.weight[None, None] * x[:, :, None]).sum(-1))
    embedding = Embedding(11, 6, device=device, dtype=F64)
    expected = torch.stack([embedding.weight[i] for i in (0, 10, 3, 3)]).view(2, 2, 6)
    assert torch.equal(embedding(torch.tensor([[0, 10], [3, 3]], device=device)), expected)
    ffn, x = SwiGLU(6, 10, device, F64), torch.randn(2, 6, device=device, dtype=F64)
    g, u = x @ ffn.w1.weight.T, x @ ffn.w3.weight.T
    torch.testing.assert_close(ffn(x), (g / (1 + torch.exp(-g)) * u) @ ffn.w2.weight.T)


def test_rms_norm(device):
    norm = RMSNorm(6, eps=0.1, device=device, dtype=F64)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 6, device=device, dtype=F64)
    for row, out in zip(x.view(-1, 6), norm(x).view(-1, 6), strict=True):
        root = math.sqrt(sum(value**2 for value in row.tolist()) / 6 + 0.1)
        torch.testing.assert_close(out, torch.stack([row[i] * norm.weight[i] / root for i in range(6)]))


def test_rms_norm_computes_in_float32(device):
    """The square of 1000 overflows float16, and a bfloat16 sum of 4096 squares is inaccurate."""
    for dtype in (torch.float16, torch.bfloat16):
        out = RMSNorm(4096, device=device)(torch.full((1, 4096), 1000.0, device=device, dtype=dtype))
        assert out.dtype == dtype
        torch.testing.assert_close(out, torch.ones_like(out), atol=torch.finfo(dtype).eps, rtol=0)


def rotate(x, positions, theta):
    """RoPE with complex numbers."""
    d = x.shape[-1]
    angles = positions[..., None] * theta ** (-torch.arange(0, d, 2, device=x.device, dtype=F64) / d)
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(z).flatten(-2)


def test_rope(device):
    rope = RotaryEmbedding(8, context_length=50, theta=100.0, device=device, dtype=F64)
    x = torch.randn(2, 7, 3, 8, device=device, dtype=F64).transpose(1, 2)
    assert rope(x).stride() == x.stride()
    torch.testing.assert_close(rope(x), rotate(x, torch.arange(7, device=device, dtype=F64), 100.0))
    positions = torch.randint(50, (2, 1, 7), device=device)
    torch.testing.assert_close(rope(x, positions), rotate(x, positions.to(F64), 100.0))
    narrow = RotaryEmbedding(8, context_length=50, theta=100.0, device=device)(x.bfloat16())
    assert narrow.dtype == torch.bfloat16  # rounded once, at the end
    close = {"rtol": torch.finfo(torch.bfloat16).eps / 2, "atol": 1e-5}
    torch.testing.assert_close(narrow.double(), rope(x.bfloat16().double()), **close)


def test_the_table_of_rope_survives_casts_and_moves(device):
    expected = RotaryEmbedding(8, 5000, device=device).table
    exact = RotaryEmbedding(8, 5000, device=device, dtype=F64).table
    for rope in (
        RotaryEmbedding(8, 5000).to(torch.bfloat16).to(device),
        RotaryEmbedding(8, 5000, device=device, dtype=torch.float16),
        RotaryEmbedding(8, 5000, device="meta").to_empty(device=device),
    ):
        assert rope.table.dtype == torch.float32
        assert torch.equal(rope.table, expected)
        assert not rope.state_dict()
    assert torch.equal(RotaryEmbedding(8, 5000, device=device).double().table, exact)
    assert torch.equal(exact.float(), expected)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("kv_heads", [None, 2, 1])
def test_multi_head_attention(device, kv_heads, window):
    """Against torch's attention over the visible keys."""
    rope = RotaryEmbedding(4, 16, device=device, dtype=F64)
    layer = MultiHeadAttention(16, 4, kv_heads, rope, window, "naive", device, F64)
    x = torch.randn(2, 6, 16, device=device, dtype=F64)
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    q, k, v = ((x @ each.weight.T).unflatten(-1, (-1, 4)).transpose(1, 2) for each in projections)
    positions = torch.arange(6, device=device, dtype=F64)
    q, k = (rotate(each, positions, 10_000.0) for each in (q, k))
    k, v = (each.repeat_interleave(4 // (kv_heads or 4), dim=1) for each in (k, v))
    distance = positions[:, None] - positions
    visible = (distance >= 0) & (distance < (window or 6))
    expected = F.scaled_dot_product_attention(q, k, v, visible).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer(x), expected @ layer.output_proj.weight.T)


def test_positions_affect_rope_only(device):
    layer = MultiHeadAttention(16, 4, rope=RotaryEmbedding(4, 64, device=device), device=device)
    x = torch.randn(2, 6, 16, device=device)
    shifted = torch.arange(6, device=device) + torch.tensor([[0], [20]], device=device)
    torch.testing.assert_close(layer(x, shifted), layer(x), atol=1e-5, rtol=1e-5)  # the same distances
    assert not torch.allclose(layer(x, 2 * shifted), layer(x), atol=1e-2)
    bare = MultiHeadAttention(16, 4, device=device)
    torch.testing.assert_close(bare(x, shifted), bare(x))


@pytest.mark.parametrize(
    ("make", "std"),
    [
        (lambda: Linear(200, 600), math.sqrt(2 / 800)),
        (lambda: Embedding(600, 200), 1.0),
        (lambda: Embedding(600, 200, std=0.02), 0.02),
    ],
)
def test_initial_weights_are_truncated_normal(make, std):
    weight = make().weight.detach() / std
    # A normal distribution truncated at three standard deviations has a standard deviation of 0.9866.
    assert weight.std() == pytest.approx(0.9866, abs=0.01)
    assert weight.mean() == pytest.approx(0.0, abs=0.02)
    assert 2.9 < weight.abs().max() <= 3.0001


ROPE = RotaryEmbedding(4, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RotaryEmbedding(3, 8), "d_head must be even; got 3"),
        (lambda: RotaryEmbedding(4, 8, theta=-1.0), "theta must be positive and finite; got -1.0"),
        (lambda: MultiHeadAttention(8, 3), "num_heads must divide d_model, 8; got 3"),
        (lambda: MultiHeadAttention(8, 2, attn="fast"), "impl must be one of .*; got 'fast'"),
        (lambda: ROPE(torch.zeros(9, 4)), "x must have a length of at most 8, the context length; got 9"),
        (lambda: ROPE(torch.zeros(8, 6)), "x must have vectors of 4 elements, d_head; got 6"),
    ],
)
def test_invalid_arguments(call, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        call()
