"""The command line, presets and configurations of the attention benchmark."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from benchmarks.attention_options import build_parser, parse
from benchmarks.attention_presets import PRESET_NOTES, PRESETS, Problem, SweepConfiguration
from cs336_systems.profiling.sweep import RowStore

SMALL = SweepConfiguration(
    preset="cpu", lengths=(64,), dims=(16,), dtypes=("float32",), masks=("full",), batch=1, heads=2
)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_can_be_asked_for(name):
    configuration, options = parse(["--preset", name, "--device", "cpu"])
    assert configuration == PRESETS[name]
    assert options.device == torch.device("cpu")
    assert options.plots
    assert name in PRESET_NOTES


@pytest.mark.parametrize(("gpu", "name"), [(False, "cpu"), (True, "quick")])
def test_the_default_depends_on_the_machine(monkeypatch, gpu, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    configuration, options = parse([])
    assert configuration.preset == name
    assert options.device == torch.device("cuda:0" if gpu else "cpu")


def test_the_cpu_is_what_is_asked_for_even_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert parse(["--device", "cpu"])[0].preset == "cpu"


def test_the_paper_sweep_holds_tokens_and_channels():
    problems = PRESETS["paper"].problems()
    assert len(problems) == 6 * 3 * 2
    assert all(p.batch * p.length == 16384 and p.heads * p.head_dim == 2048 for p in problems)
    assert problems[0] == Problem("bfloat16", "causal", batch=32, heads=32, kv_heads=32, length=512, head_dim=64)


def test_the_course_sweeps():
    course, causal = PRESETS["course"].problems(), PRESETS["course-causal"].problems()
    assert len(course) == 2 * 4 * 5
    assert {(p.batch, p.heads, p.mask) for p in course} == {(8, 0, "full")}
    assert course[0].shape == "(8, 256, 16)"
    assert sorted({p.length for p in causal}) == [2**power for power in range(7, 17)]
    assert {(p.batch, p.heads, p.mask) for p in causal} == {(1, 0, "causal")}


def test_flags_replace_what_the_preset_says():
    arguments = "--preset paper --lengths 1024,256 512 --dims 64 --dtype fp16,float32 --full --passes backward forward"
    more = "--impl flash,naive torch --batch 2 --heads 8 --kv-heads 2 --rounds 7 --max-seconds 3 --seed 5 --tf32"
    configuration, _ = parse([*arguments.split(), *more.split(), "--device", "cpu"])
    assert configuration == SweepConfiguration(
        preset="paper",
        lengths=(1024, 256, 512),
        dims=(64,),
        dtypes=("float16", "float32"),
        masks=("full",),
        passes=("forward", "backward"),
        implementations=("flash", "naive", "torch"),
        batch=2,
        heads=8,
        kv_heads=2,
        rounds=7,
        max_seconds=3.0,
        seed=5,
        tf32=True,
    )
    assert [p.length for p in configuration.problems()][:3] == [256, 512, 1024]


@pytest.mark.parametrize(
    ("flags", "masks"),
    [
        ([], ("causal",)),
        (["--full"], ("full",)),
        (["--causal"], ("causal",)),
        (["--full", "--causal"], ("causal", "full")),
    ],
)
def test_masks(flags, masks):
    assert parse(["--device", "cpu", *flags])[0].masks == masks


def test_where_results_go():
    assert parse(["--device", "cpu"])[1].folder is None
    _, options = parse(["--device", "cpu", "--output", "here", "--no-plots", "--dry-run", "--commit", "f00"])
    assert (options.folder, options.plots, options.dry_run, options.commit) == (Path("here"), False, True, "f00")


def test_resuming_takes_the_stored_configuration(tmp_path):
    stored = dataclasses.replace(SMALL, seed=3, tf32=True, max_seconds=0.5)
    RowStore.open(tmp_path, {**stored.as_dict(), "device": "of another key"})
    configuration, options = parse(["--resume", str(tmp_path), "--device", "cpu"])
    assert configuration == stored
    assert options.folder == tmp_path
    changed, _ = parse(["--resume", str(tmp_path), "--device", "cpu", "--seed", "4", "--preset", "course"])
    assert changed == dataclasses.replace(stored, seed=4, preset="course")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "many"], "expected numbers, separated by spaces or commas; got 'many'"),
        (["--dtype", "int8"], "expected one of bfloat16, .*; got 'int8'"),
        (["--lengths", "0"], "lengths must be positive"),
        (["--rounds", "0"], "rounds and max_seconds must be positive; got 0"),
        (["--heads", "6", "--kv-heads", "4"], "kv_heads must divide the 6 heads; got 4"),
        (["--kv-heads", "2", "--heads", "0"], "kv_heads must divide the 0 heads; got 2"),
        (["--preset", "paper", "--lengths", "1000"], r"tokens \(16384\) must be a multiple of every length; got 1000"),
        (["--resume", "/nowhere/at/all"], "no sweep to resume"),
        (["--resume", "a", "--output", "b"], "different folders"),
        (["--preset", "none"], "invalid choice"),
    ],
)
def test_what_cannot_be_done_is_said(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        parse(["--device", "cpu", *arguments])
    assert ended.value.code == 2
    error = " ".join(capsys.readouterr().err.split())
    assert re.search(message, error), error


def test_a_gpu_that_is_not_there_is_said(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        parse(["--device", "cuda"])
    assert "torch finds no CUDA device" in capsys.readouterr().err


def test_the_help_is_grouped_and_has_examples():
    text = build_parser().format_help()
    for part in (
        "what to sweep",
        "the shape of a problem",
        "how to measure",
        "results",
        "examples:",
        "--resume FOLDER",
    ):
        assert part in text
    for name in PRESETS:
        assert f"\n  {name} " in text
    assert "naive, compiled, tiled, flash, sdpa" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": ()}, "lengths must be positive and at least one"),
        ({"dims": (16, 16)}, "dims must not repeat a value"),
        ({"masks": ("diagonal",)}, "masks must be taken from causal, full; got diagonal"),
        ({"passes": ()}, "passes must be taken from .*; got none"),
        ({"batch": None}, "exactly one of batch and tokens must be given"),
        ({"channels": 64}, "exactly one of heads and channels must be given"),
        ({"heads": -1}, "heads at least 0; got 1 and -1"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


def test_a_configuration_survives_json():
    assert SweepConfiguration.from_dict({**SMALL.as_dict(), "lengths": [64]}) == SMALL


def test_a_filter_must_be_a_regular_expression(capsys):
    with pytest.raises(SystemExit):
        parse(["--device", "cpu", "--filter", "("])
    assert "--filter must be a regular expression: missing )" in capsys.readouterr().err


def test_the_parser_sets_nothing_that_was_not_given():
    given = vars(build_parser().parse_args([]))
    assert {name for name, value in given.items() if value not in (None, False)} == set()
