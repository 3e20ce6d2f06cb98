"""Compile SwiGLU's kernels for a GPU that need not be there, and print what became of them as JSON.

Run as a program of its own, because kernels defined under TRITON_INTERPRET cannot be compiled:

    python tests/kernels/compile_swiglu.py sm_90 --d-ff 3072 5120
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch

from cs336_systems.kernels import swiglu
from cs336_systems.kernels.inspection import Report, compile_for, rows_of

ROWS = 16384


def reports(capability: int, d_ff: int, dtype: torch.dtype) -> list[tuple[dict[str, Any], Report]]:
    """What became of both kernels."""
    gu, h = (torch.empty(ROWS, width, dtype=dtype, device="meta") for width in (2 * d_ff, d_ff))
    tensors = {swiglu.swiglu_forward_kernel: (gu, h), swiglu.swiglu_backward_kernel: (h, gu, gu, h)}
    about = {"d_ff": d_ff, "dtype": str(dtype)}
    return [
        ({"kernel": kernel.__name__, **about}, compile_for(capability, kernel, swiglu.launch_arguments(*those)))
        for kernel, those in tensors.items()
    ]


def main(arguments: Iterable[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architecture")
    parser.add_argument("--d-ff", nargs="+", type=int, default=[5120])
    options = parser.parse_args([*arguments])
    capability = int(options.architecture.removeprefix("sm_"))
    dtypes = torch.float16, torch.bfloat16, torch.float32
    found = [one for d_ff in options.d_ff for dtype in dtypes for one in reports(capability, d_ff, dtype)]
    print(json.dumps(rows_of(found)))


if __name__ == "__main__":
    main(sys.argv[1:])
