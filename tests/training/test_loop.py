"""Training: the loss falls, micro-batches add up to the batch, and a resumed run is the run that did not stop."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from cs336_systems.training import load_run
from cs336_systems.training.checkpoint import checkpoints, newest
from cs336_systems.training.data import sequences
from cs336_systems.training.optimizer import learning_rate
from cs336_systems.transformer import generate

from .conftest import rows_of


def test_the_loss_falls_and_samples_are_text(begin, tmp_path, capsys):
    begin(steps=100, learning_rate=1e-2, sample_every=60, eval_every=60, checkpoint_every=60, log_every=10).run()
    rows, validations, samples = (rows_of(tmp_path / "run", kind) for kind in ("train", "validation", "sample"))
    assert [row["step"] for row in rows] == list(range(1, 101))
    assert rows[0]["loss"] > 4.5
    assert rows[-1]["loss"] < 2
    # The last step is validated, sampled and saved.
    assert [row["step"] for row in validations] == [row["step"] for row in samples] == [60, 100]
    assert [path.name for path in checkpoints(tmp_path / "run/checkpoints")] == ["step-00000060.pt", "step-00000100.pt"]
    assert validations[-1]["loss"] < 2.5
    assert set(samples[-1]["text"]) <= set("abcdefghijklmnopqrstuvwxyz. ")
    printed = [line.split()[0] for line in capsys.readouterr().err.splitlines() if " tokens/s" in line]
    assert printed == [f"[{step}/100]" for step in (1, *range(10, 101, 10))]


def test_what_a_row_and_the_folder_have(begin, options, tmp_path):
    begin(steps=2).run()
    row = rows_of(tmp_path / "run")[1]
    assert row["learning_rate"] == 3e-3
    assert row["grad_norm"] > 0
    assert row["tokens_per_second"] > 0
    assert row["memory_bytes"] is None  # on a CPU
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"train.bin", "config.json", "environment.json", "metrics.jsonl", "checkpoints"}
    written = json.loads((tmp_path / "run/config.json").read_text())
    assert type(options())(**written) == options(steps=2)


def test_the_options_reach_the_optimizer(begin):
    trainer = begin(beta1=0.7, beta2=0.8, weight_decay=0.3, learning_rate=0.5, min_learning_rate=0.2, warmup_steps=1)
    groups = trainer.optimizer.param_groups
    assert [(group["betas"], group["weight_decay"]) for group in groups] == [((0.7, 0.8), 0.3), ((0.7, 0.8), 0.0)]
    rates = [trainer.train_step()[1] for _ in range(6)]
    assert rates == [learning_rate(step, 0.5, 0.2, warmup=1, steps=6) for step in range(1, 7)]
    assert all(group["lr"] == rates[-1] == 0.2 for group in groups)


@pytest.mark.parametrize(
    "changes", [{"micro_batch_size": 1}, {"recompute_every": 1}, {"loss_chunk": 7}, {"dtype": "bfloat16"}]
)
def test_other_ways_to_compute_have_the_same_losses(begin, changes):
    plain, other = begin("plain"), begin("other", **changes)
    tolerance = 3e-2 if "dtype" in changes else 1e-4
    for _ in range(3):
        (*_, loss, norm), (*_, other_loss, other_norm) = plain.train_step(), other.train_step()
        torch.testing.assert_close(other_loss, loss, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(other_norm, norm, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_is_the_same_to_the_bit(begin, tmp_path, dtype):
    """So no step draws random numbers, whose generators' states a checkpoint would have to hold."""
    changes = {"dtype": dtype, "sample_every": 3}
    straight = begin("straight", **changes)
    straight.run()
    stopped = begin("broken", **changes)
    assert stopped.run(lambda: 15 if stopped.step == 5 else 0) == 15
    (tmp_path / "broken/checkpoints/step-00000005.pt").unlink()
    with (tmp_path / "broken/metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # a process that was killed while it wrote
    assert [row["step"] for row in rows_of(tmp_path / "broken")] == [1, 2, 3, 4, 5]
    resumed = begin("broken", newest(tmp_path / "broken/checkpoints"), **changes)
    assert resumed.step == 4
    resumed.run()
    torch.testing.assert_close(resumed.model.state_dict(), straight.model.state_dict(), rtol=0, atol=0)
    for kind, column in (("train", "loss"), ("train", "grad_norm"), ("validation", "loss"), ("sample", "text")):
        one, other = (
            [(row["step"], row[column]) for row in rows_of(tmp_path / name, kind)] for name in ("straight", "broken")
        )
        assert one == other


def test_a_gradient_that_is_not_finite_stops_the_run_before_a_checkpoint(begin, tmp_path):
    trainer = begin(steps=8, log_every=100, checkpoint_every=4, eval_every=0)
    train_step = trainer.train_step

    def spoiled():
        step, rate, loss, norm = train_step()
        return step, rate, loss, norm * torch.inf if step == 6 else norm

    trainer.train_step = spoiled
    with pytest.raises(FloatingPointError, match="the loss of step 6 is"):
        trainer.run()
    assert [path.name for path in checkpoints(tmp_path / "run/checkpoints")] == ["step-00000004.pt"]
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_a_trained_model_is_loaded_from_its_folder(begin, tmp_path):
    trainer = begin(steps=2)
    trainer.run()
    model, tokenizer = load_run(tmp_path / "run", device="cpu")
    torch.testing.assert_close(model.state_dict(), trainer.model.state_dict(), rtol=0, atol=0)
    assert not model.training
    (tokens,) = generate(model, [list(tokenizer.encode("the"))], 5, temperature=0)
    assert isinstance(tokenizer.decode(tokens), str)
    with pytest.raises(ValueError, match=r"config\.json must hold the options of a training run"):
        load_run(tmp_path)


def test_samples_are_drawn_as_the_options_say(begin):
    sampling = {"seed": 5, "temperature": 1.7, "top_p": 0.6}
    trainer = begin(**sampling, sample_tokens=12, sample_prompt="the")
    (tokens,) = generate(trainer.model, [[*b"the"]], 12, **sampling, stop_tokens=[256])
    assert trainer.sample() == "the" + trainer.tokenizer.decode([token for token in tokens if token != 256])
    for name in ("temperature", "top_p"):
        changed = dataclasses.replace(trainer.config, **{name: 0.1})
        other = begin("other", **dataclasses.asdict(changed))
        assert other.sample() != trainer.sample()
    assert begin("long", sample_tokens=99).sample()  # as many as the context length allows


def test_validation_is_a_mean_over_its_sequences(begin):
    one, two = (begin(str(size), eval_sequences=3, micro_batch_size=size) for size in (1, 2))
    tokens, targets = sequences(one.validation, one.validation_starts, 16)
    expected = one.model.loss(tokens, targets).item()
    assert (one.evaluate(), two.evaluate()) == pytest.approx((expected, expected), rel=1e-5)
    trainer = begin("none", val_fraction=0.0, steps=1)
    trainer.run()
    with pytest.raises(ValueError, match="val_fraction must be above 0 for a validation; got 0"):
        trainer.evaluate()
