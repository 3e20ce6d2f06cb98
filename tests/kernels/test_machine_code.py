"""Registers that nothing has written are found where they are used, and only there."""

from __future__ import annotations

import pytest

from cs336_systems.kernels.machine_code import unset_reads


def disassembly(*lines: str) -> str:
    """Lines as cuobjdump prints them, 16 bytes an instruction."""
    code = "".join(f"        /*{16 * number:04x}*/   {line} ;   /* 0x0000 */\n" for number, line in enumerate(lines))
    return f"Function : kernel\n{code}"


@pytest.mark.parametrize(
    ("lines", "culprit"),
    [
        pytest.param(["IADD3 R1, R2, 0x1, RZ"], "R2", id="a_register"),
        pytest.param(["UIADD3 UR18, UP0, UR18, 0x20, URZ"], "UR18", id="what_it_writes_itself"),
        pytest.param(["@P0 EXIT"], "EXIT", id="a_predicate"),
        pytest.param(["MOV R2, RZ", "R2P PR, R2, 0x60", "@P4 EXIT"], "EXIT", id="a_predicate_beside_others"),
        pytest.param(["LDC.64 R2, c[0x0][0x210]", "STG.E [R2.64], R4"], "STG", id="what_is_stored"),
        pytest.param(["LDC R2, c[0x0][0x210]", "LDG.E R4, [R2.64]"], "LDG", id="half_of_an_address"),
        pytest.param(["MOV R2, R3", "FADD R4, R2, R2"], "FADD", id="a_copy_that_is_used"),
        pytest.param(["HGMMA.64x16x16.F32 R8, gdesc[UR4], RZ, !UPT"], "HGMMA", id="descriptors"),
        pytest.param(
            ["ULDC.64 UR4, c[0x0][0x0]", "CS2R R4, SRZ", "CS2R R6, SRZ", "HGMMA.64x16x16.F32 R8, R4, gdesc[UR4], RZ"],
            "HGMMA",
            id="the_second_descriptor",
        ),
    ],
)
def test_what_no_path_has_written(lines, culprit):
    (found,) = unset_reads(disassembly(*lines))
    assert culprit in found


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(["MOV R2, 0x1", "IADD3 R1, R2, 0x1, RZ"], id="written_before"),
        pytest.param(["LDC.64 R2, c[0x0][0x210]", "LDG.E.128 R4, [R2.64]", "STG.E.128 [R2.64], R4"], id="in_one_go"),
        pytest.param(
            ["ISETP.NE.AND P0, PT, RZ, 0x1, PT", "@P0 MOV R2, 0x1", "FADD R3, R2, R2"], id="under_a_condition"
        ),
        pytest.param(["MOV R2, R3", "MOV R2, RZ", "FADD R4, R2, R2"], id="a_copy_that_is_overwritten"),
        pytest.param(["STL [R1], R3"], id="a_spill"),
        pytest.param(["S2R R0, SR_TID.X", "R2UR P1, UR10, R0", "@P1 UMOV UR4, UR10"], id="a_uniform_copy"),
        pytest.param(["ELECT P0, UR62, PT", "MOV R2, UR62", "@P0 STS [R2], R2"], id="who_is_elected"),
        pytest.param(
            ["MOV R2, RZ", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R2+URZ+0x10], R2", "@!P1 BRA 0x10"],
            id="a_barrier_that_is_asked",
        ),
        pytest.param(["PRMT R3, RZ, 0x7610, R3"], id="a_part_that_is_kept"),
        pytest.param(["MOV R2, RZ", "R2P PR, R2.B1, 0x60", "@P5 EXIT", "@P6 EXIT"], id="predicates_from_a_register"),
        pytest.param(["BRA 0x20", "FADD R3, R2, R2", "EXIT"], id="what_is_never_reached"),
        pytest.param(
            ["BRA 0x20", "FADD R3, R2, R2", "MOV R2, RZ", "ISETP.NE.AND P0, PT, RZ, R2, PT", "@P0 BRA 0x10", "EXIT"],
            id="written_further_down",
        ),
        pytest.param(
            [
                *("ULDC.64 UR6, c[0x0][0x0]", "CS2R R4, SRZ", "CS2R R6, SRZ"),
                *("HGMMA.64x16x16.F32 R8, R4, gdesc[UR4], RZ", "FADD R16, R8, R15"),
            ],
            id="the_descriptor_of_what_is_in_registers",
        ),
    ],
)
def test_what_some_path_has_written_or_nothing_uses(lines):
    assert unset_reads(disassembly(*lines)) == []


def test_every_function_starts_with_nothing():
    text = disassembly("MOV R2, RZ", "EXIT") + disassembly("FADD R3, R2, R2")
    assert len(unset_reads(text)) == 1
    assert unset_reads("") == []
