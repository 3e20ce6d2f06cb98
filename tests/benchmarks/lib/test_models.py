"""Cases of models, training steps, and the figures and tables that benchmarks of models share."""

from __future__ import annotations

import importlib.util
import re

import pandas as pd
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import breakdown, memory, scaling, training_step, transformer
from benchmarks.lib import models, steps
from benchmarks.lib.flags import parse
from benchmarks.lib.models import LLAMA, MODES, PROVIDERS, model_cases, paired, rate_columns, step_flops
from benchmarks.lib.steps import (
    TorchAttention,
    compiled,
    finite_loss,
    make_batch,
    make_model,
    make_step,
    require_supported,
)
from cs336_systems.transformer import Transformer, preset

from ..small_models import CASE, CONFIG, CPU, FLAGS, changed, context, measured, out_of_memory


def cases_of(program, *arguments):
    parser = program.make_parser(arguments)
    return model_cases(parser, parse(parser, arguments))


def test_every_axis_is_multiplied_with_the_others():
    axes = "--models small medium --lengths 256 128 --batches 4 8 --dtypes fp32 bf16 fp16 --providers naive sdpa "
    axes += "--compile none whole --modes step forward forward+backward --warmup-steps 0 5"
    cases = cases_of(transformer, *axes.split(), "--device", "cpu")
    assert len(cases) == len({case.name for case in cases}) == 2 * 2 * 2 * 3 * 2 * 2 * 3 * 2
    assert [case.length for case in cases[: len(cases) // 2]] == [128] * (len(cases) // 4) + [256] * (len(cases) // 4)
    assert [case.mode for case in cases[:6:2]] == ["forward", "forward+backward", "step"]
    assert cases[0].config == preset("small", context_length=128, attn="naive")
    assert cases[0].columns["parameters"] == preset("small").parameters()


def test_sizes_by_flags_by_name_and_by_suite():
    (case,) = cases_of(training_step, *FLAGS, "--tokens", "32", "--providers", "naive")
    assert (case.config, case.batch) == (changed(num_heads=4).config, 2)
    assert case.model == "tiny d_model=32 d_ff=64 num_layers=2 vocab_size=64"
    xl = [cases_of(memory, "--models", "xl", "--suite", year, "--device", "cpu")[0] for year in ("2025", "2026")]
    assert [case.config.parameters() for case in xl] == [1_998_235_200, 3_406_809_600]
    (five,) = cases_of(training_step, "--models", "8-512-768-12-11", "--d-model", "704", "--providers", "naive")
    config = five.config
    assert (five.batch, five.length, config.d_model, config.d_ff, config.num_layers) == (8, 512, 704, 3072, 12)


@pytest.mark.parametrize("gpu", [False, True])
def test_defaults_depend_on_the_device(monkeypatch, gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    counts = {}
    for program in (transformer, training_step, breakdown, memory):
        parser = program.make_parser([])
        counts[program.__name__] = len(model_cases(parser, parse(parser, [])))
        on_cpu = parse(program.make_parser(["--device", "cpu"]), ["--device", "cpu"])
        assert on_cpu.models == ["tiny"]
    # models × lengths × providers × dtypes × modes
    expected = [4 * 2 * 2, 4 * 4 * 5, 5 * 4 * 3, 5 * 3 * 2 * 3] if gpu else [2 * 2 * 2, 5, 3, 2 * 3]
    assert [*counts.values()] == expected
    assert scaling.make_parser(["--device", "cpu"]).get_default("models") == ["tiny"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "huge"], "--models must be of tiny, small, .* with --suite 2025, or sizes .*; got huge"),
        (["--suite", "1999"], "--suite must be of 2025, 2026; got 1999"),
        (["--num-heads", "3"], "num_heads must divide d_model, 128; got 3|must divide"),
        (["--providers", "magic"], "--providers must be of auto, .*; got magic"),
        (["--modes", "backward"], "--modes must be of forward, .*; got backward"),
        (["--compile", "all"], "--compile must be of none, blocks, whole; got all"),
        (["--models", "4-256-256-4-8", "--lengths", "64"], "--lengths cannot be given with --models of the form"),
        (["--warmup-steps", "-1"], "expected a whole number"),
    ],
)
def test_invalid_options_end_the_program(capsys, arguments, message):
    with pytest.raises(SystemExit):
        cases_of(transformer, "--device", "cpu", *arguments)
    assert re.search(message, " ".join(capsys.readouterr().err.split()))


def test_larger_cases_of_what_ran_out_of_memory_are_skipped(monkeypatch):
    monkeypatch.setattr(steps, "Transformer", out_of_memory)
    case = changed(mode="forward+backward")
    row = measured(transformer.measure, case)
    assert (row["status"], row["reason"]) == ("oom", "CUDA out of memory")
    rows = [{**case.columns, **row}]
    for larger in ({}, {"mode": "step"}, {"batch": 4}, {"context_length": 32}, {"warmup_steps": 5}):
        for program in (transformer, breakdown, memory):
            found = measured(program.measure, changed(case, **larger), None, rows)
            assert (found["status"], found["reason"][:14]) == ("skipped", "memory ran out"), larger
    others = ({"batch": 1}, {"mode": "forward"}, {"dtype": "bfloat16"}, {"compile": "whole"}, {"provider": "sdpa"})
    for other in (*others, {"context_length": 8}, {"model": "another"}):
        assert models.smaller_out_of_memory(changed(case, **other), rows) is None, other


def test_what_a_provider_needs(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    for provider, reason in {LLAMA: "transformers is not", "torch-cudnn": "CUDA device", "flash": "flash"}.items():
        row = measured(transformer.measure, changed(provider=provider, dtype="bfloat16"))
        assert row["status"] == "unsupported"
        assert reason in row["reason"]
    for provider in ("auto", "naive", "tiled", "sdpa", "torch"):
        require_supported(changed(provider=provider), CPU)


def test_providers_differ_in_attention_alone():
    losses = []
    for provider in ("naive", "tiled", "sdpa", "torch"):
        step, _ = make_step(changed(provider=provider), CPU, seed=0)
        loss = step.forward()
        loss.backward()
        step.update()
        assert step.forward() < loss
        assert all(parameter.grad is None for parameter in step.model.parameters())
        losses.append(float(loss.detach()))
    assert max(losses) - min(losses) < 1e-4
    for name, alone in (("torch", False), ("torch-cudnn", True)):
        found = [
            m.cudnn_alone for m in make_model(changed(provider=name), CPU).modules() if isinstance(m, TorchAttention)
        ]
        assert found == [alone] * 2


def test_llama_has_the_same_size_and_loss():
    pytest.importorskip("transformers")
    case = changed(provider=LLAMA)
    model = make_model(case, CPU)
    assert sum(parameter.numel() for parameter in model.parameters()) == CONFIG.parameters()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    tokens, targets = make_batch(CONFIG, 2, CPU, seed=0)
    theirs = model.model(input_ids=tokens, labels=targets, shift_labels=targets).loss
    torch.testing.assert_close(model(tokens, targets=targets, count=32.0), theirs)
    assert measured(transformer.measure, case)["status"] == "ok"


def test_blocks_or_the_whole_model_are_compiled(monkeypatch):
    given = []
    monkeypatch.setattr(torch, "compile", lambda function: given.append(function) or function)
    model = make_model(CASE, CPU)
    assert compiled(model, "none") is model
    assert given == []
    assert compiled(model, "blocks") is model
    assert len(given) == CONFIG.num_layers
    compiled(model, "whole")
    assert given[-1] is model


def test_losses_must_be_finite_but_for_float16():
    nan = torch.tensor(float("nan"))
    assert finite_loss(torch.tensor(2.0), "bfloat16") == 2
    assert finite_loss(nan, "float16") is None
    with pytest.raises(FloatingPointError, match="must be finite; got nan"):
        finite_loss(nan, "bfloat16")


def test_flops_are_those_that_torch_counts():
    model = Transformer(CONFIG)
    tokens, targets = make_batch(CONFIG, 2, CPU, seed=0)
    with FlopCounterMode(display=False) as counter:
        model(tokens, targets=targets)
    assert step_flops(CONFIG, 32, "forward") == counter.get_total_flops()
    assert step_flops(CONFIG, 32) == 3 * step_flops(CONFIG, 32, "forward") > step_flops(CONFIG, 32, every_pair=False)


def test_rates():
    row = rate_columns(CONFIG, 1000, "step", 10.0, 2.0, processes=4)
    assert row["tokens_per_second"] == pytest.approx(100_000)
    assert row["mfu"] == pytest.approx(step_flops(CONFIG, 1000) / 10e-3 / 2e12 / 4)
    assert row["mfu_causal"] < row["mfu"]
    assert rate_columns(CONFIG, 1000, "step", 10.0, None)["mfu"] is None


def test_pairs_differ_in_one_thing():
    rows = [
        changed(**c).columns | {"status": "ok", "median_ms": ms} for c, ms in (({}, 4.0), ({"dtype": "float16"}, 2.0))
    ]
    rows.append(changed(dtype="float16", batch=4).columns | {"status": "ok", "median_ms": 1.0})
    table = paired(pd.DataFrame(rows), "dtype", "float32", {"median_ms": "ms"})
    assert len(table.splitlines()) == 3
    assert "4.00 → 2.00 (2.00×)" in table
    assert paired(pd.DataFrame(rows), "compile", "none", {"median_ms": "ms"}) == ""


def test_a_ratio_above_one_is_a_gain_for_rates_too():
    rows = [
        changed(dtype=dtype).columns | {"status": "ok", "tokens_per_second": rate}
        for dtype, rate in (("float32", 100.0), ("bfloat16", 150.0))
    ]
    table = paired(pd.DataFrame(rows), "dtype", "float32", {"tokens_per_second": "tokens/s"})
    assert "100 → 150 (1.50×)" in table


def test_a_dry_run_knows_the_least_memory():
    found = [models.least_memory(changed(mode=mode), context().options) for mode in MODES]
    assert found == [4 * n * CONFIG.parameters() for n in (1, 2, 4)]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("provider", "how"), [*((name, "blocks") for name in PROVIDERS), ("auto", "whole"), ("naive", "none")]
)
def test_on_a_gpu(provider, how, compile_afresh):
    if provider == LLAMA:
        pytest.importorskip("transformers")
    case = changed(provider=provider, dtype="bfloat16", compile=how, context_length=128, d_model=128)
    row = measured(transformer.measure, case, device=torch.device("cuda"))
    assert row["status"] == "ok", row
    assert row["reserved_mib"] >= row["peak_mib"] > 4 * 4 * case.config.parameters() / 2**20
