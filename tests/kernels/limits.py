"""What the portable kernels may spill and allocate, and which of ptxas's warnings they may have, by architecture."""

from __future__ import annotations

import triton

from cs336_systems.kernels import versions

# Bytes per thread that a kernel may spill, stores and loads together: by default, and by architecture, pass, precision
# and head dimension. More is allowed where the fastest rows spill more, with Triton 3.6 or 3.7, rounded up to multiples
# of 128.
SPILLS = 64
MORE_SPILLS: dict[str, dict[tuple[str, str, int], int]] = {
    "sm_80": {
        ("forward", "half", 128): 256,
        ("dkdv", "half", 64): 256,
        ("dkdv", "half", 128): 128,
        ("dq", "float32", 128): 128,
        ("dkdv", "float32", 256): 384,
    },
    "sm_86": {},
    "sm_90": {
        ("dkdv", "half", 64): 896,
        ("dkdv", "tf32", 64): 1280,
        ("dkdv", "half", 128): 384,
        ("dkdv", "tf32", 128): 384,
        ("dkdv", "half", 256): 1024,
        ("dkdv", "tf32", 256): 1024,
        ("forward", "float32", 256): 128,
        ("dq", "float32", 256): 128,
        ("dkdv", "float32", 32): 512,
        ("dkdv", "float32", 64): 384,
        ("dkdv", "float32", 128): 1024,
        ("dkdv", "float32", 256): 1152,
    },
    "sm_100": {("dkdv", "float32", 64): 128, ("dkdv", "float32", 256): 384},
}
# For rows of small grids, which spill more where that is faster.
SMALL_GRID_SPILLS = {("forward", "float32", 128): 256, ("dq", "float32", 128): 384, ("dkdv", "float32", 128): 1792}

# What Triton 3.8 and 3.9 may spill where that is more. Their PTX is the reason: 3.9's ptxas 13.4 spills no more of
# 3.6's PTX, and 3.6's ptxas 12.8 about as much of theirs (except float32's dkdv at 128: 956 bytes of 1,620).
if triton.__version__.startswith(versions.SINCE_3_8):
    MORE_SPILLS["sm_80"] |= {("forward", "half", 64): 128, ("dkdv", "float32", 256): 640}
    MORE_SPILLS["sm_86"] |= {("dkdv", "float32", 128): 128}
    MORE_SPILLS["sm_90"] |= {
        ("dkdv", "half", 64): 1152,
        ("dkdv", "tf32", 128): 512,
        ("forward", "float32", 256): 256,
        ("dq", "float32", 256): 256,
        ("dkdv", "float32", 128): 1664,
    }
    SMALL_GRID_SPILLS |= {("dq", "half", 128): 128, ("dq", "float32", 128): 512, ("dkdv", "float32", 128): 2560}
if triton.__version__.startswith("3.9."):
    MORE_SPILLS["sm_90"] |= {("dkdv", "float32", 128): 3328}  # the fastest of 19 that were timed

FEATURE_SPILLS = 256
"""With features; six times as much with all of them (1,316 for dQ with Triton 3.7)."""

SHARED_KIB = {"sm_80": 163, "sm_86": 99, "sm_90": 227, "sm_100": 227}
"""Shared memory that a program may allocate."""

# C7519: "warpgroup.arrive is injected to allow use of registers", which costs almost nothing. Its neighbours say that
# matrix instructions run one after another, or wait.
HARMLESS = r"\(C7519\)"

# C7515: a tile of the bias is transposed between matrix instructions, and so is dropout's mask where there are rules.
SERIALISED = {("bias", "dkdv", "half"), ("everything", "dkdv", "half"), ("everything", "dq", "half")}
