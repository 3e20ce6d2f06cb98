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
from collections.abc import Iterable

os.environ.pop("TRITON_INTERPRET", None)

import triton

from cs336_systems.kernels.disassembly import disassemble
from cs336_systems.kernels.inspection import compile_for
from tests.kernels import compile_triton


def by_cuobjdump(cubin: bytes) -> str:
    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        return subprocess.run([str(tool), "--dump-sass", str(path)], capture_output=True, text=True, check=True).stdout


def main(arguments: Iterable[str]) -> None:
    [capability] = map(int, arguments)
    kernels = (compile_triton.launch_of(f"swiglu_{way}", "float32", 1000) for way in ("forward", "backward"))
    cubins = [compile_for(capability, *kernel).cubin for kernel in kernels]
    alone = [disassemble(capability, [cubin])[0] for cubin in cubins]
    print(json.dumps([disassemble(capability, cubins), alone, [by_cuobjdump(cubin) for cubin in cubins]]))


if __name__ == "__main__":
    main(sys.argv[1:])
