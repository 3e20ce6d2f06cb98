"""What recording costs where nothing has been recorded before."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
torch.autograd.grad = torch.autograd.backward = None  # whose engine initialises CUDA
from cs336_systems.attention import attention
from cs336_systems.attention.mods import score_mod

slopes = torch.ones(2, requires_grad=True)
score_mod(lambda s, b, h, q, k: s.tanh() - slopes[h] * (q - k).abs())
print(*[name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""


def test_neither_the_import_nor_recording_loads_the_compiler():
    """Which takes more than a second."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


FORKING = """
import os
import torch
from cs336_systems.attention import attention
from cs336_systems.attention.mods import score_mod

slopes = torch.ones(2, requires_grad=True)
score_mod(lambda s, b, h, q, k: s.tanh() - slopes[h] * (q - k).abs())
child = os.fork()
if child == 0:
    torch.ones(1, device="cuda")
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.gpu
def test_neither_initialises_cuda_which_no_forked_process_could_use_then(monkeypatch):
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    assert subprocess.run([sys.executable, "-c", FORKING], check=False).returncode == 0


LACKING = """
import torch
import torch.utils._python_dispatch as dispatch

del dispatch.TorchDispatchMode
from cs336_systems.attention import attention

q = torch.zeros(1, 2, 4, 8)
attention(q, q, q, causal=True, impl="tiled")
try:
    attention(q, q, q, bias=torch.zeros(4, 4), impl="tiled")
except RuntimeError as error:
    print(error)
"""


def test_a_torch_that_cannot_record_computes_what_needs_no_rules():
    done = subprocess.run([sys.executable, "-c", LACKING], capture_output=True, text=True, check=True)
    assert "recorded by torch.utils._python_dispatch.TorchDispatchMode, which torch" in done.stdout
