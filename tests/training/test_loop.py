"""Training: the loss falls, parts of a batch are the batch, and a run that went on is the run that did not stop."""

from __future__ import annotations

import signal

import pytest
import torch

from cs336_systems.training import Trainer, load_run, prepare
from cs336_systems.training.checkpoint import checkpoints, latest
from cs336_systems.training.loop import NotFiniteError
from cs336_systems.training.metrics import read_rows
from cs336_systems.training.optimizer import learning_rate
from cs336_systems.training.prepare import newest_checkpoint
from cs336_systems.transformer import generate

SAMPLING = ({"temperature": 1.7}, {"top_p": 0.6}, {})
"""With some of the options of a sample left out."""


def rows_of(folder, kind="train"):
    return [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == kind]


def parameters_of(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.fixture
def begin(tmp_path, options):
    """Starts a run in a folder: ``begin("name", steps=2)``."""

    def make(name="run", resume=None, **changes):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        return Trainer(prepare(options(**changes)), folder, resume)

    return make


def test_the_loss_falls_and_samples_come_out(begin, tmp_path):
    trainer = begin(steps=100, learning_rate=1e-2, sample_every=50, eval_every=50, checkpoint_every=100, log_every=10)
    ending = trainer.run()
    rows = rows_of(tmp_path / "run")
    assert (ending.step, ending.signal) == (100, None)
    assert [row["step"] for row in rows] == list(range(1, 101))
    assert rows[0]["loss"] > 4.5
    assert rows[-1]["loss"] < 2
    assert [row["loss"] for row in rows_of(tmp_path / "run", "validation")][-1] < 2.5
    samples = rows_of(tmp_path / "run", "sample")
    assert [row["step"] for row in samples] == [50, 100]
    assert set(samples[-1]["text"]) <= set("abcdefghijklmnopqrstuvwxyz. ")


def test_the_last_step_is_validated_sampled_and_saved(begin, tmp_path):
    begin(steps=3, eval_every=2, sample_every=2, checkpoint_every=2).run()
    for kind in ("validation", "sample"):
        assert [row["step"] for row in rows_of(tmp_path / "run", kind)] == [2, 3]
    names = [path.name for path in checkpoints(tmp_path / "run/checkpoints")]
    assert names == ["step-00000002", "step-00000003"]


def test_rows_say_what_was_measured(begin, tmp_path):
    begin(steps=2).run()
    row = rows_of(tmp_path / "run")[1]
    assert row["learning_rate"] == 3e-3
    assert row["grad_norm"] > 0
    assert row["tokens_per_second"] > 0
    assert row["mfu"] is None  # there is no peak rate of a CPU
    assert row["memory_bytes"] > 2**20


def test_the_options_reach_the_optimizer(begin):
    trainer = begin(beta1=0.7, beta2=0.8, weight_decay=0.3, learning_rate=0.5, min_learning_rate=0.2, warmup_steps=1)
    groups = trainer.optimizer.param_groups
    assert [group["betas"] for group in groups] == [(0.7, 0.8)] * 2
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    rates = [trainer.update()[2] for _ in range(trainer.config.steps)]
    assert rates == [learning_rate(step, highest=0.5, lowest=0.2, warmup=1, steps=6) for step in range(1, 7)]
    assert all(group["lr"] == rates[-1] == 0.2 for group in groups)


def test_parts_of_a_batch_add_up_to_it(begin):
    whole, parts = begin("whole"), begin("parts", micro_batch_size=1)
    for _ in range(3):
        (loss, norm, _), (of_parts, norm_of_parts, _) = whole.update(), parts.update()
        torch.testing.assert_close(of_parts, loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(norm_of_parts, norm, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", [{"recompute_every": 1}, {"loss_chunk": 7}, {"dtype": "bfloat16"}])
def test_other_ways_to_compute_have_the_same_losses(begin, changes):
    plain, other = begin("plain"), begin("other", **changes)
    tolerance = 3e-2 if "dtype" in changes else 1e-5
    for _ in range(3):
        torch.testing.assert_close(other.update()[0], plain.update()[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_is_the_same_to_the_bit(begin, tmp_path, dtype):
    straight = begin("straight", dtype=dtype)
    straight.run()
    first = begin("broken", dtype=dtype)
    for _ in range(4):
        first._pending.append((first.step + 1, 0.0, *first.update()[:2]))
        first._between()
    resumed = begin("broken", latest(tmp_path / "broken/checkpoints"), dtype=dtype)
    assert resumed.step == 4
    resumed.run()
    for name, value in parameters_of(straight).items():
        assert torch.equal(value, parameters_of(resumed)[name]), name
    losses = [[row["loss"] for row in rows_of(tmp_path / name)] for name in ("straight", "broken")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6


def test_rows_after_the_checkpoint_are_taken_back(begin, tmp_path):
    first = begin(steps=6, checkpoint_every=4)
    for _ in range(5):
        first._pending.append((first.step + 1, 0.0, *first.update()[:2]))
        first._between()
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2, 3, 4, 5]
    begin("run", latest(tmp_path / "run/checkpoints"), checkpoint_every=4)
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_loss_that_is_no_number_stops_the_run_before_a_checkpoint(begin, tmp_path, where):
    trainer = begin(steps=8, log_every=100, checkpoint_every=4, eval_every=0)
    update = trainer.update

    def spoiled():
        loss, norm, rate = update()
        if trainer.step < 6:
            return loss, norm, rate
        return (loss * torch.nan, norm, rate) if where == "loss" else (loss, norm * torch.inf, rate)

    trainer.update = spoiled
    with pytest.raises(NotFiniteError, match="step 6 is"):
        trainer.run()
    assert [path.name for path in checkpoints(tmp_path / "run/checkpoints")] == ["step-00000004"]
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_with_a_checkpoint(begin, tmp_path, number):
    trainer = begin(steps=50, checkpoint_every=50)
    update = trainer.update

    def interrupted():
        if trainer.step == 2:
            signal.raise_signal(number)
        return update()

    trainer.update = interrupted
    before = signal.getsignal(number)
    ending = trainer.run()
    assert (ending.step, ending.signal) == (3, number)
    assert signal.getsignal(number) is before
    assert newest_checkpoint(tmp_path / "run").path == tmp_path / "run/checkpoints/step-00000003"


def test_a_second_signal_interrupts_at_once(begin):
    trainer = begin()

    def impatient():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    trainer.update = impatient
    with pytest.raises(KeyboardInterrupt):
        trainer.run()


def test_other_text_is_not_gone_on_with(begin, text, tmp_path):
    begin(steps=2).run()
    with pytest.raises(ValueError, match="its tokens have changed"):
        begin("run", latest(tmp_path / "run/checkpoints"), val_fraction=0.1)
    (text / "a.txt").write_text("something else " * 100)
    with pytest.raises(ValueError, match="its tokens have changed"):
        begin("run", latest(tmp_path / "run/checkpoints"))


def test_a_trained_model_is_used_from_its_folder(begin, options, tmp_path):
    trainer = begin(steps=2)
    options(steps=2).save(tmp_path / "run/config.json")
    trainer.run()
    model, tokenizer = load_run(tmp_path / "run", device="cpu")
    for name, value in parameters_of(trainer).items():
        assert torch.equal(value, model.state_dict()[name])
    (tokens,) = generate(model, [list(tokenizer.encode("the"))], 5, temperature=0)
    assert isinstance(tokenizer.decode(tokens), str)
    with pytest.raises(ValueError, match=r"must have a config\.json"):
        load_run(tmp_path)


def test_samples_are_drawn_as_the_options_say(begin):
    trainer = begin(seed=5, temperature=1.7, top_p=0.6, sample_tokens=12, sample_prompt="the")
    tokenizer = trainer.prepared.tokenizer
    (tokens,) = generate(
        *(trainer.model, [list(tokenizer.encode("the"))], 12), temperature=1.7, top_p=0.6, seed=5, stop_tokens=[256]
    )
    assert trainer.sample() == "the" + tokenizer.decode([token for token in tokens if token != 256])
    others = [begin(seed=5, sample_tokens=12, sample_prompt="the", **changes).sample() for changes in SAMPLING]
    assert len({trainer.sample(), *others}) == 1 + len(others)


def test_validation_is_a_mean_over_its_sequences(begin):
    one, four = begin("one", eval_sequences=3, micro_batch_size=1), begin("four", eval_sequences=3, micro_batch_size=2)
    assert one.validate() == pytest.approx(four.validate(), rel=1e-5)
    with pytest.raises(ValueError, match="this run has none"):
        begin("none", val_fraction=0.0).validate()


def test_text_of_its_own_to_validate_on(options, text, tmp_path):
    (tmp_path / "other.txt").write_text("x" * 100)
    prepared = prepare(options(val_data=(str(tmp_path / "other.txt"),)))
    assert prepared.validation is not None
    assert prepared.validation.tolist() == [120] * 100 + [256]
    assert len(prepared.train) == sum(len(file.read_bytes()) + 1 for file in text.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_length": 5000}, "at least 10000 tokens to train on"),
        ({"val_fraction": 0.001}, "more tokens than the context length, 16; got 2"),
        ({"device": "nowhere"}, "device must be auto, cuda"),
        ({"device": "meta"}, "device must be one that torch finds here"),
        ({"log_to": ("wandb",)}, "pip install wandb"),
        ({"sample_prompt": "x" * 17}, "sample_prompt must be at most 16 tokens"),
    ],
)
def test_what_cannot_be_prepared(options, changes, message, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=message):
        prepare(options(**changes))
