"""The benchmark of training steps: what is measured, the figures that follow, and rows that are failures."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import json
import re

import pytest
import torch

from benchmarks import suite, training_cell, training_report, training_step
from benchmarks.training_cell import Cell, Conditions, measure_cell, measured_step, prepared_step
from benchmarks.training_models import LLAMA, MODELS, TorchAttention, compiled, config_of, make_model
from benchmarks.training_report import flops_per_token, rates_of, row_of, warnings_of, with_ratios
from benchmarks.training_step import cells_of, no_room, parse
from cs336_systems.profiling.environment import collect_environment
from cs336_systems.training.optimizer import clip
from cs336_systems.transformer import preset

TINY = ("--preset", "tiny", "--context", "32", "--tokens", "64", "--vocab-size", "64", "--device", "cpu")
SHORT = ("--steps", "2", "--warmup", "1")
CELL = Cell("tiny", "2025", 64, 32, 2, "sdpa", "none")
CPU = torch.device("cpu")
CONDITIONS = Conditions(CPU, warmup=1, steps=2, tf32=False, seed=0)


@pytest.fixture(autouse=True)
def _precision(matmul_precision):
    """Cells set it for the whole process, which is theirs elsewhere."""


pytestmark = pytest.mark.parametrize("matmul_precision", ["highest"], indirect=True)


def measured_row(model="sdpa", context=32, **columns):
    """A row as if it had been measured."""
    cell = dataclasses.replace(CELL, model=model, context=context)
    measured = {"status": "ok", "reason": "", "median_ms": 10.0, "first_loss": 4.0}
    return row_of(cell, measured | columns, True, "NVIDIA H200")


class TestOptions:
    def test_a_step_has_the_same_tokens_at_every_context(self):
        options = parse(["--preset", "small", "--context", "4096", "512", "--tokens", "2048", "--model", "flash"])
        assert [(cell.context, cell.batch) for cell in cells_of(options)] == [(512, 4), (4096, 1)]

    def test_batch_replaces_tokens(self):
        options = parse(["--preset", "small", "--context", "64", "--batch", "3", "--model", "naive", "llama"])
        assert [(cell.model, cell.batch, cell.compiles) for cell in cells_of(options)] == [
            ("naive", 3, "none"),
            ("llama", 3, "model"),
        ]

    def test_without_a_gpu_the_default_is_tiny(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert {(cell.preset, cell.batch * cell.context) for cell in cells_of(parse([]))} == {("tiny", 512)}

    def test_with_a_gpu_the_default_is_every_preset_context_and_model(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(suite, "choose_device", torch.device)
        cells = cells_of(parse(["--device", "cuda"]))
        assert len(cells) == len({cell.key for cell in cells}) == 4 * 4 * len(MODELS)
        assert {cell.batch * cell.context for cell in cells} == {16384}

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--preset", "huge"], "--preset must be one of tiny, small, .*; got huge"),
            (["--preset", "10B"], "with --suite 2025; got 10B"),
            (["--context", "0"], "expected a whole number of at least 1; got '0'"),
            (["--device", "nowhere"], "device must be"),
        ],
    )
    def test_what_cannot_be_is_refused(self, capsys, arguments, message):
        with pytest.raises(SystemExit):
            parse(arguments)
        assert re.search(message, " ".join(capsys.readouterr().err.split()))


class TestFigures:
    def test_operations_by_the_usual_convention(self):
        medium = preset("medium", context_length=1024)
        assert flops_per_token(medium) == 6 * (423_183_360 - 10_240_000) + 12 * 24 * 1024 * 1024
        tied = preset("medium", context_length=1024, tie_embeddings=True)
        assert flops_per_token(tied) == flops_per_token(medium)

    def test_rates(self):
        config = preset("medium", context_length=1024)
        row = rates_of(config, 16384, {"median_ms": 100.0, "peak_bytes": 3 * 2**30}, "NVIDIA H200")
        assert row["tokens_per_second"] == pytest.approx(163_840)
        assert row["mfu"] == pytest.approx(163_840 * flops_per_token(config) / 989.5e12)
        # The causal count leaves out half of the pairs, and the gains of norms.
        hidden = 6 * 24 * 1024 * 1024 + 6 * 49 * 1024
        assert row["mfu_causal"] == pytest.approx(163_840 * (flops_per_token(config) - hidden) / 989.5e12)
        assert row["peak_gib"] == 3
        of_two = rates_of(config, 16384, {"median_ms": 100.0}, "NVIDIA H200", processes=2)
        assert of_two["mfu"] == pytest.approx(row["mfu"] / 2)
        assert of_two["peak_gib"] is None

    def test_without_a_time_or_a_known_peak_there_is_no_rate(self):
        config = preset("small")
        assert rates_of(config, 16384, {"status": "oom"}, "NVIDIA H200")["mfu"] is None
        unknown = rates_of(config, 16384, {"median_ms": 1.0}, "a toaster")
        assert (unknown["mfu"], unknown["tokens_per_second"]) == (None, pytest.approx(16_384_000))

    def test_ratios_are_of_the_same_work(self):
        rows = with_ratios(
            [
                measured_row("flash", median_ms=10.0),
                measured_row("sdpa", median_ms=15.0),
                measured_row("llama", median_ms=20.0),
                measured_row("flash", context=64, median_ms=10.0),
                measured_row("llama", context=64, status="oom", median_ms=None),
            ]
        )
        assert [row.get("over_llama") for row in rows] == [2.0, pytest.approx(4 / 3), None, None, None]
        assert [row.get("over_sdpa") for row in rows] == [1.5, None, 0.75, None, None]

    def test_another_first_loss_is_told(self):
        good = [measured_row("flash"), measured_row("sdpa", first_loss=4.01), measured_row("llama", first_loss=9.0)]
        assert warnings_of(good) == []
        (text,) = warnings_of([*good, measured_row("cudnn", first_loss=5.0)])
        assert "2 × 32: the first loss is 4.0000 with flash and 5.0000 with cudnn" in text


class TestCell:
    def test_models_differ_in_attention_alone(self):
        losses = {}
        for model in ("sdpa", "compiled-naive", "naive"):
            row = measure_cell((dataclasses.replace(CELL, model=model), CONDITIONS))
            assert row["status"] == "ok", row
            assert len(row["step_ms"]) == 2
            assert row["last_loss"] < row["first_loss"]
            losses[model] = row["first_loss"]
        assert max(losses.values()) - min(losses.values()) < 0.01

    def test_llama_has_the_same_size(self):
        pytest.importorskip("transformers")
        config = config_of("tiny", "2025", vocab_size=64, context_length=32)
        model = make_model(LLAMA, config, CPU)
        assert sum(parameter.numel() for parameter in model.parameters()) == config.parameters()
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        row = measure_cell((dataclasses.replace(CELL, model=LLAMA), CONDITIONS))
        assert row["status"] == "ok", row
        assert row["last_loss"] < row["first_loss"]

    def test_llama_has_the_same_loss_function(self):
        pytest.importorskip("transformers")
        config = config_of("tiny", "2025", vocab_size=64, context_length=32)
        model = make_model(LLAMA, config, CPU)
        tokens, targets = training_cell.make_batch(config, 2, CPU, seed=0)
        theirs = model.model(input_ids=tokens, labels=targets, shift_labels=targets).loss
        torch.testing.assert_close(model(tokens, targets=targets, count=64.0), theirs)

    def test_llama_without_transformers(self, monkeypatch):
        there = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else there(name))
        row = measure_cell((dataclasses.replace(CELL, model=LLAMA), CONDITIONS))
        assert row == {"status": "unsupported", "reason": "the package transformers is not installed"}

    def test_what_needs_a_gpu_says_so(self):
        for model in ("cudnn", "flash"):
            row = measure_cell((dataclasses.replace(CELL, model=model), CONDITIONS))
            assert row["status"] == "unsupported", row

    def test_memory_that_ran_out_is_a_status(self, monkeypatch):
        def full(*arguments, **options):
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(training_cell, "prepared_step", full)
        assert measure_cell((CELL, CONDITIONS)) == {"status": "oom", "reason": "CUDA out of memory"}

    def test_a_loss_that_is_no_number_is_an_error(self, monkeypatch):
        monkeypatch.setattr(training_cell, "LEARNING_RATE", float("inf"))
        row = measure_cell((CELL, CONDITIONS))
        assert row["status"] == "error"
        assert "the loss of the last step must be finite" in row["reason"]

    def test_a_step_is_its_parts(self):
        whole, parts = (prepared_step(CELL, CPU, seed=0) for _ in range(2))
        first = whole()
        loss = parts.forward()
        parts.backward(loss)
        assert clip(parts.model.parameters(), None) > 0
        parts.update()
        assert loss == first
        assert parts.forward() == whole.forward() < first
        assert all(parameter.grad is None for parameter in parts.model.parameters())

    def test_steps_are_counted(self):
        calls = []

        def step():
            calls.append(1)
            return torch.tensor(float(len(calls)))

        measured = measured_step(step, CPU, untimed=3, timed=2)
        assert (len(calls), len(measured.times.milliseconds)) == (5, 2)
        assert (measured.first_loss, measured.last_loss) == (1.0, 5.0)
        assert measured.compile_s is not None
        assert measured_step(step, CPU, untimed=0, timed=1).compile_s is None

    # torch.compile of torch 2.11 looks at gradients of tensors that have none, here where Llama's blocks meet.
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
    @pytest.mark.gpu
    @pytest.mark.parametrize(("model", "how"), [*((name, "blocks") for name in MODELS), ("flash", "model")])
    def test_every_model_on_a_gpu(self, model, how, compile_afresh):
        if model == LLAMA:
            pytest.importorskip("transformers")
        cell = dataclasses.replace(CELL, model=model, context=128, compile=how)
        row = measure_cell((cell, dataclasses.replace(CONDITIONS, device=torch.device("cuda"))))
        assert row["status"] == "ok", row
        # Parameters, gradients, and AdamW's two averages.
        assert row["peak_bytes"] > 4 * 4 * cell.config.parameters()

    def test_torchs_attention_is_restricted_to_cudnn_where_asked_for(self):
        for name, alone in (("sdpa", False), ("cudnn", True)):
            modules = make_model(name, CELL.config, CPU).modules()
            found = [module.cudnn_alone for module in modules if isinstance(module, TorchAttention)]
            assert found == [alone] * CELL.config.num_layers

    def test_blocks_are_compiled_and_nothing_else(self, monkeypatch):
        given = []
        monkeypatch.setattr(torch, "compile", lambda function: given.append(function) or function)
        model = make_model("sdpa", CELL.config, CPU)
        assert compiled(model, "none") is model
        assert given == []
        assert compiled(model, "blocks") is model
        assert len(given) == CELL.config.num_layers
        compiled(model, "model")
        assert given[-1] is model


class TestRun:
    def test_rows_come_one_by_one_and_are_kept(self, tmp_path, monkeypatch):
        assert (
            training_step.main([*TINY, *SHORT, "--model", "sdpa", "--compile", "blocks", "--output", str(tmp_path)])
            == 0
        )
        more = [*TINY, *SHORT, "--model", "flash", "sdpa", "--compile", "blocks", "--output", str(tmp_path), "--resume"]
        alone = suite.measured_alone
        measured = []

        def noted(measure, job, limit):
            measured.append(job[0].model)
            return alone(measure, job, limit)

        monkeypatch.setattr(suite, "measured_alone", noted)
        assert training_step.main(more) == 0
        assert measured == ["flash"]
        with (tmp_path / "results.csv").open() as file:
            rows = {row["model"]: row for row in csv.DictReader(file)}
        assert float(rows["sdpa"]["tokens_per_second"]) == pytest.approx(64e3 / float(rows["sdpa"]["median_ms"]))
        assert int(rows["sdpa"]["graphs_from_cache"]) + int(rows["sdpa"]["graphs_compiled"]) > 0
        assert rows["flash"]["status"] == "unsupported"
        tables = (tmp_path / "tables.md").read_text()
        assert "| tiny, 2 × 32, sdpa" in tables
        assert "tiny, 2 × 32, flash: unsupported: impl='flash' cannot" in tables
        assert json.loads((tmp_path / "environment.json").read_text())["packages"].keys() <= {"transformers"}

    def test_another_run_is_not_gone_on_with(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr(suite, "measured_alone", lambda *arguments: {"status": "error", "reason": "no"})
        assert training_step.main([*TINY, *SHORT, "--output", str(tmp_path), "--model", "sdpa"]) == 0
        assert training_step.main([*TINY, *SHORT, "--output", str(tmp_path), "--resume", "--seed", "1"]) == 2
        assert "seed was 0 and is now 1" in capsys.readouterr().err

    def test_an_interrupted_run_has_its_tables(self, tmp_path, monkeypatch):
        rows = [{"status": "ok", "reason": "", "median_ms": 10.0, "first_loss": 4.0}]

        def interrupted(*arguments):
            if not rows:
                raise KeyboardInterrupt
            return rows.pop()

        monkeypatch.setattr(suite, "measured_alone", interrupted)
        assert training_step.main([*TINY, *SHORT, "--output", str(tmp_path), "--model", "sdpa", "llama"]) == 130
        assert "| tiny, 2 × 32, sdpa" in (tmp_path / "tables.md").read_text()
        assert len((tmp_path / "journal.jsonl").read_text().splitlines()) == 1

    def test_a_row_that_takes_too_long_is_an_error(self, tmp_path):
        assert training_step.main([*TINY, *SHORT, "--output", str(tmp_path), "--model", "sdpa", "--limit", "0.2"]) == 0
        assert "error: took longer than 0.2 s" in (tmp_path / "tables.md").read_text()

    def test_longer_sequences_of_what_ran_out_of_memory_are_not_tried(self):
        rows = [measured_row("naive", status="oom", median_ms=None) | {"compile": "none"}]
        naive = dataclasses.replace(CELL, model="naive")
        longer = no_room(dataclasses.replace(naive, context=64, batch=1), rows)
        assert longer is not None
        assert str(longer) == "skipped: memory ran out at 2 × 32 already"
        assert no_room(dataclasses.replace(naive, context=64, batch=1, model="sdpa"), rows) is None
        assert no_room(dataclasses.replace(naive, context=64, batch=1, preset="small"), rows) is None
        assert no_room(dataclasses.replace(naive, context=16, batch=4), rows) is None
        assert no_room(dataclasses.replace(naive, context=32, batch=1), rows) is None


def test_the_plot_has_a_panel_for_each_preset(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(training_report, "save_panels", lambda path, panels, **rest: drawn.append(panels) or True)
    assert training_report.draw(tmp_path, [measured_row("sdpa", 64), measured_row("sdpa"), measured_row(status="oom")])
    ((panel,),) = drawn
    (line,) = (series for series in panel.series if series.x)
    assert (panel.title, line.label, line.x) == ("tiny", "sdpa", (32, 64))


def test_a_model_compiled_in_two_ways_has_two_lines(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(
        training_report, "save_panels", lambda path, panels, **rest: drawn.append((panels, rest)) or True
    )
    rows = [measured_row("llama"), measured_row("llama") | {"compile": "blocks"}, measured_row("sdpa")]
    assert training_report.draw(tmp_path, rows)
    (((panel,), rest),) = drawn
    labels = ["sdpa", "llama, compile none", "llama, compile blocks"]
    assert [(line.label, line.x) for line in panel.series] == [(label, (32,)) for label in labels]
    assert rest["labels"] == dict(zip(labels, (0, 1, 1), strict=True))


def test_beside_another_library_the_plot_calls_the_kernels_ours(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(training_report, "save_panels", lambda path, panels, **rest: drawn.append(rest) or True)
    alone = [measured_row("flash"), measured_row("sdpa")]
    for rows in (alone, [*alone, measured_row("llama")]):
        assert training_report.draw(tmp_path, rows)
    assert [list(rest["labels"]) for rest in drawn] == [["flash", "sdpa"], ["ours", "sdpa", "llama"]]


def test_rows_of_several_commits_are_told():
    rows = [measured_row("sdpa") | {"commit": commit} for commit in ("f00", "ba2", "f00")]
    page = training_report.report(rows, collect_environment("cpu"), [])
    assert "The rows were measured at several commits: f00, ba2." in page
