"""The breakdown: what is measured, what rows, files and tables hold, and a run."""

from __future__ import annotations

import json
from contextlib import contextmanager, nullcontext

import pandas as pd
import pytest
import torch

from benchmarks import breakdown
from benchmarks.breakdown import call_of, make_parser, measure, ranges_of
from benchmarks.lib.flags import parse
from benchmarks.lib.models import PHASES_OF
from benchmarks.lib.steps import make_model, make_step
from benchmarks.parts.breakdown_tables import attention_columns, details, kernel_columns, share_column, short_name
from benchmarks.parts.breakdown_tables import tables as tables_of
from cs336_systems.profiling.kernel_classes import CLASSES
from cs336_systems.transformer import preset

from .small_models import CASE, CPU, FLAGS, changed, measured, run_here

OPTIONS = {"profiled_steps": 2, "trace": False, "nsys_ranges": False}


def calls(*rows):
    """A trace of (phase, region, class, milliseconds)."""
    columns = ["phase", "region", "kernel_class", "microseconds"]
    frame = pd.DataFrame([(*row[:3], 1e3 * row[3]) for row in rows], columns=columns)
    return frame.assign(name=frame["kernel_class"] + " kernel", on_device=True)


TRACE = calls(
    ("forward", "attention: scores", "matrix products", 2.0),
    ("forward", "attention: scores", "elementwise", 1.0),
    ("forward", "attention: mask", "elementwise", 1.5),
    ("forward", "attention: softmax", "softmax", 3.0),
    ("forward", "attention: values", "matrix products", 1.0),
    ("forward", "attention: values", "copy", 0.5),
    ("forward", "mlp", "matrix products", 6.0),
    ("backward", "mlp", "matrix products", 4.0),
    ("backward", "mlp", "other", 1.0),
)


@pytest.mark.parametrize("mode", PHASES_OF)
def test_a_mode_does_what_it_says(mode):
    step, _ = make_step(changed(mode=mode), CPU, seed=0)
    graphs, forward = [], step.forward
    step.forward = lambda: graphs.append(forward()) or graphs[-1]
    before = [parameter.clone() for parameter in step.model.parameters()]
    call_of(step, mode)()
    same = all(torch.equal(*pair) for pair in zip(before, step.model.parameters(), strict=True))
    assert same == (mode != "step")
    assert all(parameter.grad is None for parameter in step.model.parameters())
    assert graphs[0].requires_grad == (mode != "forward")


@pytest.mark.parametrize("mode", PHASES_OF)
def test_a_row_and_its_files(tmp_path, mode):
    row = measured(measure, changed(mode=mode, dtype="bfloat16"), tmp_path, **OPTIONS | {"trace": True})
    assert row["status"] == "ok", row
    assert row["measured"] == "operators on the host"
    assert row["profiler_cost"] == pytest.approx(row["profiled_ms"] / row["median_ms"])
    assert sum(row[share_column(name)] for name in CLASSES) == pytest.approx(1)
    assert row["products_ms"] <= row["scores_ms"] + row["values_ms"]
    assert row["busy"] is None
    json.dumps(row, allow_nan=False)
    files = {name: next((tmp_path / name).iterdir()) for name in ("details", "kernels", "regions", "traces")}
    kernels, regions = pd.read_csv(files["kernels"]), pd.read_csv(files["regions"])
    assert (
        kernels["milliseconds"].sum() == pytest.approx(row["work_ms"]) == pytest.approx(regions["milliseconds"].sum())
    )
    assert set(PHASES_OF[mode]) <= set(kernels["phase"]) <= {*PHASES_OF[mode], "elsewhere"}
    for phase in PHASES_OF[mode]:
        longest = kernels[kernels["phase"] == phase].groupby("name")["milliseconds"].sum().idxmax()
        assert row[f"top_{phase}"] == longest
    assert "| attention: softmax" in files["details"].read_text()
    names = {event.get("name") for event in json.loads(files["traces"].read_text())["traceEvents"]}
    assert {*(f"[phase] {phase}" for phase in PHASES_OF[mode]), "[mlp] layers.1.ffn"} <= names


def test_fused_attention_has_no_steps(tmp_path):
    row = measured(measure, changed(mode="forward", provider="sdpa"), tmp_path, **OPTIONS)
    assert row["status"] == "ok", row
    assert "softmax_ms" not in row
    assert row["share_attention"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("compile_afresh")
@pytest.mark.parametrize("how", ["blocks", "whole"])
def test_compiled_code_has_no_regions_inside(tmp_path, how):
    row = measured(measure, changed(mode="forward", compile=how), tmp_path, **OPTIONS)
    assert row["status"] == "ok", row
    (path,) = (tmp_path / "regions").iterdir()
    outside = {"elsewhere"} if how == "whole" else {"embedding", "residual", "norm", "model", "head and loss"}
    assert set(pd.read_csv(path)["region"]) == outside


@pytest.mark.parametrize(("how", "inside", "outside"), [("none", 1, 1), ("blocks", 0, 1), ("whole", 0, 0)])
def test_modules_have_ranges_unless_they_are_compiled(monkeypatch, how, inside, outside):
    model, paths = make_model(CASE, CPU), []
    monkeypatch.setattr(breakdown.ModuleRanges, "push", lambda self, region, path: paths.append(path))
    monkeypatch.setattr(breakdown.ModuleRanges, "pop", lambda self: None)
    with ranges_of(model, how):
        model(torch.zeros(1, 4, dtype=torch.int64))
    assert (paths.count("layers.1.ffn"), paths.count("token_embeddings")) == (inside, outside)


def test_nsight_systems_gets_ranges_and_no_profiler(monkeypatch):
    recorded = []

    @contextmanager
    def capture():
        recorded.append("start")
        yield
        recorded.append("stop")

    monkeypatch.setattr(torch.cuda.profiler, "profile", capture)
    monkeypatch.setattr(torch.cuda.nvtx, "range", lambda name: recorded.append(name) or nullcontext())
    monkeypatch.setattr(breakdown, "synchronize", lambda device: recorded.append("wait"))
    monkeypatch.setattr(breakdown.ModuleRanges, "phase", lambda self, name: recorded.append(name) or nullcontext())
    case = changed(mode="forward+backward")
    row = measured(measure, case, **OPTIONS | {"nsys_ranges": True})
    assert row["status"] == "ok", row
    assert "profiled_ms" not in row
    step = ["forward", "backward"]
    assert recorded == [*step, "start", case.name, *step, *step, "wait", "stop"]
    text = tables_of(pd.DataFrame([case.columns | row]))
    assert "Times" in text
    assert "Share" not in text


def test_flags_that_exclude_each_other(capsys):
    with pytest.raises(SystemExit):
        breakdown.main(["--device", "cpu", "--nsys-ranges"])
    assert "--nsys-ranges needs a CUDA device; got cpu" in capsys.readouterr().err
    assert parse(make_parser([]), ["--device", "cpu"]).profiled_steps == 3


def test_steps_of_attention():
    case = changed(config=preset("small", context_length=256), batch=4, mode="forward")
    row = attention_columns(TRACE, case, steps=1)
    assert [row[f"{name}_ms"] for name in ("scores", "mask", "softmax", "values", "products")] == [3, 1.5, 3, 1.5, 3]
    assert row["softmax_over_products_time"] == 1
    assert row["softmax_over_products_flops"] == pytest.approx(5 / (4 * 64))
    pairs = 4 * 12 * 256 * 256
    assert row["scores_flops"] == row["values_flops"] == 12 * 2 * pairs * 64
    assert row["softmax_flops"] == 12 * 5 * pairs
    both = attention_columns(TRACE, changed(case, mode="step"), steps=1)
    assert both["scores_flops"] == 3 * row["scores_flops"]
    assert both["softmax_over_products_flops"] == pytest.approx(9 / (12 * 64))


def test_shares_and_top_kernels():
    row = kernel_columns(TRACE, changed(mode="forward+backward"), steps=2)
    assert (row["work_ms"], row["instances"]) == (10, 4.5)
    assert row["share_matrix_products"] == pytest.approx(13 / 20)
    assert row["share_matrix_products_forward"] == pytest.approx(9 / 15)
    assert row["share_matrix_products_backward"] == pytest.approx(4 / 5)
    assert row["share_communication"] == 0
    assert (row["top"], row["top_no_product"]) == ("matrix products kernel", "softmax kernel")
    assert [row[f"top_forward_{name}"] for name in ("share", "ms", "instances")] == [pytest.approx(9 / 15), 4.5, 1.5]
    assert [row[f"top_no_product_{name}"] for name in ("ms", "instances")] == [1.5, 0.5]
    assert "`other kernel`" in details(TRACE, CASE, steps=1)["details"]


def test_tables_compare_dtypes_and_name_kernels_without_products():
    case = changed(mode="forward+backward")
    row = {"case": "", "status": "ok", "median_ms": 8.0} | kernel_columns(TRACE, case, steps=1)
    half = changed(case, dtype="bfloat16").columns | row | {"median_ms": 4.0, "scores_ms": 1.0}
    text = tables_of(pd.DataFrame([case.columns | row, half]))
    parts = {title: body for title, _, body in (part.partition("\n") for part in text.split("## "))}
    (dtypes,) = (body for title, body in parts.items() if title.startswith("float32 and other"))
    assert "8.00 → 4.00 (2.00×)" in dtypes
    assert "3.00 → 1.00 (3.00×)" in dtypes
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    expected = ["forward+backward", "step without products", "softmax kernel", "0.429", "3.00", "1.00"]
    assert [line[-6:] for line in cells].count(expected) == 2


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::(anonymous namespace)::softmax_warp<float, 10>(float*, int)", "softmax_warp"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::AUnaryFunctor<float, float, "
            "at::native::binary_internal::MulFunctor<float> >, std::array<char*, 2ul> >(int)",
            "vectorized_elementwise_kernel<MulFunctor>",
        ),
        (
            "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::(anonymous "
            "namespace)::masked_fill_kernel(at::TensorIterator&)::{lambda()#1}>(at::TensorIteratorBase&)>(int)",
            "elementwise_kernel<masked_fill_kernel>",
        ),
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_execute_kernel__5x_cublas",
            "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8",
        ),
        ("void cutlass::Kernel2<cutlass_80_sgemm>(cutlass_80_sgemm::Params)", "Kernel2<cutlass_80_sgemm>"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
        ("triton_" + "x" * 200, "triton_" + "x" * 73),
    ],
)
def test_short_names_of_kernels(name, short):
    assert short_name(name) == short


def test_a_run(monkeypatch, tmp_path):
    arguments = [*FLAGS, "--batch", "2", "--steps", "2", "--warmup-steps", "1", "--profiled-steps", "1"]
    arguments += ["--modes", "forward", "step", "--providers", "naive", "flash"]
    rows = run_here(monkeypatch, breakdown.main, tmp_path, *arguments)
    assert [row["status"] for row in rows] == ["ok"] * 2 + ["unsupported"] * 2
    assert float(rows[1]["share_optimizer"]) > 0 == float(rows[0]["share_optimizer"])
    assert rows[0]["top_backward"] == ""
    text = (tmp_path / "tables.md").read_text()
    titles = (
        "Times without and with",
        "Share of each class",
        "Share of matrix products",
        "Top kernel",
        "Steps of naive",
    )
    assert all(f"\n## {title}" in text for title in titles)
    assert (tmp_path / "shares.png").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("provider", ["naive", "flash", "sdpa"])
def test_kernels_of_a_gpu(tmp_path, provider):
    case = changed(provider=provider, dtype="bfloat16", context_length=128, d_model=128)
    row = measured(measure, case, tmp_path, device=torch.device("cuda"), **OPTIONS)
    assert row["status"] == "ok", row
    assert row["measured"] == "kernels on the device"
    assert row["share_matrix_products"] > 0
    assert row["share_optimizer"] > 0
    assert row["busy"] > 0
    assert (row["share_attention"] > 0) == (provider != "naive")
    assert ("softmax_ms" in row) == (provider == "naive")
