"""Rows go where they are asked to go, and the loss is drawn."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from cs336_systems.training.metrics import Line, Metrics, _loss_line, open_loggers, read_rows, require_loggers

TRAIN = {"kind": "train", "step": 1, "loss": 2.0, "mfu": None, "tokens_per_second": 1000.0, "memory_bytes": 2**30}


@pytest.fixture
def fake_wandb(monkeypatch):
    """A module in place of wandb's, which notes what it is told."""
    told = []
    run = SimpleNamespace(log=lambda values, step: told.append((step, values)), finish=lambda: told.append("finished"))

    def init(**options):
        told.append(options)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    return told


def test_rows_go_to_wandb(tmp_path, fake_wandb):
    metrics = Metrics(tmp_path, 0, open_loggers(("wandb",), tmp_path, 0, {"steps": 3}))
    metrics.log([TRAIN, {"kind": "sample", "step": 1, "text": "a cat"}])
    metrics.close()
    options, train, sample, finished = fake_wandb
    assert (options["id"], options["resume"], options["config"]) == (tmp_path.name, "allow", {"steps": 3})
    assert train == (1, {"train/loss": 2.0, "train/tokens_per_second": 1000.0, "train/memory_bytes": 2**30})
    assert sample == (1, {"sample/text": "a cat"})
    assert finished == "finished"


def test_rows_go_to_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    metrics = Metrics(tmp_path, 0, open_loggers(("tensorboard",), tmp_path, 0, {}))
    metrics.log([TRAIN, {"kind": "sample", "step": 1, "text": "a cat"}])
    metrics.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("train/loss")] == [(1, 2.0)]


def test_a_logger_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        require_loggers(("tensorboard",))


def test_many_points_are_averaged():
    rows = [{"kind": "train", "step": step, "loss": float(step)} for step in range(1, 1001)]
    line = _loss_line("training", rows, "train")
    assert len(line.x) <= 400
    assert line.x[:2] == (2.0, 5.0)
    assert line.y == line.x
    assert _loss_line("validation", rows, "validation").x == ()


def test_the_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    metrics = Metrics(tmp_path, 0)
    metrics.log([TRAIN | {"step": step, "loss": 5 / step} for step in range(1, 200)])
    metrics.log([{"kind": "validation", "step": 100, "loss": 1.0}])
    metrics.plot("a run")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_plot(tmp_path, monkeypatch):
    metrics = Metrics(tmp_path, 0)
    metrics.log([TRAIN])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    metrics.plot("a run")
    assert not (tmp_path / "loss.png").exists()


def test_the_line_of_progress(capsys):
    line = Line(10)
    line.show(TRAIN)
    line.show(TRAIN | {"step": 5, "mfu": 0.456})
    first, second = capsys.readouterr().err.splitlines()
    assert first == "[1/10] loss 2.000  1,000 tokens/s  1.00 GiB"
    assert second.startswith("[5/10] loss 2.000  1,000 tokens/s  MFU 45.6%  1.00 GiB  ")
    assert second.endswith(" left")


def test_no_rows(tmp_path):
    assert read_rows(tmp_path / "none.jsonl") == []
    (tmp_path / "cut.jsonl").write_text('{"step": 1}')
    assert read_rows(tmp_path / "cut.jsonl") == []
