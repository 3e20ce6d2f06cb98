"""Disassemble kernels together, one by one, and by the tool that reads the file around them; print them all as JSON.

python tests/kernels/disassembled.py 90
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton

from cs336_systems.kernels.disassembly import disassemble
from tests.kernels import compile_swiglu


def by_cuobjdump(cubin: bytes) -> str:
    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        return subprocess.run([str(tool), "--dump-sass", str(path)], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    capability = int(sys.argv[1])
    cubins = [report.cubin for _, report in compile_swiglu.reports(capability, 1000, torch.float32)]
    alone = [disassemble(capability, [cubin])[0] for cubin in cubins]
    print(json.dumps([disassemble(capability, cubins), alone, [by_cuobjdump(cubin) for cubin in cubins]]))
