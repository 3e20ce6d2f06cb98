"""Registers that machine code reads though nothing has written them.

ptxas 12.8 has compiled forward kernels whose matrix instructions took the address of a tile from such a register:
whatever happened to be there. Only the code shows it; the assembler does not warn.

The analysis follows every path from a kernel's start and collects what may have been written. A register is unset where
it is read and no path has written it. What copies an unset register is not reported, what uses the copy is: ptxas moves
copies ahead of the branch that decides whether they are needed, and spills registers that are half written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(?:@!?(U?P(?:\d|T))\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_REGISTER = re.compile(r"(?<![\w.])(UR|R|UP|P)(\d+)(?!\w)")
_PREDICATE = re.compile(r"U?P(\d|T)")
_TARGET = re.compile(r"0x([0-9a-f]+)")

# Where the registers of each kind begin in a set, which is an integer with a bit for each.
_FIRST_BIT = {"R": 0, "UR": 256, "P": 320, "UP": 328}

_WRITES_NOTHING = {
    *("ST", "STG", "STS", "STL", "STSM", "RED", "REDG", "LDGSTS", "UTMALDG", "UTMASTG", "CCTL", "CCTLL", "MEMBAR"),
    *("BAR", "BRA", "BREAK", "BSSY", "BSYNC", "CALL", "RET", "EXIT", "JMP", "KILL", "WARPSYNC", "WARPGROUP"),
    *("DEPBAR", "LDGDEPBAR", "ARRIVES", "ERRBAR", "FENCE", "NANOSLEEP", "NOP", "BPT"),
}
_MAY_CARRY_OUT = {"IADD3", "UIADD3", "LOP3", "ULOP3", "IMAD", "UIMAD", "LEA", "ULEA", "VOTE", "VOTEU", "SHF", "FCHK"}
_COMPARISONS = {"ISETP", "FSETP", "HSETP2", "DSETP", "UISETP", "PLOP3", "UPLOP3"}
_KEEPS_A_PART = {"PRMT", "LOP3"}
"""They may read what they write, and keep those bits of it that do not matter yet."""


class Instruction(NamedTuple):
    """One line of disassembly."""

    address: int
    predicate: str | None
    operation: str
    operands: tuple[str, ...]

    @property
    def name(self) -> str:
        """The operation without its modifiers."""
        return self.operation.split(".")[0]

    @property
    def always(self) -> bool:
        """Whether it is executed whenever it is reached."""
        return self.predicate in (None, "PT", "UPT")

    @property
    def copies(self) -> bool:
        """Whether it does nothing but copy a register, perhaps to the stack."""
        return self.name == "STL" or (self.always and self.operation.startswith(("MOV", "UMOV", "IMAD.MOV")))

    def __str__(self) -> str:
        return f"{self.address:x}: {self.operation} {', '.join(self.operands)}"


def unset_reads(sass: str) -> list[str]:
    """The instructions of a disassembly that read a register which no path before them has written.

    Each function begins with ``Function :``. Addresses are counted from its first instruction.
    """
    return [found for function in sass.split("Function :")[1:] for found in _unset_reads(_parse(function))]


def _unset_reads(code: list[Instruction]) -> list[str]:
    following = list(_successors(code))
    writes, reads = zip(*map(_registers, code), strict=True) if code else ((), ())
    reached: dict[int, int] = {0: 0}
    waiting = [0] if code else []
    while waiting:
        position = waiting.pop()
        before = reached[position]
        unset_copy = code[position].copies and reads[position] & ~before
        after = before & ~writes[position] if unset_copy else before | writes[position]
        for successor in following[position]:
            known = reached.get(successor)
            if known is None or after & ~known:
                reached[successor] = after | (known or 0)
                waiting.append(successor)
    return [
        str(instruction._replace(address=instruction.address - code[0].address))
        for position, instruction in enumerate(code)
        if position in reached and reads[position] & ~reached[position] and not instruction.copies
    ]


def _parse(text: str) -> list[Instruction]:
    return [
        Instruction(int(address, 16), predicate, operation, tuple(_split(operands)))
        for address, predicate, operation, operands in (match.groups() for match in _INSTRUCTION.finditer(text))
    ]


def _split(operands: str) -> Iterator[str]:
    """The operands, separated by the commas that are not inside of brackets."""
    yield from (part.strip() for part in re.split(r",(?![^\[({]*[\])}])", operands) if part.strip())


def _successors(code: list[Instruction]) -> Iterator[list[int]]:
    """Where each instruction may go on, as positions."""
    positions = {instruction.address: position for position, instruction in enumerate(code)}
    for position, instruction in enumerate(code):
        conditional = not instruction.always or any(map(_PREDICATE.fullmatch, instruction.operands))
        ends = (
            instruction.name in ("EXIT", "RET", "BRA", "JMP") and not conditional and "DIV" not in instruction.operation
        )
        targets = []
        if instruction.name in ("BRA", "JMP", "CALL"):
            addresses = (int(found, 16) for found in _TARGET.findall(instruction.operands[-1]))
            targets = [positions[address] for address in addresses if address in positions]
        if not ends and position + 1 < len(code):
            targets.append(position + 1)
        yield targets


def _registers(instruction: Instruction) -> tuple[int, int]:
    """The sets of registers that an instruction writes and reads."""
    written = read = 0
    if not instruction.always:
        read |= _bits(str(instruction.predicate), 1)
    results = _results(instruction)
    for number, operand in enumerate(instruction.operands):
        for kind, index in _REGISTER.findall(operand):
            if number < results and "[" not in operand:
                written |= _bits(kind + index, _width_written(instruction) if kind in ("R", "UR") else 1)
            else:
                read |= _read_bits(instruction, number, operand, kind, int(index))
    if instruction.name == "R2P":  # the predicates of a mask
        written |= int(instruction.operands[2], 16) << _FIRST_BIT["P"]
    if instruction.name in _KEEPS_A_PART:
        read &= ~written
    return written, read


def _results(instruction: Instruction) -> int:
    """How many of the first operands are results: predicates may follow the register, or a second predicate."""
    name, operands = instruction.name, instruction.operands
    if name in _WRITES_NOTHING or not operands:
        return 0
    if name in ("SHFL", "ELECT") or name in _COMPARISONS:
        return 2
    if name in ("LOP3", "ULOP3", "R2UR") and _PREDICATE.fullmatch(operands[0]):
        return 2
    count = 1
    if name in _MAY_CARRY_OUT:
        while count < min(3, len(operands)) and _PREDICATE.fullmatch(operands[count]):
            count += 1
    return count


def _width_written(instruction: Instruction) -> int:
    """How many registers in a row a result takes."""
    name, modifiers = instruction.name, instruction.operation.split(".")
    if name == "HGMMA":
        columns = int(modifiers[1].split("x")[1])
        return columns // 2 if "F32" in modifiers else columns // 4
    if name == "HMMA":
        return 4 if "F32" in modifiers else 2
    if name == "LDSM":
        return int(modifiers[-1]) if modifiers[-1].isdigit() else 1
    if "128" in modifiers:
        return 4
    wide = "WIDE" in modifiers or ("64" in modifiers and name not in ("SHF", "USHF", "ISETP"))
    return 2 if wide or (name == "CS2R" and "32" not in modifiers) else 1


def _read_bits(instruction: Instruction, number: int, operand: str, kind: str, index: int) -> int:
    name = instruction.name
    if "gdesc" in operand:
        # Two descriptors of tiles in shared memory; of the first nothing is read if its operand is in registers.
        in_registers = not instruction.operands[1].startswith("gdesc")
        return _bits(f"{kind}{index + 2 * in_registers}", 2 if in_registers else 4)
    if "desc[" in operand and kind == "UR":
        return _bits(f"{kind}{index}", 2)
    width = 2 if f"{kind}{index}.64" in operand else 1
    if name == "HMMA" and number > 0:
        width = 2 if number == 2 else 4
    if name == "HGMMA" and number == 1:
        width = 4
    if name in ("ST", "STG", "STS", "STL") and number == len(instruction.operands) - 1:
        modifiers = instruction.operation.split(".")
        width = 4 if "128" in modifiers else 2 if "64" in modifiers else 1
    return _bits(f"{kind}{index}", width)


def _bits(register: str, width: int) -> int:
    """The set of so many registers from this one on."""
    kind = register.rstrip("0123456789")
    return ((1 << width) - 1) << (_FIRST_BIT[kind] + int(register[len(kind) :]))
