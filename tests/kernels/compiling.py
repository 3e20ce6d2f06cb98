"""Run the programs beside this file that compile kernels, as they are asked for, each in a fork of this process.

It has imported what they import, and has Triton's version of its compiler, which takes each of them seconds by itself.
A line of JSON on standard input is a program's name and its options; a line of JSON answers with its exit status, what
it printed, and what it said beside that.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import traceback
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

from triton.runtime.cache import triton_key

from tests.kernels import compile_cached, compile_hopper, compile_rows, compile_swiglu, compile_variants

PROGRAMS: dict[str, Any] = {
    "compile_cached.py": compile_cached,
    "compile_hopper.py": compile_hopper,
    "compile_rows.py": compile_rows,
    "compile_swiglu.py": compile_swiglu,
    "compile_variants.py": compile_variants,
}


def run(program: str, options: list[str]) -> tuple[int, str, str]:
    """The exit status of a program, and what it wrote to its two outputs."""
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as said:
        process = os.fork()
        if process == 0:
            status = 1
            with contextlib.suppress(BaseException):
                os.dup2(printed.fileno(), 1)
                os.dup2(said.fileno(), 2)
                status = _main(program, options)
            os._exit(status)
        _, ended = os.waitpid(process, 0)
        for file in (printed, said):
            file.seek(0)
        return os.waitstatus_to_exitcode(ended), printed.read(), said.read()


def _main(program: str, options: list[str]) -> int:
    try:
        PROGRAMS[program].main(options)
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    triton_key()
    for line in sys.stdin:
        print(json.dumps(run(*json.loads(line))), flush=True)
