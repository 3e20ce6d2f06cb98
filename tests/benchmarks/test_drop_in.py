"""Models of transformers by their attn_implementation: the batches, the rows, and losses that differ."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

from benchmarks import drop_in
from benchmarks.drop_in import BATCHING, MODELS, DropInCase, make_batch, wrong_losses

from .small_models import CPU, run_here

pytest.importorskip("transformers")
SMALL = ["--device", "cpu", "--lengths", "16", "--tokens", "64", "--layers", "1", "--heads", "2", "--head-dims", "8"]
SMALL += ["--rounds", "1", "--rep", "1", "--commit", "abc"]


@pytest.mark.parametrize("model", [MODELS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS[1:])])
def test_every_implementation_has_a_row_and_the_same_loss(monkeypatch, tmp_path, model):
    monkeypatch.setattr(drop_in, "VOCAB_SIZE", 64)
    names = ["cs336_systems", "eager"]
    rows = run_here(monkeypatch, drop_in.main, tmp_path, *SMALL, "--models", model, "--providers", *names)
    batchings = BATCHING[:2] if model == "bert" else BATCHING
    assert [(row["batching"], row["provider"], row["status"]) for row in rows] == [
        (batching, name, "ok") for batching in batchings for name in names
    ]
    for ours, eager in zip(rows[::2], rows[1::2], strict=True):
        assert float(ours["loss"]) == pytest.approx(float(eager["loss"]), rel=1e-4)
        tokens = 64 if ours["batching"] == "equal" else 16 + 12 + 8 + 4
        assert float(ours["tokens_per_second"]) == pytest.approx(1e3 * tokens / float(ours["median_ms"]))
        assert float(ours["speedup_of_first"]) == 1
    assert "## Losses" not in (tmp_path / "tables.md").read_text()


def test_what_a_batch_is_of():
    case = DropInCase("llama", "padded", "float32", batch=4, length=16, layers=1, heads=2, head_dim=8)
    padded, tokens = make_batch(case, CPU)
    assert padded["attention_mask"].sum(1).tolist() == [16, 12, 8, 4]
    assert tokens == (padded["labels"] != -100).sum() == 40
    packed, tokens = make_batch(DropInCase(**vars(case) | {"batching": "packed"}), CPU)
    assert packed["input_ids"].shape == packed["position_ids"].shape == (1, tokens) == (1, 40)
    assert (packed["position_ids"] == 0).sum() == 4
    assert torch.equal(packed["labels"], packed["input_ids"])


def test_losses_that_differ_are_reported():
    sizes = vars(DropInCase("llama", "equal", "bfloat16", batch=4, length=16, layers=1, heads=2, head_dim=8))
    names = ("cs336_systems", "sdpa", "eager")
    for losses, texts in (((5.0, 5.1, None), []), ((5.0, 5.5, None), ["5.0000 with cs336_systems, 5.5000 with sdpa"])):
        frame = pd.DataFrame(
            [{**sizes, "provider": name, "loss": loss} for name, loss in zip(names, losses, strict=True)]
        )
        assert wrong_losses(frame) == [f"llama equal bfloat16 16: the loss is {text}" for text in texts]
        wider = frame.assign(head_dim=16, loss=frame["loss"] + 1)
        assert len(wrong_losses(pd.concat([frame, wider]))) == 2 * len(texts), "another model has another loss"


def test_a_dry_run_lists_no_packed_bert(capsys):
    assert drop_in.main(["--device", "cpu", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("model=") for line in lines) == 8
    assert not [line for line in lines if "model=bert batching=packed" in line]
