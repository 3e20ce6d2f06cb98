"""Compile kernels for a GPU that need not be there, and read what the compiler made of them.

The Triton wheel carries the assembler and disassembler, so registers, spills, warnings and machine code of every
configuration can be checked on a laptop. The kernels must not have been defined under TRITON_INTERPRET.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .disassembly import disassemble
from .launching import Launch
from .machine_code import unset_reads
from .versions import compiled_for, parameters_of

POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
    torch.uint8: "*u8",
}

MATRIX_INSTRUCTIONS = r"mma\.sync|wgmma\.mma_async|tcgen05\.mma"


@dataclass(frozen=True)
class Report:
    """What one compiled kernel uses: registers a thread, spilled bytes a thread, shared bytes a program."""

    registers: int
    spill_stores: int
    spill_loads: int
    shared: int
    warnings: tuple[str, ...]
    ptx: str
    cubin: bytes
    capability: int

    @functools.cached_property
    def sass(self) -> str:
        """The machine code, disassembled."""
        return disassemble(self.capability, [self.cubin])[0]

    @property
    def has_known_instructions(self) -> bool:
        """Whether `machine_code` knows them, which it does not of Blackwell's."""
        return self.capability < 100

    def as_row(self) -> dict[str, Any]:
        """What the assembler reports of the kernel, and what its code shows, as JSON values."""
        return {
            "registers": self.registers,
            "spilled": self.spill_stores + self.spill_loads,
            "shared": self.shared,
            "warnings": list(self.warnings),
            "multiplies": re.search(MATRIX_INSTRUCTIONS, self.ptx) is not None,
            "stores": any(way in self.ptx for way in ("st.global", "red.global", "cp.reduce.async.bulk")),
            "reads_single_elements": "ld.global.b16" in self.ptx,
            "starts_early": "griddepcontrol.wait" in self.ptx,
            "unset_reads": unset_reads(self.sass) if self.has_known_instructions else [],
        }


def rows_of(reports: Iterable[tuple[dict[str, Any], Report]]) -> list[dict[str, Any]]:
    """The rows of reports, each behind what is said of its kernel; they are disassembled together."""
    found = [*reports]
    for capability in {report.capability for _, report in found if report.has_known_instructions}:
        alike = [report for _, report in found if report.capability == capability]
        for report, sass in zip(alike, disassemble(capability, [report.cubin for report in alike]), strict=True):
            vars(report)["sass"] = sass
    return [{**about, **report.as_row()} for about, report in found]


def compile_for(capability: int, kernel: Any, launch: Launch) -> Report:
    """Compile a launch, of tensors on any device, for a compute capability such as 90, as if they were aligned."""
    signature: dict[str, Any] = {}
    constant_values: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    runtime = (*launch.tensors, *launch.arguments)
    parameters = parameters_of(kernel)
    values = (*runtime, *[launch.constants[name] for name, _, _ in parameters[len(runtime) :]])
    for position, ((name, is_constant, specialise), value) in enumerate(zip(parameters, values, strict=True)):
        kind = "constexpr" if is_constant else None
        signature[name] = _specialise(value, (position,), kind, specialise, constant_values, attributes)
    said = io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(said):
        knobs.nvidia.dump_ptxas_log = True
        # What is in Triton's cache is not assembled, and then the assembler says nothing.
        knobs.compilation.always_compile = True
        described = signature, constant_values, attributes
        compiled = compiled_for(capability, kernel, described, launch.compile_options)
    log = said.getvalue()
    return Report(
        registers=_number(r"Used (\d+) registers", log),
        spill_stores=_number(r"(\d+) bytes spill stores", log),
        spill_loads=_number(r"(\d+) bytes spill loads", log),
        shared=compiled.metadata.shared,
        warnings=tuple(
            line
            for line in log.splitlines()
            if re.search(r"C75\d\d|warning", line)
            and "'regAllocOptLevel'" not in line  # given twice: `compile_options`
        ),
        ptx=compiled.asm["ptx"],
        cubin=compiled.asm["cubin"],
        capability=capability,
    )


def _specialise(
    value: Any,
    path: tuple[int, ...],
    kind: str | None,
    specialise: bool,
    constants: dict[tuple[int, ...], Any],
    attributes: dict[tuple[int, ...], list[list[Any]]],
) -> Any:
    """The type Triton's launch would give an argument: constants folded, multiples of 16 marked."""
    if isinstance(value, tuple) and kind is None:
        return tuple(
            _specialise(item, (*path, index), None, specialise, constants, attributes)
            for index, item in enumerate(value)
        )
    if kind == "constexpr" or value is None or (specialise and isinstance(value, int) and value == 1):
        constants[path] = value
        return "constexpr"
    if isinstance(value, torch.Tensor):
        attributes[path] = [["tt.divisibility", 16]]
        return POINTERS[value.dtype]
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{POINTERS[value.base.dtype][1:]}{value.block_shape},{value.layout!r}>"
    if isinstance(value, float):
        return "fp32"
    if specialise and value % 16 == 0:
        attributes[path] = [["tt.divisibility", 16]]
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the assembler's report must match {pattern!r}; got {text!r}")
    return int(found[1])
