"""The programs of examples/ run as their docstrings say, on little data."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
OWN_MODEL = """
import torch
from torch import nn

class Gate(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)

def make():
    return nn.Sequential(nn.Linear(8, 16), Gate(), nn.Linear(16, 1)), (torch.randn(4, 8),)
"""


def printed(name: str, *arguments: object, launcher: tuple[str, ...] = (), folder: Path | None = None) -> str:
    """What an example prints, run with the checkout's library on a CPU."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, *launcher, str(ROOT / f"examples/{name}.py"), *map(str, arguments)]
    ended = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def losses(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"^\[\d+/\d+\] loss ([\d.]+)", text, re.MULTILINE)]


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"To be, or not to be: {'that is the question. ' * (i % 5)}" for i in range(40)))
    return path


def test_files_are_short_and_say_how_to_run_them():
    assert [path.stem for path in EXAMPLES] == ["finetune", "long_context", "nanogpt", "own_mask", "profile_model"]
    for path in EXAMPLES:
        text = path.read_text()
        assert len(text.splitlines()) < 120
        assert f"examples/{path.name}" in text.partition("\n\n")[2]


@pytest.mark.slow
def test_nanogpt_learns(text_file):
    text = printed("nanogpt", text_file, "--tokens", 256, "--steps", 40, "--channels", 32, "--length", 64)
    assert losses(text)[-1] < losses(text)[0] < 6
    assert "held out: loss" in text
    assert "sample: " in text


def test_own_mask_computes_what_naive_attention_does():
    text = printed("own_mask", "--length", 300, "--heads", 2)
    assert "tiled: chosen" in text
    assert text.count("largest difference") == 5
    assert "equal but for rounding" in text


@pytest.mark.slow
def test_profile_model_profiles_a_model_of_the_users(tmp_path):
    pytest.importorskip("pandas")
    (tmp_path / "mine.py").write_text(OWN_MODEL)
    text = printed("profile_model", "mine:make", "--top", 3, folder=tmp_path)
    tables = [line.split("|")[1].strip() for line in text.split("\n") if re.match(r"\| [a-z]", line)]
    for title in ("phase", "forward", "backward", "operator", "class of module", "at the peak", "saved by"):
        assert title in tables
    assert re.search(r"^\| Gate +\|", text, re.MULTILINE)
    assert "mine.py:7 forward" in text  # where autograd saves x and its sigmoid


@pytest.mark.slow
def test_long_context_has_the_loss_of_one_process(text_file):
    text = printed("long_context", "--file", text_file, "--length", 200, "--steps", 3, launcher=TORCHRUN)
    assert "process 0: tokens 0 to 49 and 150 to 199\nprocess 1: tokens 50 to 99 and 100 to 149\n" in text
    whole = re.search(r"whole sequence on one process: ([\d.]+)", text)
    assert whole is not None
    assert losses(text)[0] == pytest.approx(float(whole[1]), abs=2e-5)
    assert losses(text)[-1] < losses(text)[0]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_finetune_has_the_logits_of_eager_attention_and_learns(text_file):
    text = printed("finetune", "--file", text_file, "--length", 64, "--batch", 4, "--steps", 10)
    difference = re.search(r"largest difference from eager: (\S+) of", text)
    assert difference is not None
    assert float(difference[1]) < 1e-5
    assert losses(text)[-1] < losses(text)[0]
    assert "continuation: " in text


def test_finetune_says_what_to_install(tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError('no transformers here')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, str(ROOT / "examples/finetune.py")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "pip install 'cs336_systems[hf]'" in ended.stderr
