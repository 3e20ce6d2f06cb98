"""The whole model: what comes out, its names, its loss, and what is spared for the backward pass."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cs336_systems.transformer import KVCache, Transformer

NAMES_OF_A_LAYER = [
    "ln1.weight",
    "attn.q_proj.weight",
    "attn.k_proj.weight",
    "attn.v_proj.weight",
    "attn.output_proj.weight",
    "ln2.weight",
    "ffn.w1.weight",
    "ffn.w2.weight",
    "ffn.w3.weight",
]


def gradients(model, loss):
    """By name, of all parameters."""
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, tuple(named.values())), strict=True))


def test_names_are_those_of_the_course(tiny):
    layers = [f"layers.{number}.{name}" for number in range(2) for name in NAMES_OF_A_LAYER]
    expected = ["token_embeddings.weight", *layers, "ln_final.weight", "lm_head.weight"]
    assert list(Transformer(tiny()).state_dict()) == expected
    assert list(Transformer(tiny(tie_embeddings=True)).state_dict()) == expected[:-1]


def test_shapes(tiny, device, tokens):
    model = Transformer(tiny(), device=device)
    logits = model(tokens[0])
    assert logits.shape == (3, 12, 40)
    assert logits.dtype == torch.float32
    at = torch.tensor([0, 5, 11], device=device)
    torch.testing.assert_close(model(tokens[0], logits_at=at), logits[torch.arange(3, device=device), at])


def test_a_model_is_made_of_its_blocks(tiny, device, tokens):
    """Pre-norm, residual, a last norm, a head."""
    model = Transformer(tiny(), device=device)
    x = model.token_embeddings(tokens[0])
    for block in model.layers:
        x = x + block.attn(block.ln1(x))
        x = x + block.ffn(block.ln2(x))
    torch.testing.assert_close(model(tokens[0]), model.ln_final(x) @ model.get_parameter("lm_head.weight").T)


def test_no_token_sees_a_later_one(tiny, device, tokens):
    model = Transformer(tiny(), device=device)
    changed = tokens[0].clone()
    changed[:, 7] = (changed[:, 7] + 1) % 40
    before, after = model(tokens[0]), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()


def test_a_window_hides_what_is_further_back_than_all_layers_reach(tiny, device, tokens):
    model = Transformer(tiny(window=3), device=device)
    changed = tokens[0].clone()
    changed[:, 0] = (changed[:, 0] + 1) % 40
    same = (model(tokens[0]) - model(changed)).abs().amax(-1) < 1e-6
    assert not same[:, :5].any()  # two layers of two tokens back each
    assert same[:, 5:].all()


def test_a_tied_head_is_the_embedding(tiny, device, tokens):
    torch.manual_seed(3)
    model = Transformer(tiny(tie_embeddings=True), device=device)
    hidden = {}
    model.ln_final.register_forward_hook(lambda module, inputs, output: hidden.update(x=output))
    torch.testing.assert_close(model(tokens[0]), hidden["x"] @ model.token_embeddings.weight.T)
    # As a head is drawn, so that the first loss is near that of a uniform guess.
    assert model.loss(*tokens) < 6
    moved = Transformer(tiny(tie_embeddings=True), device="meta").to_empty(device=device)
    torch.manual_seed(3)
    moved.reset_parameters()
    torch.testing.assert_close(moved(tokens[0]), model(tokens[0]))


@pytest.mark.parametrize("tied", [False, True])
def test_from_the_meta_device(tiny, tied):
    """Parameters are drawn in the same order, and nothing else is left to chance."""
    torch.manual_seed(5)
    expected = Transformer(tiny(tie_embeddings=tied))
    model = Transformer(tiny(tie_embeddings=tied), device="meta")
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    for tensor in model.parameters():
        tensor.data.fill_(torch.nan)
    torch.manual_seed(5)
    model.reset_parameters()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    token_ids = torch.arange(12).view(1, 12)
    assert torch.equal(model(token_ids), expected(token_ids))


def test_the_loss_is_the_cross_entropy_of_the_logits(tiny, device, tokens):
    model = Transformer(tiny(), device=device)
    targets = tokens[1].clone()
    for ignored in (0, 5):
        targets[0, :ignored] = -100
        expected = F.cross_entropy(model(tokens[0]).flatten(0, 1), targets.flatten())
        torch.testing.assert_close(model.loss(tokens[0], targets), expected)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 36, 100])
def test_a_loss_in_chunks_is_the_same(tiny, device, tokens, chunk, tied):
    model = Transformer(tiny(tie_embeddings=tied), device=device, dtype=torch.float64)
    targets = tokens[1].clone()
    targets[0, :5] = -100
    whole, parts = model.loss(tokens[0], targets), model.loss(tokens[0], targets, chunk=chunk)
    torch.testing.assert_close(parts, whole)
    expected = gradients(model, whole)
    for name, gradient in gradients(model, parts).items():
        torch.testing.assert_close(gradient, expected[name], msg=lambda text, name=name: f"{name}: {text}")


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes how many elements the largest result of any operator has."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_a_loss_in_chunks_without_gradients(tiny, device, tokens):
    model = Transformer(tiny(), device=device)
    with torch.no_grad():
        torch.testing.assert_close(model.loss(*tokens, chunk=5), model.loss(*tokens))


def test_a_loss_in_chunks_never_has_all_logits(tiny, tokens, device):
    model = Transformer(tiny(vocab_size=1000), device=device)
    all_logits = 3 * 12 * 1000
    for chunk, most in ((None, all_logits), (4, all_logits - 1)):
        with LargestTensor() as largest:
            model.loss(*tokens, chunk=chunk).backward()
        assert (largest.elements >= all_logits) == (chunk is None)
        assert largest.elements <= most


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("impl", ["naive", "tiled"])
def test_checkpointed_blocks_give_the_same_gradients(tiny, device, tokens, every, impl):
    torch.manual_seed(1)
    model = Transformer(tiny(num_layers=3, attn=impl), device=device)
    torch.manual_seed(1)
    spared = Transformer(tiny(num_layers=3, attn=impl), checkpoint_every=every, device=device)
    loss, expected = spared.loss(*tokens), model.loss(*tokens)
    assert torch.equal(loss, expected)
    expected = gradients(model, expected)
    for name, gradient in gradients(spared, loss).items():
        torch.testing.assert_close(gradient, expected[name])


def saved_bytes(model, tokens):
    sizes = []
    parameters = {parameter.data_ptr() for parameter in model.parameters()}

    def note(x):
        if x.data_ptr() not in parameters:
            sizes.append(x.nbytes)
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        loss = model.loss(*tokens)
    return sum(sizes), loss


def test_checkpointed_blocks_keep_less(tiny, device, tokens):
    kept = {
        every: saved_bytes(Transformer(tiny(num_layers=4), checkpoint_every=every, device=device), tokens)[0]
        for every in (None, 1, 2)
    }
    assert kept[1] < kept[None] / 2
    # Fewer places where the residual stream is kept.
    assert kept[2] < kept[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_of_narrow_weights(tiny, device, tokens, dtype):
    model = Transformer(tiny(), device=device)
    narrow = Transformer(tiny(), device=device, dtype=dtype)
    narrow.load_state_dict(model.state_dict())
    assert narrow(tokens[0]).dtype == dtype
    loss = narrow.loss(*tokens, chunk=16)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, model.loss(*tokens), rtol=0.02, atol=0)


@pytest.mark.parametrize("every", [None, 1])
def test_bfloat16_autocast(tiny, device, tokens, every):
    torch.manual_seed(1)
    model = Transformer(tiny(attn="tiled"), checkpoint_every=every, device=device)
    seen = {}
    for name, path in {"norm": ".ln1", "q": ".attn.q_proj", "rope": ".attn.rope", "block": ""}.items():
        module = model.get_submodule(f"layers.0{path}")
        module.register_forward_hook(lambda module, inputs, output, name=name: seen.update({name: output.dtype}))
    with torch.autocast(device.type, torch.bfloat16):
        logits = model(tokens[0])
        loss = model.loss(*tokens, chunk=10)
    # Products are narrow; the residual stream, norms and the loss are not.
    assert seen == {"norm": torch.float32, "q": torch.bfloat16, "rope": torch.bfloat16, "block": torch.float32}
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    exact = model.loss(*tokens)
    torch.testing.assert_close(loss, exact, rtol=0.02, atol=0)
    expected = gradients(model, exact)
    for name, gradient in gradients(model, loss).items():
        assert gradient.dtype == torch.float32
        error = torch.linalg.vector_norm(gradient - expected[name]) / torch.linalg.vector_norm(expected[name])
        assert error < 0.05, f"{name}: {error}"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model, ids: model(ids[0]), r"token_ids must have shape \(batch, length\); got \(5,\)"),
        (lambda model, ids: model(ids.repeat(1, 5)), "token_ids must have a length of at most 24; got 25"),
        (
            lambda model, ids: model.loss(ids, ids[:, 1:]),
            r"targets must have shape \(2, 5\); got \(2, 4\)",
        ),
        (lambda model, ids: model.loss(ids, ids, chunk=0), "chunk must be at least 1; got 0"),
        (lambda model, ids: model(ids, chunk=3), "chunk must be None without targets; got 3"),
        (
            lambda model, ids: model(ids, targets=ids, logits_at=ids[:, 0]),
            "logits_at must be None with targets; got Tensor",
        ),
        (
            lambda model, ids: model(ids, targets=ids, cache=KVCache(2, 9)),
            "cache must be None with targets; got KVCache",
        ),
        (
            lambda model, ids: model(ids, ids, cache=KVCache(2, 9)),
            "positions must be None with a cache, which gives them; got a tensor",
        ),
        (
            lambda model, ids: model(ids, cache=KVCache(3, 9)),
            "token_ids must have the batch of cache, 3; got 2",
        ),
        (
            lambda model, ids: model(ids, cache=KVCache(2, 25)),
            "cache must have a capacity of at most 24; got 25",
        ),
        (
            lambda model, ids: model(ids, cache=KVCache(2, 4)),
            "cache must have room for 5 tokens a sequence; got a capacity of 4",
        ),
        (
            lambda model, ids: model(ids, cache=KVCache(2, 9)),
            r"cache must be used under torch.no_grad\(\): it keeps no graph; got keys that need gradients",
        ),
        (
            lambda model, ids: Transformer(model.config, checkpoint_every=0),
            "checkpoint_every must be at least 1; got 0",
        ),
    ],
)
def test_what_the_model_refuses(tiny, call, message):
    model = Transformer(tiny())
    with pytest.raises(ValueError, match=f"^{message}$"):
        call(model, torch.zeros(2, 5, dtype=torch.long))
