"""The functions that transformers calls: which pairs their masks show, and what layers may pass."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from cs336_systems.attention import attention
from cs336_systems.compat import huggingface
from cs336_systems.compat import huggingface_masks as masks
from cs336_systems.compat.huggingface import attention_forward, attention_mask
from cs336_systems.compat.huggingface_masks import of_sequences, starts_of

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("default")  # transformers' own warnings


def test_a_window_applies_to_one_query_with_a_full_cache(device):
    q, k, v = (torch.randn(1, 2, length, 4, device=device) for length in (1, 9, 9))
    mask = attention_mask(1, 1, 9, q_offset=8, local_size=3)
    assert mask is None
    out, weights = attention_forward(SimpleNamespace(is_causal=True), q, k, v, mask, sliding_window=3)
    expected = attention(q, k[:, :, -3:], v[:, :, -3:])
    assert weights is None
    torch.testing.assert_close(out, expected.transpose(1, 2))


LAYER = SimpleNamespace(is_causal=True)


@pytest.fixture
def qkv(device):
    return torch.randn(3, 1, 2, 5, 4, device=device).unbind()


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_with_rows_is_complete(device, qkv, kind):
    visible = torch.eye(5, dtype=torch.bool, device=device).roll(1, 1)[None, None]  # not causal
    mask = visible if kind == "bool" else torch.zeros(1, 1, 5, 5, device=device).masked_fill(~visible, -1e30)
    out, _ = attention_forward(LAYER, *qkv, mask, sliding_window=2)
    torch.testing.assert_close(out, qkv[2].roll(-1, 2).transpose(1, 2))


@pytest.mark.parametrize(
    ("layer", "is_causal", "expected"), [(True, None, True), (False, None, False), (True, False, False)]
)
def test_the_argument_is_causal_precedes_the_layers(qkv, layer, is_causal, expected):
    out, _ = attention_forward(SimpleNamespace(is_causal=layer), *qkv, None, is_causal=is_causal, sliding_window=9)
    torch.testing.assert_close(out, attention(*qkv, causal=expected).transpose(1, 2))


def test_a_position_bias_is_added_to_scores_and_to_a_mask(device, qkv):
    bias, mask = (torch.randn(1, heads, 5, 5, device=device) for heads in (2, 1))
    out, _ = attention_forward(LAYER, *qkv, None, position_bias=bias)
    torch.testing.assert_close(out, attention(*qkv, causal=True, bias=bias).transpose(1, 2))
    out, _ = attention_forward(LAYER, *qkv, mask, position_bias=bias)
    torch.testing.assert_close(out, attention(*qkv, bias=bias + mask).transpose(1, 2))


def test_dropout(device):
    q = torch.randn(1, 2, 200, 4, device=device)
    eye = torch.eye(200, device=device).expand(1, 2, -1, -1)  # the output is the probabilities
    out, _ = attention_forward(SimpleNamespace(is_causal=False), q, q, eye, None, dropout=0.25)
    assert (out == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)


def shown(mask, q_length, kv_length, batch=2):
    """The pairs that a causal layer sees with this mask, and which queries are in real sequences."""
    causal = torch.ones(q_length, kv_length, dtype=torch.bool).tril(kv_length - q_length)
    if mask is None:
        return causal.expand(batch, 1, -1, -1), torch.ones(batch, 1, q_length, dtype=torch.bool)
    starts = starts_of(mask)
    assert starts is not None
    assert starts.is_real is not None
    visible = torch.zeros(batch * q_length, batch * kv_length, dtype=torch.bool)
    real = torch.zeros(batch * q_length, dtype=torch.bool)
    for number, is_real in enumerate(starts.is_real.tolist()):
        rows, columns = (slice(*x[number : number + 2].tolist()) for x in (starts.q, starts.k))
        part = visible[rows, columns]
        part[:] = starts.is_causal is False or torch.ones_like(part).tril(part.shape[1] - part.shape[0])
        real[rows] = bool(is_real)
    assert (starts.q[-1].item(), starts.k[-1].item()) == visible.shape
    visible = visible.view(batch, q_length, batch, kv_length)
    return torch.stack([visible[i, :, i] for i in range(batch)])[:, None], real.view(batch, 1, q_length)


SIZES = {"square": (6, 6, 0, 0), "cached": (3, 8, 5, 0), "static": (4, 9, torch.tensor(2), 0)}
SIZES |= {"offset": (3, 5, 6, 4), "one": (1, 6, 5, 0), "queries_before": (5, 7, 0, 0)}


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("padding", ["none", "left", "right", "both", "all"])
@pytest.mark.parametrize("sizes", SIZES)
def test_sequences_show_what_the_masks_of_transformers_do(sizes, padding, full):
    """To queries that are no padding; those of other kinds of layers to all."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

    q_length, kv_length, q_offset, kv_offset = SIZES[sizes]
    real = torch.ones(2, kv_length + kv_offset, dtype=torch.bool)
    real[1, {"none": [], "left": [0, 1], "right": [-1], "both": [0, -1], "all": [*range(len(real[1]))]}[padding]] = (
        False
    )
    given = {"q_offset": q_offset, "kv_offset": kv_offset, "allow_is_causal_skip": not full}
    given |= {"attention_mask": None if padding == "none" else real, "allow_is_bidirectional_skip": full}
    mask = attention_mask(2, q_length, kv_length, **given)
    function = bidirectional_mask_function if full else causal_mask_function
    given |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, "mask_function": function}
    expected = sdpa_mask(2, q_length, kv_length, **given)
    if full and mask is None:
        assert expected.all()
        return
    visible, is_real = shown(mask, q_length, kv_length)
    assert torch.equal(visible & is_real[..., None], expected & is_real[..., None])
    places = torch.arange(q_length) + q_offset
    inside = (places >= kv_offset) & (places < kv_offset + kv_length)
    missed = ~is_real[:, 0] & inside & real[:, places.clamp(max=real.shape[1] - 1)]
    assert not (missed & expected.any(-1)[:, 0]).any()


def test_other_masks_are_those_of_transformers(device, monkeypatch):
    """Other mask functions, padding before a single query on a GPU, and unused slots with padding between."""
    from transformers.masking_utils import sdpa_mask, sliding_window_causal_mask_function

    monkeypatch.setattr(masks, "is_cpu", lambda device: False)
    padded = {"q_offset": 3, "attention_mask": torch.tensor([[False, True, True, True]], device=device)}
    between = {"q_offset": 2, "attention_mask": torch.tensor([[True, False, True, True]], device=device)}
    for arguments in (
        {"q_length": 4, "kv_length": 4, "allow_is_causal_skip": False},
        {"q_length": 1, "kv_length": 4, "mask_function": sliding_window_causal_mask_function(2), **padded},
        {"q_length": 2, "kv_length": 6, **between},
    ):
        mask = attention_mask(1, **arguments, device=device)
        expected = sdpa_mask(batch_size=1, **arguments | {"allow_is_causal_skip": False}, device=device)
        assert torch.equal(mask, expected)


def test_padding_in_between_is_a_mask_of_keys(device):
    padding = torch.tensor([[False, False, True, False, True, True]], device=device)
    mask = attention_mask(1, 2, 4, q_offset=4, kv_offset=2, attention_mask=padding)
    assert mask is not None
    assert mask.tolist() == [[[[True, False, True, True]]]]
    full = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}
    mask = attention_mask(1, 2, 6, attention_mask=padding, **full)
    assert mask is not None
    assert mask.tolist() == [[padding.tolist() * 2]]
    assert attention_mask(1, 2, 3, q_offset=4, kv_offset=3, attention_mask=padding | True) is None


@pytest.mark.parametrize("causal", [True, False])
def test_one_call_is_what_a_call_for_each_sequence_is(device, monkeypatch, causal):
    """A GPU computes all sequences at once."""
    q, k, v = (torch.randn(2, heads, 6, 4, device=device) for heads in (4, 2, 2))
    padding = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0]], device=device).bool()
    given = {"allow_is_causal_skip": causal, "allow_is_bidirectional_skip": not causal}
    mask = attention_mask(2, 6, 6, attention_mask=padding, **given)
    layer = SimpleNamespace(is_causal=True)  # which the mask of an encoder overrules
    window = 3 if causal else None
    results = []
    for is_cpu in (True, False):
        monkeypatch.setattr(huggingface, "is_cpu", lambda device, is_cpu=is_cpu: is_cpu)
        results.append(attention_forward(layer, q, k, v, mask, sliding_window=window)[0])
    seen = torch.ones_like(padding) if not causal else padding
    torch.testing.assert_close(results[0][seen], results[1][seen])
    pairs = padding[:, None, None] & torch.ones(6, 6, device=device).bool()
    expected = attention(q, k, v, mask=pairs, causal=causal, window=(2, 0) if causal else None)
    torch.testing.assert_close(results[0][seen], expected.transpose(1, 2)[seen])


def test_position_ids_say_where_sequences_begin(device):
    """Where transformers did not look at them, as for gpt-oss."""
    packed = torch.tensor([[0, 1, 2, 0, 1, 0]], device=device)
    for batch, expected in ((1, [0, 3, 5, 6]), (2, [0, 3, 5, 6, 9, 11, 12])):
        starts = masks.starts_of_positions(packed, batch)
        assert starts is not None
        assert starts.q.tolist() == starts.k.tolist() == expected
    packed[:] = torch.arange(6)
    for others in (packed, torch.tensor([[0, 0, 5, 1]]), torch.arange(4), torch.arange(2, 6)[None], None):
        assert masks.starts_of_positions(others, 1) is None


def test_a_mask_of_sequences_fits_its_call(qkv):
    mask = of_sequences([0, 2, 6], [0, 2, 6], [1, 1], True, qkv[0].device)
    if qkv[0].device.type == "cpu":  # a GPU would have to be asked
        refused(
            "sequences must end at row 5 of q and 5 of k; got [0, 2, 6] and [0, 2, 6]",
            lambda: attention_forward(LAYER, *qkv, mask),
        )


def refused(message, call):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call()


def test_what_is_refused(qkv):
    instead = "use attn_implementation='eager' instead"
    starts = torch.tensor([0, 5], device=qkv[0].device)
    cache, pages = SimpleNamespace(update=None), "set max_blocks_per_request=0 in ContinuousBatchingConfig"
    for message, arguments in (
        (f"output_attentions must be False: probabilities are not in memory; {instead}", {"output_attentions": True}),
        (f"block_table must be None: {pages}", {"cache": cache, "block_table": starts}),
        ("cu_seq_lens_k must be given where cu_seq_lens_q is; got None", {"cu_seq_lens_q": starts}),
    ):
        refused(message, lambda arguments=arguments: attention_forward(LAYER, *qkv, None, **arguments))
    with pytest.raises(TypeError, match=r"^cache must be transformers' PagedAttentionCache; got object$"):
        attention_forward(LAYER, *qkv, None, cache=object())
    layer = SimpleNamespace(is_causal=True, config=SimpleNamespace(sliding_window=3))
    message = f"sliding_window must be passed by SimpleNamespace, whose model has 3; got none: {instead}"
    refused(message, lambda: attention_forward(layer, *qkv, None))
    attention_forward(layer, *qkv, None, sliding_window=None)
    for wrong in ("cs336_flash", "", None):
        message = f"name must be a string without 'flash', which transformers treats specially; got {wrong!r}"
        refused(message, lambda wrong=wrong: huggingface.register(wrong))
    with pytest.raises(ValueError, match=r"^impl must be one of .*; got 'fast'$"):
        huggingface.register(impl="fast")
