"""The whole model: its logits, its parameter names, its loss, and its activation memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cs336_systems.transformer import KVCache, Transformer

from .conftest import assert_all_close, gradients, saved_bytes, saved_tensors

ATTENTION_NAMES = [f"attn.{name}_proj" for name in ("q", "k", "v", "output")]
LAYER_NAMES = ["ln1", *ATTENTION_NAMES, "ln2", "ffn.w1", "ffn.w2", "ffn.w3"]


def test_parameter_names_are_the_courses(tiny):
    layers = [f"layers.{number}.{name}" for number in range(2) for name in LAYER_NAMES]
    expected = [f"{name}.weight" for name in ("token_embeddings", *layers, "ln_final", "lm_head")]
    assert list(Transformer(tiny()).state_dict()) == expected
    assert list(Transformer(tiny(tie_embeddings=True)).state_dict()) == expected[:-1]


def test_logits_follow_from_the_blocks(tiny, device, tokens):
    """Pre-norm blocks, residual connections, a final norm, and a head."""
    model = Transformer(tiny(), device=device)
    x = model.token_embeddings(tokens[0])
    for block in model.layers:
        x = x + block.attn(block.ln1(x))
        x = x + block.ffn(block.ln2(x))
    logits = model(tokens[0])
    assert (logits.shape, logits.dtype) == ((3, 12, 40), torch.float32)
    torch.testing.assert_close(logits, model.ln_final(x) @ model.get_parameter("lm_head.weight").T)
    at = torch.tensor([0, 5, 11], device=device)
    torch.testing.assert_close(model(tokens[0], logits_at=at), logits[torch.arange(3, device=device), at])


@pytest.mark.parametrize(("window", "position", "end"), [(None, 7, 12), (3, 0, 5)])  # two layers of two earlier tokens
def test_tokens_affect_later_logits_only_in_a_window(tiny, device, tokens, window, position, end):
    model, changed = Transformer(tiny(window=window), device=device), tokens[0].clone()
    changed[:, position] = (changed[:, position] + 1) % 40
    differ = (model(tokens[0]) - model(changed)).abs().amax(-1) > 1e-6
    assert differ[:, position:end].all()
    assert not differ[:, :position].any()
    assert not differ[:, end:].any()


def test_a_tied_head_is_the_embedding(tiny, device, tokens):
    model = Transformer(tiny(tie_embeddings=True), device=device)
    hidden = {}
    model.ln_final.register_forward_hook(lambda module, inputs, output: hidden.update(x=output))
    torch.testing.assert_close(model(tokens[0]), hidden["x"] @ model.token_embeddings.weight.T)
    assert model.loss(*tokens) < 6  # initialised as a head: near the loss of a uniform distribution


@pytest.mark.parametrize("tied", [False, True])
def test_from_the_meta_device(tiny, device, tied):
    """`reset_parameters` draws all parameters in a new model's order."""
    torch.manual_seed(5)
    expected = Transformer(tiny(tie_embeddings=tied), device=device)
    model = Transformer(tiny(tie_embeddings=tied), device="meta")
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model.to_empty(device=device)
    for tensor in model.parameters():
        tensor.data.fill_(torch.nan)
    torch.manual_seed(5)
    model.reset_parameters()
    assert_all_close(model.state_dict(), expected.state_dict(), atol=0, rtol=0)
    token_ids = torch.arange(12, device=device).view(1, 12)
    assert torch.equal(model(token_ids), expected(token_ids))


def test_the_loss_is_the_cross_entropy_of_the_logits(tiny, device, tokens):
    model = Transformer(tiny(), device=device)
    targets = tokens[1].clone()
    for ignored in (0, 5):
        targets[0, :ignored] = -100
        expected = F.cross_entropy(model(tokens[0]).flatten(0, 1), targets.flatten())
        torch.testing.assert_close(model.loss(tokens[0], targets), expected)
    total = expected * (targets != -100).sum()
    torch.testing.assert_close(model(tokens[0], targets=targets, count=7.0), total / 7)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 36, 100])
def test_a_loss_in_chunks_is_the_same(tiny, device, tokens, chunk, tied):
    model = Transformer(tiny(tie_embeddings=tied), device=device, dtype=torch.float64)
    targets = tokens[1].clone()
    targets[0, :5] = -100
    expected, loss = model.loss(tokens[0], targets), model.loss(tokens[0], targets, chunk=chunk)
    torch.testing.assert_close(loss, expected)
    assert_all_close(gradients(model, loss), gradients(model, expected))
    with torch.no_grad():
        torch.testing.assert_close(model.loss(tokens[0], targets, chunk=chunk), expected)


@pytest.mark.parametrize(("chunk", "sizes"), [(None, [36]), (16, [16, 16, 4] * 2)])
def test_a_loss_in_chunks_has_the_logits_of_one_at_a_time(tiny, tokens, device, chunk, sizes):
    """In the forward pass and, recomputed, in the backward pass; none are saved."""
    model, seen = Transformer(tiny(vocab_size=1000), device=device), []
    model.get_submodule("lm_head").register_forward_hook(lambda module, inputs, logits: seen.append(len(logits)))
    saved = saved_tensors(lambda: model.loss(*tokens, chunk=chunk), *model.parameters())
    assert any(1000 in x.shape for x in saved) == (chunk is None)
    seen.clear()
    model.loss(*tokens, chunk=chunk).backward()
    assert sorted(seen) == sorted(sizes)


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("impl", ["naive", "tiled"])
def test_checkpointed_blocks_have_the_same_gradients(tiny, device, tokens, every, impl):
    model = Transformer(tiny(num_layers=3, attn=impl), device=device)
    expected = model.loss(*tokens)
    expected_gradients = gradients(model, expected)
    model.checkpoint_every = every
    loss = model.loss(*tokens)
    assert torch.equal(loss, expected)
    assert_all_close(gradients(model, loss), expected_gradients)


def test_checkpointed_blocks_save_less(tiny, device, tokens):
    model, saved = Transformer(tiny(num_layers=4), device=device), {}
    for every in (None, 1, 2):
        model.checkpoint_every = every
        saved[every] = saved_bytes(lambda: model.loss(*tokens), *model.parameters())
    assert saved[1] < saved[None] / 2
    assert saved[2] < saved[1]  # fewer copies of the residual stream


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights(tiny, device, tokens, dtype):
    model = Transformer(tiny(), device=device)
    narrow = Transformer(tiny(), device=device, dtype=dtype)
    narrow.load_state_dict(model.state_dict())
    assert narrow(tokens[0]).dtype == dtype
    loss = narrow.loss(*tokens, chunk=16)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, model.loss(*tokens), rtol=0.02, atol=0)


@pytest.mark.parametrize("every", [None, 1])
def test_bfloat16_autocast(tiny, device, tokens, every):
    """Matrix products are in bfloat16; the residual stream, norms and the loss are in float32."""
    model = Transformer(tiny(attn="tiled"), checkpoint_every=every, device=device)
    dtypes = {}
    for path in ("", ".ln1", ".attn.q_proj", ".attn.rope"):
        module = model.get_submodule(f"layers.0{path}")
        module.register_forward_hook(lambda module, inputs, output, path=path: dtypes.update({path: output.dtype}))
    with torch.autocast(device.type, torch.bfloat16):
        logits, loss = model(tokens[0]), model.loss(*tokens, chunk=10)
    narrow, wide = torch.bfloat16, torch.float32
    assert dtypes == {".ln1": wide, ".attn.q_proj": narrow, ".attn.rope": narrow, "": wide}
    assert (logits.dtype, loss.dtype) == (narrow, wide)
    exact = model.loss(*tokens)
    torch.testing.assert_close(loss, exact, rtol=0.02, atol=0)
    expected = gradients(model, exact)
    for name, gradient in gradients(model, loss).items():
        assert gradient.dtype == wide
        error = torch.linalg.vector_norm(gradient - expected[name]) / torch.linalg.vector_norm(expected[name])
        assert error < 0.05, f"{name}: {error}"


INVALID = [
    (lambda model, ids: model(ids[0]), r"token_ids must have shape \(batch, length\); got \(5,\)"),
    (lambda model, ids: model(ids.repeat(1, 5)), "token_ids must have a length of at most 24; got 25"),
    (lambda model, ids: model.loss(ids, ids[:, 1:]), r"targets must have shape \(2, 5\); got \(2, 4\)"),
    (lambda model, ids: model.loss(ids, ids, chunk=0), "chunk must be at least 1; got 0"),
    (lambda model, ids: model(ids, targets=ids, count=0.0), "count must be positive and finite; got 0.0"),
    (lambda model, ids: model(ids, chunk=3), "chunk must be None without targets; got 3"),
    (lambda model, ids: model(ids, count=3.0), "count must be None without targets; got 3.0"),
    (
        lambda model, ids: model(ids, targets=ids, logits_at=ids[:, 0]),
        "logits_at must be None with targets; got Tensor",
    ),
    (lambda model, ids: model(ids, targets=ids, cache=KVCache(2, 9)), "cache must be None with targets; got KVCache"),
    (lambda model, ids: model(ids, ids, cache=KVCache(2, 9)), "positions must be None with a cache; got Tensor"),
    (lambda model, ids: model(ids, cache=KVCache(3, 9)), "token_ids must have the batch of cache, 3; got 2"),
    (lambda model, ids: model(ids, cache=KVCache(2, 25)), "cache must have a capacity of at most 24; got 25"),
    (lambda model, ids: model(ids, cache=KVCache(2, 4)), "cache must have a capacity of at least 5 tokens .*; got 4"),
    (lambda model, ids: model(ids, cache=KVCache(2, 9)), r"cache must be used under torch.no_grad\(\); got .*"),
    (lambda model, ids: Transformer(model.config, checkpoint_every=0), "checkpoint_every must be at least 1; got 0"),
]


@pytest.mark.parametrize(("call", "message"), INVALID, ids=[message for _, message in INVALID])
def test_invalid_arguments(tiny, call, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        call(Transformer(tiny()), torch.zeros(2, 5, dtype=torch.long))
