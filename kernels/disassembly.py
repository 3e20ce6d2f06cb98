"""Machine code as text, of many kernels at once: the disassembler takes half a second to start, and little for each.

It reads code without the file around it. What that file, an ELF, says of itself is in its headers: the formats of
section headers are those of elf(5), and a kernel's code is in a section that is named after it.
"""

from __future__ import annotations

import pathlib
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence

from .versions import DISASSEMBLER

_CODE = ".text."
_ADDRESS = re.compile(r"\s*/\*([0-9a-f]+)\*/")


def disassemble(capability: int, cubins: Sequence[bytes]) -> list[str]:
    """The instructions of each cubin, a line each, behind ``Function :`` and the name of the kernel.

    Addresses, and where branches go, are counted from the first kernel's first instruction.

    Args:
        capability: the compute capability that all of them were compiled for, such as 90.
        cubins: what the assembler made.

    Raises:
        ValueError: one of them is no ELF file of 64 bits.
        subprocess.CalledProcessError: the disassembler does not know the architecture, or the code.
    """
    functions = [[*_functions(cubin)] for cubin in cubins]
    lines = _lines_of(capability, b"".join(code for those in functions for _, code in those))
    texts = []
    position = end = 0
    for those in functions:
        text = []
        for name, code in those:
            end += len(code)
            begin = position
            while position < len(lines) and lines[position][0] < end:
                position += 1
            text += [f"Function : {name}", *(line for _, line in lines[begin:position])]
        texts.append("\n".join(text))
    return texts


def _lines_of(capability: int, code: bytes) -> list[tuple[int, str]]:
    """The lines of an address and an instruction, with the address."""
    architecture = f"SM{capability}{'a' if capability >= 90 else ''}"
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "code")
        path.write_bytes(code)
        command = [str(DISASSEMBLER), "--no-dataflow", "--binary", architecture, str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = ((_ADDRESS.match(line), line) for line in text.splitlines())
    return [(int(match[1], 16), line) for match, line in found if match]


def _functions(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """The name and the code of each function in an ELF file."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError(f"cubins must hold ELF files of 64 bits; got one that begins with {cubin[:5]!r}")
    (headers,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, headers + number * size) for number in range(count)]
    names = sections[of_names][4]
    for name_at, _, _, _, begin, length in sections:
        name = cubin[names + name_at : cubin.index(b"\0", names + name_at)].decode()
        if name.startswith(_CODE):
            yield name.removeprefix(_CODE), cubin[begin : begin + length]
