"""The flags of all benchmarks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.lib import flags


def parse(usual: str, *arguments: str, **how: object):
    return flags.parse(flags.make_parser("About", usual, **how), ["--device", "cpu", *arguments])


def test_several_values_are_separated_by_spaces_or_commas_and_come_once():
    usual = "--lengths 1 --dtypes --head-dims 64 128 --batch --rep 5 --no-tf32"
    options = parse(usual, "--lengths", "8,4", "4", "--dtypes", "bf16", "float32")
    assert (options.lengths, options.dtypes, options.head_dims) == ([8, 4], ["bfloat16", "float32"], [64, 128])
    assert (options.batch, options.rep, options.tf32) == (None, 5.0, False)
    assert [parse("--tf32", *given).tf32 for given in ([], ["--no-tf32"])] == [True, False]


def test_every_program_has_the_same_flags_for_a_run():
    options = parse("", "--out", "here", "--resume", "--filter", "a.c", "--no-plots", "--seed", "3", timeout=5)
    assert (options.out, options.resume, options.filter.pattern) == (Path("here"), True, "a.c")
    assert (options.plots, options.seed, options.timeout, options.dry_run) == (False, 3, 5, False)
    assert options.device == torch.device("cpu")


def test_every_flag_can_be_made():
    names = {*flags._SEVERAL, *flags._SINGLE, *flags._SWITCHES}
    usual = [f"--{name.replace('_', '-')}" for name in names]
    text = flags.make_parser("About", " ".join(usual)).format_help()
    assert all(flag in text for flag in usual)
    assert "sequence lengths (default: 1 2)" in " ".join(flags.make_parser("", "--lengths 1 2").format_help().split())
    with pytest.raises(KeyError):
        flags.make_parser("", "--length 1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "many"], "expected a whole number of at least 1; got 'many'"),
        (["--lengths", "0"], "expected a whole number of at least 1; got '0'"),
        (["--lengths", ","], "--lengths must have at least one value"),
        (["--dtypes", "int8"], "expected one of bfloat16, float16, float32; got 'int8'"),
        (["--filter", "("], "expected a regular expression, but missing )"),
        (["--seed", "-1"], "expected a whole number of at least 0; got '-1'"),
        (["--rep", "-1"], "expected a number of milliseconds, 0 or more; got '-1'"),
        (["--rep", "nan"], "expected a number of milliseconds, 0 or more; got 'nan'"),
        (["--timeout", "-1"], "expected a positive number of seconds; got '-1'"),
        (["--peers", "/nowhere"], "expected a folder that exists; got '/nowhere'"),
        (["--device", "toaster"], "--device must be auto, cuda"),
        (["--resume"], "--resume needs the folder to continue in: --out FOLDER"),
    ],
)
def test_invalid_arguments_end_the_program(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        parse("--lengths 1 --dtypes fp32 --peers --rep", *arguments)
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "available", "wanted"),
    [
        ([], True, True),
        ([], False, False),
        (["--device", "auto", "--other", "1"], True, True),
        (["--device", "cpu"], True, False),
        (["--device=cuda:1"], False, True),
    ],
)
def test_defaults_may_depend_on_the_device(monkeypatch, arguments, available, wanted):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert flags.wants_gpu(arguments) is wanted
