"""FlexAttention's functions: the same results as torch's, with gradients on every device, and refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch._higher_order_ops.flex_attention import flex_attention as operator
from torch.nn.attention import flex_attention as torchs

from cs336_systems.compat import flex_attention as ours
from cs336_systems.compat.flex_attention import AuxRequest, create_block_mask, create_mask, flex_attention

BATCH, HEADS, Q_LEN, KV_LEN, DIM = 2, 4, 130, 260, 16
GENERATOR = torch.Generator().manual_seed(0)
IDS, SLOPES = torch.randint(0, 3, (BATCH, KV_LEN), generator=GENERATOR), torch.rand(HEADS, generator=GENERATOR)


def causal(b, h, q_idx, kv_idx):
    return q_idx + KV_LEN - Q_LEN >= kv_idx


def documents(b, h, q_idx, kv_idx):
    return IDS[b, q_idx + KV_LEN - Q_LEN] == IDS[b, kv_idx]


def sliding(b, h, q_idx, kv_idx):
    return q_idx + KV_LEN - Q_LEN - kv_idx < 40 * (h + 1)


def alibi(score, b, h, q_idx, kv_idx):
    return score - SLOPES[h] * (q_idx + KV_LEN - Q_LEN - kv_idx).abs()


MASKS = {
    "causal": causal,
    "both": ours.and_masks(causal, documents),
    "either": ours.or_masks(documents, sliding),
    "everything": ours.noop_mask,
    "some_see_nothing": lambda b, h, q_idx, kv_idx: causal(b, h, q_idx, kv_idx) & (q_idx > 5),
}


@pytest.fixture
def tensors(flash_device):
    generator = torch.Generator().manual_seed(1)
    sizes = (HEADS, Q_LEN), (HEADS, KV_LEN), (HEADS, KV_LEN)
    return [torch.randn(BATCH, *size, DIM, generator=generator).to(flash_device).requires_grad_() for size in sizes]


def returned(*arguments, **options) -> Any:
    """What `flex_attention` returns, of any type."""
    return flex_attention(*arguments, **options)


def of_torch(mask, score, q, k, v, **options):
    """torch's, without its kernels: eager, and on the CPU.

    There `flex_attention` refuses to return the largest scores, in base 2, of the operator that it calls.
    """
    listed = torchs.create_block_mask(mask, BATCH, HEADS, Q_LEN, KV_LEN, device="cpu")
    with torch.no_grad():
        q, k, v = (x.detach().cpu() for x in (q, k, v))
        out, aux = torchs.flex_attention(q, k, v, score, listed, return_aux=torchs.AuxRequest(lse=True), **options)
        unchanged = score or (lambda score, b, h, q_idx, kv_idx: score)
        *_, max_scores = operator(q, k, v, unchanged, listed.as_tuple(), DIM**-0.5, {})
        return out, aux.lse, max_scores * math.log(2)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("score", [None, alibi])
def test_results_are_those_of_torch(tensors, monkeypatch, name, score):
    monkeypatch.setitem(globals(), "IDS", IDS.to(tensors[0].device))
    monkeypatch.setitem(globals(), "SLOPES", SLOPES.to(tensors[0].device))
    listed = create_block_mask(MASKS[name], BATCH, HEADS, Q_LEN, KV_LEN, device=tensors[0].device)
    out, (lse, max_scores) = returned(*tensors, score, listed, return_aux=AuxRequest(lse=True, max_scores=True))
    monkeypatch.undo()
    expected, expected_lse, expected_max = of_torch(MASKS[name], score, *tensors)
    torch.testing.assert_close(out.cpu(), expected, rtol=2e-5, atol=2e-5, check_stride=False)
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(max_scores.cpu(), expected_max, rtol=2e-5, atol=2e-5)
    assert (max_scores == -math.inf).any() == (name == "some_see_nothing")


def test_a_captured_tensor_has_a_gradient(tensors):
    slopes = SLOPES.to(tensors[0].device).requires_grad_()
    out = returned(*tensors, lambda s, b, h, q_idx, kv_idx: s + slopes[h] * (q_idx - kv_idx))
    (found,) = torch.autograd.grad(out.square().sum(), slopes)
    q, k, v = (x.double() for x in tensors)
    places = torch.arange(Q_LEN, device=q.device)[:, None] - torch.arange(KV_LEN, device=q.device)
    scores = q @ k.mT / DIM**0.5 + slopes.double()[:, None, None] * places
    (expected,) = torch.autograd.grad((scores.softmax(-1) @ v).square().sum(), slopes)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_block_masks():
    listed = create_block_mask(causal, None, None, Q_LEN, KV_LEN, device="cpu")
    theirs = torchs.create_block_mask(causal, None, None, Q_LEN, KV_LEN, device="cpu")
    assert (listed.shape, listed.seq_lengths) == ((1, 1, Q_LEN, KV_LEN), (Q_LEN, KV_LEN))
    assert torch.equal(listed.to_dense(), theirs.to_dense())
    assert repr(listed) == f"BlockMask(shape=(1, 1, {Q_LEN}, {KV_LEN}), sparsity={listed.sparsity():.2f}%)"
    aligned = (module.create_block_mask(sliding, None, 1, 512, 512, device="cpu") for module in (ours, torchs))
    own, other = (each.sparsity() for each in aligned)
    assert own == pytest.approx(other)
    dense = create_mask(MASKS["both"], BATCH, HEADS, Q_LEN, KV_LEN, device="cpu")
    assert torch.equal(dense, torchs.create_mask(MASKS["both"], BATCH, HEADS, Q_LEN, KV_LEN, device="cpu"))


def test_grouped_heads_and_auxiliary_outputs(tensors):
    q, k, v = tensors
    with pytest.raises(ValueError, match="key must have the 4 heads of query unless enable_gqa is True; got 2"):
        flex_attention(q, k[:, :2], v[:, :2])
    out, aux = returned(q, k[:, :2], v[:, :2], enable_gqa=True, return_aux=AuxRequest(lse=True))
    same, lse = returned(q, *(x[:, :2].repeat_interleave(2, 1) for x in (k, v)), return_lse=True)
    torch.testing.assert_close((out, aux.lse), (same, lse), rtol=1e-5, atol=1e-5)
    assert returned(q, k, v, return_aux=AuxRequest())[1] == (None, None)
    lse, max_scores = returned(q, k, v, return_aux=AuxRequest(max_scores=True))[1]
    assert lse is None
    assert not max_scores.requires_grad


def test_refusals(tensors):
    q, k, v = tensors
    listed = create_block_mask(causal, None, None, Q_LEN, KV_LEN, device=q.device)
    for arguments, error, message in (
        ({"kernel_options": {"BLOCK_M": 64}}, ValueError, "kernel_options must be None"),
        ({"return_aux": AuxRequest(lse=True), "return_lse": True}, ValueError, "return_lse must be False"),
        ({"block_mask": listed.mask}, TypeError, "block_mask must be a BlockMask of this module; got Mask"),
    ):
        with pytest.raises(error, match=message):
            flex_attention(q, k, v, **arguments)
    with pytest.raises(ValueError, match="mask must have blocks that were found for this call"):
        flex_attention(q[:, :, :100], k, v, block_mask=listed)
    with pytest.raises(ValueError, match="BLOCK_SIZE must be 128"):
        create_block_mask(causal, None, None, Q_LEN, KV_LEN, BLOCK_SIZE=64)
