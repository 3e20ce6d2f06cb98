"""The breakdown: what is measured, what rows and tables hold, and runs from the command line to the files."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import shlex
from contextlib import contextmanager, nullcontext

import pytest
import torch

from benchmarks import breakdown, breakdown_cell, breakdown_report, suite
from benchmarks.breakdown import cells_of, method_of, no_room, nsys_command, parse
from benchmarks.breakdown_cell import (
    MODES,
    PASSES_OF,
    Cell,
    Conditions,
    columns_of_parts,
    columns_of_shares,
    in_mode,
    measure_cell,
    prepared,
    share_column,
)
from benchmarks.breakdown_report import COLUMNS, KERNEL_COLUMNS, name_of, report, row_of, short_name
from benchmarks.training_cell import Cell as Work
from cs336_systems.profiling.environment import collect_environment
from cs336_systems.profiling.kernel_classes import CLASSES
from cs336_systems.profiling.report import format_number
from cs336_systems.transformer import preset

TINY = ("--preset", "tiny", "--context", "16", "--batch", "2", "--vocab-size", "64", "--device", "cpu")
SHORT = ("--steps", "2", "--warmup", "1", "--profiled-steps", "2")
CPU = torch.device("cpu")
CELL = Cell(Work("tiny", "2025", 64, 16, 2, "naive", "none"), "bfloat16", "step")
CONDITIONS = Conditions(CPU, warmup=1, timed=2, profiled=2, tf32=False, seed=0)


@pytest.fixture(autouse=True)
def _precision(matmul_precision):
    """Cells set it for the whole process, which is theirs elsewhere."""


pytestmark = pytest.mark.parametrize("matmul_precision", ["highest"], indirect=True)


def changed(mode="step", dtype="bfloat16", **work):
    return Cell(dataclasses.replace(CELL.work, **work), dtype, mode)


class TestOptions:
    def test_cells_are_presets_contexts_models_dtypes_and_modes(self):
        options = parse([*TINY, "--context", "32", "16", "--dtype", "float32", "bfloat16", "--mode", "step", "forward"])
        cells = cells_of(options)
        assert len(cells) == len({cell.key for cell in cells}) == 8
        assert [(cell.work.context, cell.dtype, cell.mode) for cell in cells[:3]] == [
            (16, "float32", "forward"),
            (16, "float32", "step"),
            (16, "bfloat16", "forward"),
        ]

    def test_without_a_gpu_the_default_is_tiny(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        cells = cells_of(parse([]))
        assert [(cell.work.preset, cell.work.model, cell.mode) for cell in cells] == [
            ("tiny", "naive", mode) for mode in MODES
        ]

    def test_with_a_gpu_the_default_is_the_table(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(suite, "choose_device", torch.device)
        cells = cells_of(parse(["--device", "cuda"]))
        assert len(cells) == 5 * 4 * 3
        assert {cell.work.batch for cell in cells} == {4}

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--preset", "huge"], "--preset must be one of tiny, small, .*; got huge"),
            (["--profiled-steps", "0"], "expected a whole number of at least 1; got '0'"),
            (["--device", "cpu", "--nsys-ranges"], "--nsys-ranges needs a CUDA device; got cpu"),
        ],
    )
    def test_what_cannot_be_is_refused(self, capsys, arguments, message):
        with pytest.raises(SystemExit):
            parse(arguments)
        assert re.search(message, " ".join(capsys.readouterr().err.split()))

    def test_the_command_for_nsight_systems_runs_the_same_cells(self, tmp_path, monkeypatch):
        monkeypatch.setattr(suite, "choose_device", torch.device)
        given = ["--preset", "small", "--filter", "naive, .*step", "--output", str(tmp_path / "out"), "--trace"]
        options = parse([*given, "--device", "cuda"])
        command = nsys_command(options, given)
        assert command.startswith("nsys profile --trace=cuda,nvtx --capture-range=cudaProfilerApi ")
        words = shlex.split(command)
        again = parse([*words[words.index("--preset") :], "--device", "cuda"])
        assert (again.nsys_ranges, again.trace, again.output) == (True, False, tmp_path / "out-nsys")
        assert again.filter == options.filter
        assert cells_of(again) == cells_of(options)

    def test_longer_sequences_and_modes_that_take_more_are_not_tried(self):
        rows = [row_of(changed("forward+backward"), {"status": "oom"}, False)]
        for cell in (changed("step"), changed("forward+backward", context=32)):
            skipped = no_room(cell, rows)
            assert skipped is not None
            assert str(skipped) == "skipped: memory ran out at 2 × 16, forward+backward, already"
        others = [changed("forward"), changed(context=8), changed(dtype="float32"), changed(model="sdpa")]
        assert [no_room(cell, rows) for cell in others] == [None] * 4


class TestCell:
    def test_modes_do_what_they_say(self):
        for mode in MODES:
            step = prepared(changed(mode), CPU, seed=0)
            before = [parameter.clone() for parameter in step.model.parameters()]
            in_mode(step, mode)()
            same = all(torch.equal(one, other) for one, other in zip(before, step.model.parameters(), strict=True))
            assert same == (mode != "step")
            assert all(parameter.grad is None for parameter in step.model.parameters())

    def test_the_forward_mode_keeps_no_graph(self):
        step = prepared(changed("forward"), CPU, seed=0)
        losses = []
        forward = step.forward
        step = dataclasses.replace(step, forward=lambda: losses.append(forward()) or losses[-1])
        in_mode(step, "forward")()
        in_mode(step, "forward+backward")()
        assert [loss.requires_grad for loss in losses] == [False, True]

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_dtypes(self, dtype):
        step = prepared(changed(dtype=dtype), CPU, seed=0)
        seen = []
        head = step.model.get_submodule("lm_head")
        head.register_forward_hook(lambda module, arguments, output: seen.append(str(output.dtype)))
        step.forward()
        assert seen == [f"torch.{dtype}"]

    @pytest.mark.parametrize("mode", MODES)
    def test_a_row(self, mode):
        row = measure_cell((changed(mode), CONDITIONS))
        assert row["status"] == "ok", row
        assert row["measured"] == "operators on the host"
        assert row["profiler_cost"] == pytest.approx(row["profiled_ms"] / row["median_ms"])
        assert list(row["totals"]) == list(PASSES_OF[mode])
        assert sum(row[share_column(name)] for name in CLASSES) == pytest.approx(1)
        for of_pass in PASSES_OF[mode]:
            of_a_pass = [kernel for kernel in row["kernels"] if kernel["of_pass"] == of_pass]
            assert sum(kernel["share"] for kernel in of_a_pass) == pytest.approx(1)
            assert row[f"top_{of_pass}"] == of_a_pass[0]["name"]
        assert sum(kernel["milliseconds"] for kernel in row["kernels"] if kernel["of_pass"] == "all") == pytest.approx(
            row["work_ms"]
        )
        assert row["softmax_ms"] > 0
        assert row["products_ms"] <= row["scores_ms"] + row["values_ms"]
        json.dumps(row, allow_nan=False)

    def test_fused_attention_has_no_parts(self):
        row = measure_cell((changed("forward", model="sdpa"), CONDITIONS))
        assert row["status"] == "ok", row
        assert "softmax_ms" not in row
        assert row["share_attention"] > 0

    @pytest.mark.usefixtures("compile_afresh")
    @pytest.mark.parametrize("how", ["blocks", "model"])
    def test_what_is_compiled_has_no_regions_inside(self, how):
        row = measure_cell((changed("forward", compile=how), CONDITIONS))
        # The model "naive" is never compiled.
        assert "attention: softmax" in row["totals"]["forward"]
        row = measure_cell((changed("forward", compile=how, model="compiled-naive"), CONDITIONS))
        assert row["status"] == "ok", row
        regions = set(row["totals"]["forward"])
        assert regions == ({"elsewhere"} if how == "model" else {"embedding", "residual", "norm", "head and loss"})

    def test_traces_are_kept_where_asked_for(self, tmp_path):
        conditions = dataclasses.replace(CONDITIONS, traces=tmp_path / "traces")
        measure_cell((CELL, conditions))
        (trace,) = (tmp_path / "traces").iterdir()
        names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
        assert {"[pass] forward", "[pass] backward", "[pass] optimizer", "[mlp] layers.3.ffn"} <= names

    def test_for_nsight_systems_there_are_ranges_and_times_alone(self, monkeypatch):
        recorded = []

        @contextmanager
        def capture():
            recorded.append("start")
            yield
            recorded.append("stop")

        monkeypatch.setattr(torch.cuda.profiler, "profile", capture)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: recorded.append("waited"))
        monkeypatch.setattr(breakdown_cell.Regions, "during", lambda self, name: recorded.append(name) or nullcontext())
        row = measure_cell((changed("forward+backward"), dataclasses.replace(CONDITIONS, nsys=True)))
        assert row["status"] == "ok", row
        assert "profiled_ms" not in row
        assert "kernels" not in row
        a_step = ["forward", "backward"]
        assert recorded == [*a_step, "start", *a_step, *a_step, "waited", "stop"]
        text = report([row_of(changed("forward+backward"), row, False)], collect_environment("cpu"), [])
        assert "Inside attention" not in text
        assert format_number(row["median_ms"], 4) in text

    def test_memory_that_ran_out_is_a_status(self, monkeypatch):
        def full(*arguments, **options):
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(breakdown_cell, "prepared", full)
        assert measure_cell((CELL, CONDITIONS)) == {"status": "oom", "reason": "CUDA out of memory"}

    def test_what_needs_a_gpu_says_so(self):
        row = measure_cell((changed(model="flash"), CONDITIONS))
        assert row["status"] == "unsupported", row

    @pytest.mark.gpu
    @pytest.mark.parametrize("model", ["naive", "flash", "sdpa"])
    def test_kernels_of_a_gpu(self, model):
        cell = changed(model=model, context=128)
        row = measure_cell((cell, dataclasses.replace(CONDITIONS, device=torch.device("cuda"))))
        assert row["status"] == "ok", row
        assert row["measured"] == "kernels on the device"
        assert row["share_matrix_products"] > 0
        assert row["share_optimizer"] > 0
        assert (row["share_attention"] > 0) == (model != "naive")
        assert row["totals"]["backward"]["mlp"]["matrix products"] > 0
        assert ("softmax_ms" in row) == (model == "naive")


SUMS = {
    "forward": {
        "attention: scores": {"matrix products": 2.0, "elementwise": 1.0},
        "attention: mask": {"elementwise": 1.5},
        "attention: softmax": {"softmax": 3.0},
        "attention: values": {"matrix products": 1.0, "copy": 0.5},
        "mlp": {"matrix products": 6.0},
    },
    "backward": {"mlp": {"matrix products": 4.0, "elementwise": 1.0}},
}


class TestFigures:
    def test_parts_of_attention(self):
        small = preset("small", context_length=256)
        columns = columns_of_parts(small, 4, "forward", SUMS)
        assert [columns[f"{name}_ms"] for name in ("scores", "mask", "softmax", "values", "products")] == [
            *(3.0, 1.5, 3.0, 1.5, 3.0)
        ]
        assert columns["softmax_over_products_time"] == 1.0
        assert columns["softmax_over_products_flops"] == pytest.approx(5 / (4 * 64))
        pairs = 4 * 12 * 256 * 256
        assert columns["scores_flops"] == columns["values_flops"] == 12 * 2 * pairs * 64
        assert columns["softmax_flops"] == 12 * 5 * pairs
        both = columns_of_parts(small, 4, "step", SUMS)
        assert both["scores_flops"] == 3 * columns["scores_flops"]
        assert both["softmax_over_products_flops"] == pytest.approx(9 / (12 * 64))

    def test_shares_of_classes(self):
        columns = columns_of_shares(SUMS, ("forward", "backward"))
        assert columns["share_matrix_products"] == pytest.approx(13 / 20)
        assert columns["share_matrix_products_forward"] == pytest.approx(9 / 15)
        assert columns["share_matrix_products_backward"] == pytest.approx(4 / 5)
        assert columns["share_communication"] == 0

    def test_long_names_are_cut_in_the_middle(self):
        assert short_name("void at::native::(anonymous namespace)::softmax_warp<float>") == "softmax_warp<float>"
        long = short_name("begin" + "x" * 200 + "end")
        assert len(long) <= 76
        assert long.startswith("begin")
        assert long.endswith("end")

    def test_a_failure_and_what_is_not_classified_are_told(self):
        row = row_of(CELL, measure_cell((CELL, CONDITIONS)), False)
        row["kernels"].append(row["kernels"][0] | {"name": "mystery", "of_class": "other", "milliseconds": 0.001})
        rows = [row, row_of(changed("forward"), {"status": "oom", "reason": "full"}, False)]
        text = report(rows, collect_environment("cpu"), method_of(parse([*TINY])))
        assert "Not classified: `mystery`" in text
        assert f"- {name_of(row)}, forward: oom: full" in text
        for title in ("Times without the profiler", "The share of all matrix products", "Inside attention"):
            assert f"\n## {title}" in text


class TestRun:
    def test_rows_come_one_by_one_and_are_kept(self, tmp_path, monkeypatch):
        arguments = [*TINY, *SHORT, "--output", str(tmp_path)]
        assert breakdown.main([*arguments, "--mode", "step"]) == 0
        alone, measured = suite.measured_alone, []

        def noted(measure, job, limit):
            measured.append(job[0].mode)
            return alone(measure, job, limit)

        monkeypatch.setattr(suite, "measured_alone", noted)
        assert breakdown.main([*arguments, "--mode", "step", "forward", "--resume"]) == 0
        assert measured == ["forward"]
        with (tmp_path / "results.csv").open() as file:
            rows = {row["mode"]: row for row in csv.DictReader(file)}
        assert set(rows) == {"step", "forward"}
        assert set(rows["step"]) == set(COLUMNS)
        assert float(rows["step"]["share_optimizer"]) > 0
        assert rows["forward"]["top_backward"] == ""
        with (tmp_path / "kernels.csv").open() as file:
            kernels = list(csv.DictReader(file))
        assert set(kernels[0]) == set(KERNEL_COLUMNS)
        assert {"all", "forward", "backward", "optimizer"} == {kernel["of_pass"] for kernel in kernels}
        with (tmp_path / "regions.csv").open() as file:
            of_step = [line for line in csv.DictReader(file) if line["mode"] == "step"]
        assert sum(float(line["share"]) for line in of_step) == pytest.approx(1)
        tables = (tmp_path / "tables.md").read_text()
        assert "| attention: softmax" in tables
        assert "without kernels in the trace, work is operators on the host" in tables

    def test_a_plot_is_drawn(self, tmp_path):
        pytest.importorskip("matplotlib")
        row = row_of(CELL, measure_cell((CELL, CONDITIONS)), False)
        assert breakdown_report.draw(tmp_path, [row])
        assert (tmp_path / "shares.png").read_bytes().startswith(b"\x89PNG")
        assert not breakdown_report.draw(tmp_path, [])
