"""Run the programs of this folder that compile kernels, each in a fork of this process.

It has imported Triton and hashed its compiler, which takes seconds. A line of JSON on standard input is a number, the
module of a program in this folder, and its arguments; a line of JSON answers with the number, its exit status, what it
printed, and its errors.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import tempfile
import traceback

os.environ.pop("TRITON_INTERPRET", None)

from triton.runtime.cache import triton_key

import cs336_systems.attention


def run(program: str, arguments: list[str]) -> tuple[int, str, str]:
    """The exit status of a program, and its two outputs."""
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
        process = os.fork()
        if process == 0:
            status = 1
            with contextlib.suppress(BaseException):
                os.dup2(printed.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                status = _main(program, arguments)
            os._exit(status)
        _, ended = os.waitpid(process, 0)
        for file in (printed, errors):
            file.seek(0)
        return os.waitstatus_to_exitcode(ended), printed.read(), errors.read()


def _main(program: str, arguments: list[str]) -> int:
    try:
        importlib.import_module(f"tests.kernels.{program}").main(arguments)
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    assert cs336_systems.attention
    triton_key()
    # A fork ends before garbage matters; to look for cycles is a tenth of the time in which it compiles.
    gc.disable()
    for line in sys.stdin:
        number, *question = json.loads(line)
        print(json.dumps([number, *run(*question)]), flush=True)
