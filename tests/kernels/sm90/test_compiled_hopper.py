"""The kernels for Hopper, compiled without one: spills, warnings, and products that overlap exponentials."""

from __future__ import annotations

import itertools
import json
import re

import pytest
import triton

from cs336_systems.kernels.sm90.tiles import BACKWARD, FORWARD_SPLIT, HEAD_DIMS, SHORT_LENGTH
from cs336_systems.kernels.versions import SINCE_3_8, why_not_gluon

SHARED_MEMORY = 227 * 1024
BARRIER_BYTES = 512
"""The last of a kernel's shared memory: mbarriers, and numbers that warps pass to each other."""

SPILLED = {
    ("forward", 64): 24,  # with a soft cap, and Triton 3.7, outside of its loops
    ("forward", 80): 120,
    ("forward", 96): 120,
    ("forward", 128): 120,
    ("forward", 192): 130,
    ("forward", 256): 250,
    ("forward", 512): 340,  # of packed sequences; else 288
    ("backward", 64): 1200,
    ("backward", 96): 16,  # with a soft cap, and Triton 3.7
    ("backward", 128): 800,
    ("backward", 192): 1300,  # with a soft cap, and of packed sequences with Triton 3.8; else 700
    ("backward", 256): 700,
    ("backward_of_k", 512): 700,  # with a soft cap; else 240, with Triton 3.9
    ("backward_of_v", 512): 400,  # of packed sequences; else 100
    ("pair_gradient", 128): 28,
}
"""Bytes a thread, stores and loads together, by pass and head dimension, but few beside exponentials.

Else eight; and 120 at least for packed sequences, most of them the producer's.
"""

SPILLED_WITH_RULES = {"forward": 500} | dict.fromkeys(("backward", "backward_of_k", "backward_of_v"), 2100)
"""The same where scores change or a mask hides pairs. The backward of latent attention's heads with a curved score
change has the most, with Triton 3.8."""

SPILLED_WITH_DROPOUT = {
    ("forward", 64): 300,
    ("forward", 128): 500,
    ("forward", 256): 1200,
    ("backward", 64): 200,
    ("backward", 96): 200,
    ("backward", 128): 200,
    ("backward", 192): 700,
    ("backward", 256): 200,
    ("backward_of_k", 512): 1200,
    ("backward_of_v", 512): 500,
}
"""The same with dropout and no mask."""

MASKS = "document_listed", "spread", "dense_mask"
MOST_GATHERED = 12
"""Bits that LLVM puts into integers in a kernel with a mask; of its comparisons it would be a hundred or more."""

HARMLESS = r"\(C7519\)"
SERIALIZED = r"\(C7512\)"
"""ptxas lacks registers, and has products wait for one another."""
LATENT_DROPOUT = {("backward", 192): 2900} if triton.__version__.startswith(SINCE_3_8) else {}
"""With Triton 3.8 and 3.9 the backward of latent attention's heads with dropout does that, and spills so many bytes."""


def problems(rows):
    for row in rows:
        name = row["pass"], row["head_dim"], row["band"], row["dtype"], row["softcap"], row["packed"], row["rules"]
        with_rules = SPILLED_WITH_RULES.get(row["pass"], 0) if row["rules"] else 0
        if row["rules"] == "dropout":
            with_rules = (SPILLED_WITH_DROPOUT | LATENT_DROPOUT)[name[:2]]
        if row["spilled"] > max(SPILLED.get(name[:2], 8), 120 if row["packed"] else 8, with_rules):
            yield f"{name} spills {row['spilled']} bytes"
        if row["shared"] > SHARED_MEMORY:
            yield f"{name} needs {row['shared']} bytes of shared memory"
        if row["lowest_barrier"] < row["shared"] - BARRIER_BYTES:
            yield f"{name} has a barrier at {row['lowest_barrier']}, where tiles lie: nobody waits for it"
        if not row["multiplies"] or not row["stores"]:
            yield f"{name} computes nothing"
        if row["gathered_bits"] > MOST_GATHERED and row["rules"] in MASKS and row["pass"] in ("forward", "backward"):
            yield f"{name} gathers {row['gathered_bits']} bits of comparisons in integers"
        if row["unset_reads"]:
            yield f"{name} reads registers that nothing has written: {row['unset_reads']}"
        is_serialized = row["rules"] == "dropout" and name[:2] in LATENT_DROPOUT
        harmless = f"{HARMLESS}|{SERIALIZED}" if is_serialized else HARMLESS
        yield from (f"{name}: {warning}" for warning in row["warnings"] if not re.search(harmless, warning))
        # Two registers with a soft cap, and with Triton 3.9 for packed sequences with split head dimensions; three of
        # the backward at 128, which loads lse2 and delta early; of that at 192 six with Triton 3.8, and 14
        # with a soft cap.
        has_packed_tails = row["packed"] and row["head_dim"] not in HEAD_DIMS
        in_the_loop = {("backward", 128): 3, ("backward", 192): 6 if row["softcap"] is None else 14}.get(
            name[:2], 2 * (row["softcap"] is not None or has_packed_tails)
        )
        if row["spills_beside_a_product"] > in_the_loop and (row["pass"] == "forward" or not row["rules"]):
            yield f"{name} spills in its innermost loop"
        # Unless something prevents it, ptxas moves the wait for a product above exponentials, and nothing overlaps.
        # The backward at 64 is faster so: its many ones mix with dS. With a soft cap at 128 it lacks registers, and
        # with Triton 3.8 overlaps nothing.
        overlaps = (
            row["pass"] == "forward" or row["head_dim"] in (96, 256) or (row["head_dim"], row["softcap"]) == (128, None)
        ) and (row["pass"] == "forward" or not row["rules"])
        if overlaps and row["exponentials_beside_a_product"] < row["exponentials"]:
            yield f"{name} computes {row['exponentials_beside_a_product']} exponentials while a product runs"


for_a_known_triton = pytest.mark.skipif(
    why_not_gluon() is not None, reason="this version of Triton is not one that the kernels are written for"
)


every_triton = [pytest.mark.every_triton, pytest.mark.slow]
TAILS = {columns + tail for columns, tail, _ in FORWARD_SPLIT}


def cases_of(name, dim):
    """The usual case of a pass and a head dimension, and all others, as `compile_hopper.compile_one` takes them."""
    usual = {"name": name, "head_dim": dim}
    if (name, dim) == ("backward", 192):
        usual["v_head_dim"] = 128
    causal, unmasked, window = (usual | {"band": band} for band in ("causal", "none", "window"))
    packed = causal | {"is_packed": True}
    others = [unmasked, causal | {"softcap": 5.0}, packed]
    if name == "backward" and dim == 192:
        others.append(causal | {"band": "window", "deterministic": True, "dtype": "float16"})
        wide = [causal, packed, causal | {"softcap": 5.0}, causal | {"rules": "document_listed"}]
        others += [case | {"v_head_dim": 192} for case in wide]
    elif name == "backward" and dim == 96:
        others.append(window | {"deterministic": True, "dtype": "float16"})
        others.append(causal | {"v_head_dim": 64})
    elif dim in TAILS:
        short = causal | {"length": SHORT_LENGTH}
        others = [*[short] * (dim in (80, 96)), *[unmasked] * (dim == 192), *[packed] * (dim in (80, 192))]
        if dim == 192:
            latent = [unmasked, packed, window, causal | {"rules": "document_listed"}]
            others += [case | {"v_head_dim": 128} for case in latent]
    elif dim == 128:
        # float16 changes products, packing where rows lie, and determinism waits: the limits are the same together.
        others = [unmasked, causal | {"softcap": 5.0}, packed | {"dtype": "float16"}, window]
        if name == "backward":
            others[-1] |= {"deterministic": True}
    elif (name, dim) == ("forward", 64):
        others.append(unmasked | {"length": SHORT_LENGTH})
    # The masks' own code does not depend on the head dimension: above 128 one of them stands for both.
    kinds = ("document_listed", *["spread"] * (dim <= 128), "bent")
    rules = [causal | {"rules": kind} for kind in kinds]
    rules += [packed | {"rules": "document_listed"}] * (dim in (64, 128))
    more_rules = [unmasked | {"rules": "alibi"}]
    more_rules += [causal | {"rules": kind} for kind in ("relative_bias", "sinks") if name == "forward"]
    more_rules += [causal | {"rules": "rooted"}] * (name == "backward" and dim <= 128)
    pairs = [causal | {"rules": kind} for kind in ("bias", "float32_bias")]
    walks = ("relative_bias", "alibi") if name == "pair_gradient" else ("dense_mask",)
    pairs += [causal | {"rules": kind} for kind in walks]
    return {
        "plain": [causal],
        "others": others,
        "rules": rules,
        "dropout": [unmasked | {"rules": "dropout"}],
        "more_rules": more_rules,
        "pairs": pairs,
    }


@for_a_known_triton
@pytest.mark.parametrize(
    ("passes", "dims", "cases"),
    [
        pytest.param("forward backward", {64}, "plain", marks=pytest.mark.every_triton),
        pytest.param("forward backward", {128}, "plain", marks=every_triton),
        *[pytest.param("forward", dims, "others", marks=pytest.mark.slow) for dims in ({64}, {128})],
        *[pytest.param("backward", dims, "others", marks=pytest.mark.slow) for dims in ({64}, {128})],
        *[pytest.param(name, {256}, "plain others", marks=pytest.mark.slow) for name in ("forward", "backward")],
        *[pytest.param("forward", {dim}, "plain others", marks=pytest.mark.slow) for dim in sorted(TAILS)],
        pytest.param("backward_of_k backward_of_v", {512}, "plain", marks=every_triton),
        pytest.param("backward_of_k backward_of_v", {512}, "others rules dropout", marks=pytest.mark.slow),
        pytest.param("backward", {96}, "plain", marks=every_triton),
        pytest.param("backward", {96}, "others rules dropout more_rules pairs", marks=pytest.mark.slow),
        pytest.param("backward", {192}, "plain", marks=every_triton),
        pytest.param("backward", {192}, "others", marks=pytest.mark.slow),
        pytest.param("backward", {192}, "rules dropout more_rules pairs", marks=pytest.mark.slow),
        pytest.param("forward backward", {64}, "rules", marks=every_triton),
        pytest.param("backward", {64}, "dropout", marks=every_triton),
        pytest.param("forward", {64}, "dropout", marks=pytest.mark.slow),
        pytest.param("forward backward", {128}, "rules", marks=pytest.mark.slow),
        pytest.param("forward backward", {128}, "dropout more_rules", marks=pytest.mark.slow),
        pytest.param("forward backward", {256}, "rules dropout", marks=pytest.mark.slow),
        # Tiles of pairs leave little shared memory.
        pytest.param("forward backward pair_gradient", {64}, "pairs", marks=pytest.mark.slow),
        pytest.param("forward backward pair_gradient", {128}, "pairs", marks=every_triton),
        pytest.param("forward", {192, 256}, "pairs", marks=pytest.mark.slow),
    ],
)
def test_kernels_compile(compiled_by, passes, dims, cases):
    made = [cases_of(name, dim) for name in passes.split() for dim in dims]
    asked = [case for both in made for kind in cases.split() for case in both[kind]]
    rows = compiled_by("sm90.compile_hopper", json.dumps(asked))
    assert {(row["pass"], row["head_dim"]) for row in rows} == {*itertools.product(passes.split(), dims)}
    found = [*problems(rows)]
    assert not found, "\n".join(found)


def test_every_head_dimension_is_compiled():
    assert {*HEAD_DIMS, 96, 192, 512} == {*BACKWARD}


def test_problems_are_found():
    row = {"pass": "forward", "head_dim": 128, "band": "none", "dtype": "bfloat16", "softcap": None}
    row |= {
        "rules": None,
        "packed": False,
        "spilled": 0,
        "shared": 1024,
        "lowest_barrier": SHARED_MEMORY,
        "multiplies": True,
    }
    row |= {"stores": True, "unset_reads": [], "warnings": [], "exponentials": 64}
    row |= {"gathered_bits": 0, "exponentials_beside_a_product": 64, "spills_beside_a_product": 0}
    assert not [*problems([row])]
    faults = {"spilled": 121, "shared": SHARED_MEMORY + 1, "multiplies": False, "stores": False, "unset_reads": ["R0"]}
    faults |= {"lowest_barrier": 0, "warnings": ["(C7512)"], "spills_beside_a_product": 1}
    faults |= {"exponentials_beside_a_product": 0}
    for fault, value in faults.items():
        assert len([*problems([row | {fault: value}])]) == 1, fault
    assert len([*problems([row | {"rules": "dense_mask", "gathered_bits": 200}])]) == 1
