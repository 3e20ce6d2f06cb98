"""The estimate against tensors counted, and what is said when it does not fit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cs336_systems.profiling.memory import GIB, collection_paused, measure_memory
from cs336_systems.profiling.saved import activation_bytes, saved_tensors
from cs336_systems.training import estimate as module
from cs336_systems.training.estimate import DoesNotFitError, MemoryEstimate, estimate_memory, require_memory
from cs336_systems.training.optimizer import adamw
from cs336_systems.transformer import Transformer, TransformerConfig, swiglu

SIZES = {
    "vocab_size": 320,
    "context_length": 128,
    "d_model": 96,
    "d_ff": 256,
    "num_layers": 4,
    "num_heads": 4,
    "attn": "sdpa",
}
BATCH = 3


def kept_bytes(config, *, autocast, recompute_every, loss_chunk):
    """What autograd keeps between forward and backward, counted."""
    model = Transformer(config, checkpoint_every=recompute_every)
    tokens = torch.randint(300, (BATCH, config.context_length))

    def forward():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(tokens, targets=tokens, chunk=loss_chunk)

    inputs = [*model.parameters(), *model.buffers(), tokens]
    return measure_memory(forward, lambda loss: loss.backward(), inputs=inputs, device="cpu").held_bytes


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "changes",
    [{}, {"num_kv_heads": 1}, {"tie_embeddings": True}, {"d_ff": 700, "num_heads": 8}, {"attn": "tiled"}],
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_what_autograd_keeps(changes, autocast):
    config = TransformerConfig(**SIZES | changes)
    kept = kept_bytes(config, autocast=autocast, recompute_every=None, loss_chunk=None)
    parts = estimate_memory(config, BATCH, autocast=autocast)
    # Of the loss the softmax alone is kept until the backward pass: 4 bytes a logit.
    softmax = 4 * BATCH * config.context_length * config.vocab_size
    assert kept == pytest.approx(parts.blocks + parts.ends + parts.narrow_weights + softmax, rel=0.03)


@pytest.mark.parametrize("autocast", [False, True])
def test_naive_attention_keeps_its_probabilities(autocast):
    config = TransformerConfig(**SIZES | {"attn": "naive", "context_length": 512, "num_heads": 8})
    kept = kept_bytes(config, autocast=autocast, recompute_every=None, loss_chunk=None)
    parts = estimate_memory(config, BATCH, autocast=autocast)
    softmax = 4 * BATCH * config.context_length * config.vocab_size
    assert kept == pytest.approx(parts.blocks + parts.ends + parts.narrow_weights + softmax, rel=0.005)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("attn", ["naive", "sdpa"])
def test_one_block_exactly(attn, autocast):
    config = TransformerConfig(**SIZES | {"attn": attn})
    model = Transformer(config)
    tokens = torch.randint(300, (BATCH, config.context_length))

    def forward():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(tokens, targets=tokens)

    kept = activation_bytes(saved_tensors(forward, model, [tokens]), "layers.1")
    assert 4 * kept == estimate_memory(config, BATCH, autocast=autocast).blocks


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels that are compiled take no CPU tensors")
@pytest.mark.parametrize("autocast", [False, True])
def test_one_block_with_the_fused_ffn_exactly(autocast, monkeypatch):
    monkeypatch.setattr(swiglu, "fused", swiglu.can_be_fused)
    config = TransformerConfig(**SIZES)
    model = Transformer(config)
    tokens = torch.randint(300, (1, config.context_length))

    def forward():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(tokens, targets=tokens)

    saved = saved_tensors(forward, model, [tokens])
    parts = estimate_memory(config, 1, autocast=autocast, fused_ffn=True)
    assert 4 * activation_bytes(saved, "layers.1") == parts.blocks
    # Of its three matrices autocast keeps no copies.
    assert sum(each.bytes for each in saved if each.of_parameter) == parts.narrow_weights


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("attn", ["naive", "flash"])
def test_one_block_on_a_gpu(attn, autocast, requested_bytes):
    sizes = {"attn": attn, "context_length": 512, "d_model": 512, "d_ff": 2048, "num_heads": 8}
    config = TransformerConfig(**SIZES | sizes)
    model = Transformer(config, device="cuda")
    tokens = torch.randint(300, (BATCH, config.context_length), device="cuda")

    def forward():
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            return model(tokens, targets=tokens)

    forward().backward()
    model.zero_grad()
    saved = saved_tensors(forward, model, [tokens])
    parts = estimate_memory(config, BATCH, autocast=autocast, fused_norm=True, fused_ffn=True)
    assert 4 * activation_bytes(saved, "layers.1") == pytest.approx(parts.blocks, rel=0.01)
    # What is allocated for the backward pass is what autograd keeps, with the copies of parameters, and the loss.
    with collection_paused():
        before = requested_bytes()
        loss = forward()
        held = requested_bytes() - before
    assert held == sum(each.bytes for each in saved) + loss.nbytes


def test_a_norm_that_keeps_no_normalised_tensor():
    config = TransformerConfig(**SIZES)
    plain, fused = (estimate_memory(config, BATCH, autocast=False, fused_norm=fused) for fused in (False, True))
    rows = BATCH * config.context_length
    assert plain.blocks - fused.blocks == 4 * 2 * rows * 96 * 4  # layers, norms, rows, width, bytes
    assert plain.ends - fused.ends == rows * 96 * 4


@pytest.mark.parametrize("every", [1, 2, 3, 9])
def test_with_recomputation_the_inputs_of_blocks_are_kept(every):
    config = TransformerConfig(**SIZES)
    kept = kept_bytes(config, autocast=False, recompute_every=every, loss_chunk=128)
    parts = estimate_memory(config, BATCH, autocast=False, recompute_every=every, loss_chunk=128)
    whole = estimate_memory(config, BATCH, autocast=False)
    # Those of one group are there in addition when the group is computed again, in the backward pass.
    recomputed = min(every, 4) * whole.blocks // 4
    assert kept == pytest.approx(parts.blocks - recomputed + parts.ends, rel=0.03)
    assert parts.loss == 128 * 320 * 8


def test_parameters_gradients_and_optimizer_are_exact():
    config = TransformerConfig(**SIZES)
    model = Transformer(config)
    tokens = torch.randint(300, (1, 8))
    model.loss(tokens, tokens).backward()
    optimizer = adamw(model, learning_rate=0.1, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer.step()
    parts = estimate_memory(config, 1, autocast=False)
    assert parts.parameters == sum(each.numel() * 4 for each in model.parameters())
    assert parts.gradients == sum(each.grad.numel() * 4 for each in model.parameters() if each.grad is not None)
    averages = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert parts.optimizer == sum(each.numel() * 4 for each in averages)
    assert parts.total == sum(dataclasses.astuple(parts))


@pytest.mark.parametrize("tied", [False, True])
def test_shards_divide_what_belongs_to_parameters(tied):
    config = TransformerConfig(**SIZES | {"tie_embeddings": tied})
    whole, shared = (estimate_memory(config, 1, autocast=False, shards=shards) for shards in (1, 4))
    assert (shared.parameters, shared.gradients, shared.optimizer) == tuple(
        part // 4 for part in (whole.parameters, whole.gradients, whole.optimizer)
    )
    assert (shared.blocks, shared.loss, shared.ends) == (whole.blocks, whole.loss, whole.ends)
    model = Transformer(config)
    block = sum(each.numel() for each in model.get_submodule("layers.0").parameters())
    root = sum(each.numel() for each in model.parameters()) - 4 * block
    assert shared.gathered == 8 * root + 2 * 4 * block + 8 * block
    kept = estimate_memory(config, 1, autocast=True, shards=4, reshard=False)
    assert kept.gathered == 8 * root + 4 * 2 * block + 8 * block
    assert kept.narrow_weights == 2 * 320 * 96
    # Gradients that accumulate are whole until the last part of a step.
    assert estimate_memory(config, 1, autocast=False, shards=4, accumulates=True).gradients == whole.gradients


def test_sharers_of_a_sequence_divide_its_activations():
    config = TransformerConfig(**SIZES | {"num_kv_heads": 1})
    whole, shared = (estimate_memory(config, 2, autocast=True, context_size=size) for size in (1, 4))
    extra = 4 * 64 * 2 * 96  # layers, tokens, bytes, width: attention's output a second time
    assert shared.blocks == whole.blocks // 4 + extra
    assert (shared.loss, shared.ends) == (whole.loss // 4, whole.ends // 4)
    assert (shared.parameters, shared.optimizer) == (whole.parameters, whole.optimizer)
    assert (whole.gathered, shared.gathered) == (0, 256 * 24 * 16)


def test_a_run_that_does_not_fit_is_refused(monkeypatch):
    needed = MemoryEstimate(*[GIB] * 7)
    monkeypatch.setattr(module, "available_bytes", lambda _: 7 * GIB)
    require_memory(needed, torch.device("cpu"))
    monkeypatch.setattr(module, "available_bytes", lambda _: None)
    require_memory(needed, torch.device("cpu"))
    monkeypatch.setattr(module, "available_bytes", lambda _: 7 * GIB - 1)
    with pytest.raises(DoesNotFitError, match=r"about 7\.00 GiB, and cpu has 7\.00 GiB") as raised:
        require_memory(needed, torch.device("cpu"))
    assert "--micro-batch-size" in str(raised.value)
    assert "narrow weights" in str(raised.value)
