"""Kernels disassembled together are what they are alone, and what the tool that reads the whole file says they are."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from cs336_systems.kernels.disassembly import disassemble


def functions(text):
    """The names of the functions in a disassembly."""
    return re.findall(r"Function : (\w+)", text)


def instructions(text):
    """The addresses and the instructions in a disassembly, without their encodings."""
    return re.findall(r"/\*([0-9a-f]{4,6})\*/\s+([^;]*?)\s*;", text)


def names(text):
    """The instructions without their operands: those of branches depend on where a kernel begins."""
    return [instruction.split()[:1] for _, instruction in instructions(text)]


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_many_are_disassembled_at_once(compiled_by, capability):
    together, alone, by_cuobjdump = compiled_by("disassembled", str(capability))
    assert [instructions(text) for text in alone] == [instructions(text) for text in by_cuobjdump]
    assert [functions(text) for text in together] == [functions(text) for text in by_cuobjdump]
    assert [names(text) for text in together] == [names(text) for text in alone]
    addresses = [int(address, 16) for text in together for address, _ in instructions(text)]
    assert addresses == [*range(0, 16 * len(addresses), 16)]
    assert len(together) == 2
    assert min(map(len, alone)) > 1000


def test_what_is_no_machine_code_is_refused():
    with pytest.raises(ValueError, match="ELF files of 64 bits; got one that begins with b'text'"):
        disassemble(90, [b"text"])
