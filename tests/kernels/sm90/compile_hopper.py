"""Compile the kernels for Hopper without one, and print what the compiler made of each as JSON.

Run in a separate process, because kernels defined under TRITON_INTERPRET cannot be compiled. The argument is a list of
cases, whose fields are the arguments of `compile_one`:

    python tests/kernels/sm90/compile_hopper.py '[{"name": "forward", "head_dim": 64, "band": "causal"}]'
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Iterable
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch

from cs336_systems.attention import variants
from cs336_systems.attention.mods import mask_mod, score_mod
from cs336_systems.kernels.call import BLOCK, NO_AUX, Aux, Call, Options, Wanted
from cs336_systems.kernels.inspection import Report, compile_for, rows_of
from cs336_systems.kernels.sm90 import launches, row_launches
from cs336_systems.kernels.sm90.backward import backward_kernel
from cs336_systems.kernels.sm90.forward import forward_kernel
from cs336_systems.kernels.sm90.pair_gradient_launch import PairGradients, pair_gradient_launch
from cs336_systems.kernels.sm90.pair_gradients import pair_gradient_kernel

BANDS = {"none": (None, None), "causal": (None, 0), "window": (100, 0)}
KERNELS = {"forward": forward_kernel, "pair_gradient": pair_gradient_kernel}
KERNELS |= dict.fromkeys(("backward", "backward_of_k", "backward_of_v"), backward_kernel)
SMS = 8
"""Few multiprocessors, so that CTAs claim several tiles."""


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def bent(score: torch.Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
    """A score_mod whose derivative needs the score."""
    return score.tanh() * (h + 1) - (q_idx - kv_idx).abs() * 0.1


def rooted(score: torch.Tensor, *place: Any) -> torch.Tensor:
    """A score_mod whose derivative is infinite at 0."""
    return score.abs().sqrt()


def spread(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
    """A mask_mod that compares, and combines bools, for each pair."""
    return (q_idx - kv_idx < 256) | ((q_idx - kv_idx) % 64 == 0)


def rules_of(name: str | None, length: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options and tensors of a mask, listed or not, of a score change, of sinks, or of dropout."""
    if name in (None, "sinks"):
        return {}, {} if name is None else {"sinks": empty(8)}
    if name == "dropout":
        return {"dropout_p": 0.1}, {"seed": empty(1, dtype=torch.int64)}
    ids, lists = (
        empty(2, length, dtype=torch.int32),
        empty(2, 1, length // BLOCK, 3 + length // BLOCK, dtype=torch.int32),
    )
    if name.startswith("document"):
        mask = variants.document(ids)
        listed = {"block_rows": lists, "block_columns": lists} if name == "document_listed" else {}
        return {"mask": mask.expression}, {"mask_aux": mask.tensors, **listed}
    if name == "spread":
        mask = mask_mod(spread)
        return {"mask": mask.expression}, {"block_rows": lists, "block_columns": lists}
    if name == "dense_mask":
        mask = variants.visible_where(empty(2, 1, length, length, dtype=torch.bool))
        return {"mask": mask.expression}, {"mask_aux": mask.tensors}
    scores = {
        "alibi": lambda: variants.alibi(empty(1, 8), 0),
        "bias": lambda: variants.bias(empty(1, 8, length, length, dtype=torch.bfloat16)),
        "float32_bias": lambda: variants.bias(empty(1, 8, length, length)),
        "relative_bias": lambda: variants.relative_bias(empty(8, 2 * length - 1)),
        "bent": lambda: score_mod(bent),
        "rooted": lambda: score_mod(rooted),
    }[name]()
    return {"scores": scores.expression}, {"score_aux": scores.tensors}


def call_of(
    d: int, dv: int, band: str, dtype: torch.dtype, softcap: float | None, length: int, is_packed: bool,
    deterministic: bool, rules: str | None,
) -> Call:  # fmt: skip
    """(2, 8, length, d) q, (2, 2, length, d) k and (2, 2, length, dv) v, or packed in a batch of one."""
    of_heads = (8, d), (2, d), (2, dv)
    q, k, v = (empty(1 if is_packed else 2, heads, length, columns, dtype=dtype) for heads, columns in of_heads)
    starts = empty(9, dtype=torch.int32)
    more, tensors = rules_of(rules, length)
    if is_packed:
        tensors |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    options = Options(0.1, *BANDS[band], softcap=softcap, deterministic=deterministic, **more)
    return Call(q, k, v, options, Aux(**tensors) if tensors else NO_AUX)


def compile_one(
    name: str,
    head_dim: int,
    band: str,
    dtype: str = "bfloat16",
    softcap: float | None = None,
    length: int = 8192,
    is_packed: bool = False,
    deterministic: bool = False,
    rules: str | None = None,
    v_head_dim: int | None = None,
) -> tuple[dict[str, Any], Report]:
    """Which kernel it is, and the report on it."""
    dims = head_dim, v_head_dim or head_dim
    call = call_of(*dims, band, getattr(torch, dtype), softcap, length, is_packed, deterministic, rules)
    workspace = empty(1, dtype=torch.int32)
    if name == "forward":
        launch = launches.forward_launch(call, call.q, empty(*call.q.shape[:-1]), workspace, SMS)
        exponentials = 64 * launch.constants["TILE_K"] // 128
    elif name == "pair_gradient":
        buffers, memory = row_launches.row_buffers(call), empty(row_launches.row_buffers(call).elements)
        wanted = Wanted(score_aux=(True,))
        [target] = PairGradients(call, buffers, wanted).new_targets(call.aux)
        launch = pair_gradient_launch(call, wanted, call.q, target, 0, buffers, memory, workspace, SMS)
        exponentials = 64 * launch.constants["TILE_K"] // 128
    else:
        buffers = row_launches.row_buffers(call)
        made = {"backward": (call.k, call.v), "backward_of_k": (call.k, None), "backward_of_v": (None, call.v)}[name]
        dout = empty(*call.q.shape[:-1], call.v_head_dim, dtype=call.dtype)
        launch = launches.backward_launch(call, dout, *made, buffers, empty(buffers.elements), workspace, SMS)
        exponentials = launch.constants["TILE_Q"] * launch.constants["TILE_K"] // 256
    about = {
        "pass": name,
        "head_dim": head_dim,
        "band": band,
        "dtype": dtype,
        "softcap": softcap,
        "packed": is_packed,
        "rules": rules,
        "exponentials": exponentials,  # of a thread, for a tile
    }
    return about, compile_for(90, KERNELS[name], launch)


def beside_a_product(sass: str) -> list[str]:
    """The instructions of the shortest stretch with exponentials between a wait that leaves products running and the
    next wait: the step most often taken, since others mask or rescale. Empty where every product is waited for first.
    """
    instructions = re.findall(r"/\*[0-9a-f]{4,6}\*/\s+(.*?);", sass)
    waits = [number for number, instruction in enumerate(instructions) if "WARPGROUP.DEPBAR" in instruction]
    stretches = [
        instructions[wait + 1 : following]
        for wait, following in itertools.pairwise(waits)
        if re.search(r"gsb0, 0x[12]\b", instructions[wait])
    ]
    return min((x for x in stretches if any("MUFU.EX2" in instruction for instruction in x)), key=len, default=[])


def details_of(report: Report) -> dict[str, int]:
    """What a kernel computes and spills while a product runs, the bits that LLVM gathers in integers, and the first
    mbarrier's address in shared memory.
    """
    step = beside_a_product(report.sass)
    offsets = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", report.ptx))
    barriers = re.findall(r"mbarrier\.init\S*\s+\[(%r\d+)\]", report.ptx)
    return {
        "exponentials_beside_a_product": sum("MUFU.EX2" in instruction for instruction in step),
        "gathered_bits": report.ptx.count("selp.b16"),
        "spills_beside_a_product": sum(bool(re.search(r"\b(STL|LDL)", instruction)) for instruction in step),
        "lowest_barrier": min(int(offsets.get(register, 0)) for register in barriers),
    }


def main(arguments: Iterable[str]) -> None:
    [cases] = arguments
    compiled = [compile_one(**case) for case in json.loads(cases)]
    rows = rows_of(compiled)
    print(json.dumps([row | details_of(report) for row, (_, report) in zip(rows, compiled, strict=True)]))


if __name__ == "__main__":
    main(sys.argv[1:])
