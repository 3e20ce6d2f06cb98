"""Small models of each family of transformers with random weights: this library's attention against "eager"."""

from __future__ import annotations

import logging

import pytest
import torch

from cs336_systems.attention import attention, attention_varlen
from cs336_systems.compat import huggingface, huggingface_masks
from cs336_systems.compat.huggingface import FLASH_NAME, NAME

from .families import (
    BOTH,
    DECODERS,
    ENCODERS,
    LENGTH,
    PADDED,
    SIZES,
    assert_generates_the_same,
    assert_same,
    config_of,
    is_new,
    prompts,
    transformers,
    with_large_weights,
)

pytestmark = pytest.mark.filterwarnings("default")  # transformers' own warnings


@pytest.fixture(autouse=True)
def _registered():
    transformers.utils.logging.set_verbosity(logging.ERROR)
    huggingface.register()


@pytest.fixture(params=DECODERS)
def decoder(request, device):
    name, own = DECODERS[request.param]
    made = transformers.AutoModelForCausalLM.from_config(
        config_of(name, SIZES | own), attn_implementation=NAME, experts_implementation="eager"
    )
    return with_large_weights(made, device)


only_llama = pytest.mark.parametrize("decoder", ["llama"], indirect=True)


@pytest.fixture
def calls(monkeypatch):
    """The arguments of each call of `attention` and `attention_varlen`."""
    seen = []

    def recorded(function):
        def record(q, *others, **options):
            seen.append({"q_len": q.shape[-2], **options})
            return function(q, *others, **options)

        return record

    for function in (attention, attention_varlen):
        monkeypatch.setattr(huggingface, function.__name__, recorded(function))
    return seen


@pytest.mark.parametrize("padded", ["no", "left", "right", "between"])
def test_a_decoder(decoder, device, padded):
    ids, mask = prompts(device, padded)
    assert_same(decoder, lambda: decoder(ids, attention_mask=mask, use_cache=False).logits[mask.bool()])


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Sequences are one call on a CPU, too."""
    for module in (huggingface, huggingface_masks):
        monkeypatch.setattr(module, "is_cpu", lambda device: False)


def test_a_decoder_whose_sequences_are_one_call(decoder, device, calls, as_on_a_gpu):
    ids, mask = prompts(device, "left")
    assert_same(decoder, lambda: decoder(ids, attention_mask=mask, use_cache=False).logits[mask.bool()])
    assert [call["q_len"] for call in calls] == [4, 4]  # heads, which stand before d
    assert_generates_the_same(decoder, ids, attention_mask=mask)


@pytest.mark.parametrize("padded", ["no", "left"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation(decoder, device, padded, cache):
    ids, mask = prompts(device, padded)
    static = {"cache_implementation": cache, "disable_compile": True} if cache else {}
    assert_generates_the_same(decoder, ids, attention_mask=mask, **static)


def test_a_prompt_in_parts(decoder, device):
    """Several queries at a time after keys from the cache, which has padding."""
    ids, mask = prompts(device, "left")
    with torch.no_grad():
        whole = decoder(ids, attention_mask=mask).logits
        first = decoder(ids[:, :6], attention_mask=mask[:, :6], use_cache=True)
        second = decoder(ids[:, 6:], attention_mask=mask, past_key_values=first.past_key_values)
    logits = torch.cat([first.logits, second.logits], 1)
    torch.testing.assert_close(logits[mask.bool()], whole[mask.bool()], rtol=1e-4, atol=1e-4)


def test_packed_sequences(decoder, device, calls):
    """Position ids that start anew separate what is in a row, also where lengths are given beside them."""
    ids, _ = prompts(device)
    positions = torch.tensor([[*range(4), *range(6)], [*range(7), *range(3)]], device=device)
    decoder.config.use_cache = False
    if decoder.config.model_type != "gpt_oss":  # whose "eager" does not separate them
        assert_same(decoder, lambda: decoder(ids, position_ids=positions).logits)
    decoder(ids, position_ids=positions)
    assert calls
    assert all(call.get("mask") is None for call in calls)
    starts = torch.tensor([0, 4, 10, 17, 20], dtype=torch.int32, device=device)
    lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 7, "max_length_k": 7}
    decoder.set_attn_implementation(NAME)
    expected = decoder(ids, position_ids=positions).logits
    torch.testing.assert_close(decoder(ids, position_ids=positions, **lengths).logits, expected)
    if is_new and decoder.config.model_type != "gpt_oss":  # for which transformers takes its own names alone
        decoder.set_attn_implementation(FLASH_NAME)
        torch.testing.assert_close(decoder(ids, position_ids=positions).logits, expected)
        decoder.set_attn_implementation(NAME)
    parts = [(0, slice(0, 4)), (0, slice(4, 10)), (1, slice(0, 7)), (1, slice(7, 10))]
    alone = [decoder(ids[entry : entry + 1, part]).logits for entry, part in parts]
    torch.testing.assert_close(torch.cat(alone, 1), expected.flatten(0, 1)[None], rtol=1e-4, atol=1e-4)


@only_llama
def test_lengths_of_packed_sequences(decoder, device):
    ids, _ = prompts(device)
    starts = torch.tensor([0, 4, LENGTH], dtype=torch.int32, device=device)
    for name, buffer in decoder.named_buffers():  # positions do not start anew
        if "inv_freq" in name:
            buffer.zero_()
    packed = decoder(ids[:1], cu_seq_lens_q=starts, cu_seq_lens_k=starts, use_cache=False).logits
    alone = [decoder(part, use_cache=False).logits for part in (ids[:1, :4], ids[:1, 4:])]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-4, atol=1e-4)


@only_llama
@pytest.mark.skipif(not is_new, reason="needs transformers 5.23")
def test_continuous_batching(decoder, device, monkeypatch):
    """Which takes names with "flash" alone: requests of different lengths in one row, and a paged cache.

    On a GPU it captures CUDA graphs, so nothing may look at where sequences begin.
    """
    monkeypatch.delattr(huggingface_masks, "_of_ids")
    requests = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15], [3, 4]]
    settings = transformers.GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    decoder.set_attn_implementation("eager")
    expected = [decoder.generate(torch.tensor([x], device=device), settings)[0, len(x) :].tolist() for x in requests]
    decoder.set_attn_implementation(FLASH_NAME)
    assert decoder.config._attn_implementation == FLASH_NAME
    small = transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    made = decoder.generate_batch(
        requests, generation_config=settings, continuous_batching_config=small, progress_bar=False
    )
    assert [made[name].generated_tokens for name in sorted(made)] == expected


@pytest.mark.parametrize("family", [*ENCODERS, *BOTH])
def test_an_encoder_whose_sequences_are_one_call(family, device, as_on_a_gpu):
    (test_an_encoder if family in ENCODERS else test_an_encoder_and_a_decoder)(family, device, "right")


@pytest.mark.parametrize("padded", ["no", "right", "between"])
@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoder(family, device, padded):
    """All queries see all keys, but those of padding."""
    name, options, kind = ENCODERS[family]
    if kind == "pixels" and padded != "no":
        pytest.skip("images have no padding")
    model = with_large_weights(transformers.AutoModel.from_config(config_of(name, options)), device)
    ids, mask = prompts(device, padded)
    if kind == "pixels":
        pixels = torch.randn(2, 3, 8, 8, device=device)
        assert_same(model, lambda: model(pixel_values=pixels).last_hidden_state)
    elif kind == "sound":
        sound, mask = torch.randn(2, 43, device=device), mask.repeat_interleave(4, 1)
        sound, mask = sound[:, :40] * mask, mask
        assert_same(model, lambda: model(sound, attention_mask=mask).last_hidden_state[:, : (LENGTH - PADDED) - 1])
    else:
        assert_same(model, lambda: model(ids, attention_mask=mask).last_hidden_state[mask.bool()])


@pytest.mark.parametrize("padded", ["no", "right", "between"])
@pytest.mark.parametrize("family", BOTH)
def test_an_encoder_and_a_decoder(family, device, padded):
    """Layers that are not causal, position biases (T5), and queries of one tensor with keys of another."""
    name, of, options = BOTH[family]
    model = with_large_weights(getattr(transformers, of)(config_of(name, options)), device)
    ids, mask = prompts(device, padded)
    given = {"input_ids": ids, "attention_mask": mask}
    if family == "whisper":
        if padded != "no":
            pytest.skip("Whisper's encoder sees its padding")
        given = {"input_features": torch.randn(2, 8, 20, device=device)}
    for length in (6, LENGTH):  # as many queries as keys, too
        targets = ids[:, :length]
        assert_same(model, lambda targets=targets: model(**given, decoder_input_ids=targets, use_cache=False).logits)
    if family != "whisper":  # whose generation asks for more of its configuration
        assert_generates_the_same(model, **given)


@pytest.mark.parametrize("decoder", ["gpt_oss"], indirect=True)
def test_no_mask_of_all_pairs_is_made(decoder, device, calls):
    """`attention` gets the window and the causal mask as such, and each sequence is a call where there is padding."""
    for padded in ("no", "left"):
        ids, mask = prompts(device, padded)
        decoder(ids, attention_mask=mask)
    kinds = [(call["causal"], call["window"]) for call in calls]
    assert kinds[:2] == [(True, (3, 0)), (True, None)]
    assert set(kinds[2:]) == {*kinds[:2]}
    assert all(call.get("mask") is None and call["sinks"] is not None for call in calls)


@pytest.mark.parametrize("decoder", ["gpt_oss"], indirect=True)
@pytest.mark.parametrize("padded", ["no", "left"])
def test_no_mask_is_made_while_a_cache_grows(decoder, device, calls, padded):
    ids, mask = prompts(device, padded)
    decoder.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    assert len(calls) >= 6
    if padded == "no" or device.type == "cpu":
        assert all(call.get("mask") is None for call in calls)


@only_llama
@pytest.mark.usefixtures("compile_afresh")
@pytest.mark.parametrize("padded", ["no", "left"])
def test_compiled(decoder, device, padded):
    """A graph cannot depend on the mask's values, so it has a mask of keys."""
    ids, mask = prompts(device, padded)
    expected = decoder(ids, attention_mask=mask, use_cache=False).logits
    compiled = torch.compile(decoder, backend="aot_eager")
    logits = compiled(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)


@only_llama
def test_checkpoints_and_autocast(decoder, device):
    """Layers that run again in the backward get the same mask; 16 bits come from autocast."""
    ids, mask = prompts(device, "left")

    def results():
        with torch.autocast(device.type, torch.bfloat16):
            loss = decoder(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False).loss
        return loss, torch.autograd.grad(loss, decoder.model.layers[0].self_attn.q_proj.weight)[0]

    decoder.train()
    expected = results()
    decoder.gradient_checkpointing_enable({"use_reentrant": False})
    torch.testing.assert_close(results(), expected, rtol=1e-2, atol=1e-4)


@only_llama
def test_a_fixed_implementation(decoder, device, calls):
    huggingface.register("naive", impl="naive")
    decoder.set_attn_implementation("naive")
    decoder(prompts(device)[0])
    assert [call["impl"] for call in calls] == ["naive"] * 2
    huggingface.register()


@only_llama
def test_probabilities_are_refused(decoder, device):
    with pytest.raises(ValueError, match="attn_implementation"):
        decoder(prompts(device)[0], output_attentions=True)
