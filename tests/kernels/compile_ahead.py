"""Compile the kernels of a backward in the background for a GPU that is not there, then all that forward and backward
launch, and print as JSON the names of what was compiled at either time, and of launchers built in the background. Also
whether sympy was imported, which takes as long as to compile a kernel.

A separate program, because kernels defined under TRITON_INTERPRET cannot be compiled:

    python tests/kernels/compile_ahead.py sm90 '{"dtype": "bfloat16", "d": 64}'
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from contextlib import nullcontext
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget

from cs336_systems.attention import variants
from cs336_systems.kernels import launching
from cs336_systems.kernels.call import Aux, Call, Options
from cs336_systems.kernels.launching import Launch
from cs336_systems.kernels.sm90 import backend as sm90
from cs336_systems.kernels.triton import backend as portable
from cs336_systems.kernels.triton import halves, plans, tiles

CPU = torch.device("cpu")


class Driver:
    """What Triton asks a driver when it compiles."""

    def __init__(self) -> None:
        self.launchers: list[str] = []

    def launcher_cls(self, src: Any, metadata: Any) -> None:
        self.launchers.append(src.name)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


class Compiler(launching.Launcher):
    """Compiles what a launcher would run."""

    def __call__(self, operands: tuple[Any, ...], describe: Callable[..., Launch], *described: Any) -> None:
        wait(launching._in_background.get(self._kernel, ()))
        describe(*described).compile(self._kernel, CPU)


def call_of(dtype: str, d: int, feature: str = "causal", return_lse: bool = False) -> Call:
    """(2, 4, 200, d) q and (2, 2, 200, d) k and v, or packed, which may need gradients."""
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    batch = 1 if feature == "packed" else 2
    q, k, v = (torch.zeros(batch, heads, 200, d, dtype=getattr(torch, dtype, torch.float32)) for heads in (4, 2, 2))
    options, aux = Options(0.1, window_right=0), Aux()
    if feature == "packed":
        starts = torch.tensor([0, 90, 200], dtype=torch.int32)
        aux = Aux(cu_seqlens_q=starts, cu_seqlens_k=starts.clone())
    if feature == "slopes":
        slopes = torch.ones(1, 4, requires_grad=True)
        options = options._replace(scores=variants.alibi(slopes, 0).expression)
        aux = Aux(sinks=torch.zeros(4, requires_grad=True), score_aux=(slopes,))
    if feature == "bias":
        bias = torch.ones(1, 4, 200, 200, dtype=q.dtype, requires_grad=True)
        options = options._replace(scores=variants.bias(bias).expression)
        aux = Aux(score_aux=(bias,))
    return Call(q, k, v, options, aux, return_lse)


def main(arguments: Iterable[str]) -> None:
    family, case = arguments
    backend: Any = {"sm90": sm90, "triton": portable}[family]
    driver = Driver()
    triton.runtime.driver.set_active(driver)
    compiled: list[str] = []
    triton.knobs.compilation.listener = lambda *, src, **_: compiled.append(src.name)
    torch.cuda.device = lambda device: nullcontext()  # type: ignore[assignment, return-value]
    tiles.architecture_of = lambda device: "sm_90"  # type: ignore[assignment]
    sm90.workspace_for = lambda device, tiles: torch.zeros(1 + tiles, dtype=torch.int32)  # type: ignore[assignment]
    for module in (launching, plans, halves):
        module.Launcher = Compiler
    with tempfile.TemporaryDirectory() as empty_cache, triton.knobs.cache.scope():
        triton.knobs.cache.dir = empty_cache
        call = call_of(**json.loads(case))
        q, k, v, aux = call.q, call.k, call.v, call.aux
        backend.compile_backward(call)
        wait([future for futures in launching._in_background.values() for future in futures])
        ahead, launchers = [*compiled], sorted(driver.launchers)
        out, lse = backend.plan_forward(call)(q, k, v, aux)
        of_forward = compiled[len(ahead) :]
        dlse = torch.ones_like(lse) if call.return_lse else None
        backend.plan_backward(call, out, out, call.return_lse, call.wanted)(q, k, v, out, lse, out, dlse, aux)
    late = compiled[len(ahead) + len(of_forward) :]
    row = {
        "ahead": sorted(ahead),
        "of_forward": sorted(of_forward),
        "late": late,
        "launchers": launchers,
        "sympy": "sympy" in sys.modules,
    }
    print(json.dumps([row]))


if __name__ == "__main__":
    main(sys.argv[1:])
