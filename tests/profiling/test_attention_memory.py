"""The account of attention's memory, against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.attention import attention
from cs336_systems.profiling import AttentionSizes, memory_account, training_memory

MIB = 2**20


def test_the_account_of_the_course_s_longest_sweep_row():
    # 8 × 16384 × 64 × 4 bytes are 32 MiB; 8 × 16384 × 16384 × 4 bytes are 8 GiB.
    account = memory_account(AttentionSizes(batch=8, heads=1, length=16384, head_dim=64, element_bytes=4))
    assert [(share.name, share.bytes) for share in account] == [
        ("inputs", 96 * MIB),
        ("scores", 8192 * MIB),
        ("probabilities", 8192 * MIB),
        ("output", 32 * MIB),
        ("held with 3", (32 + 3 * 8192) * MIB),
        ("held with 2", (32 + 2 * 8192) * MIB),
        ("held with 1", (32 + 8192) * MIB),
        ("held with 0", 32 * MIB + 8 * 16384 * 4),
    ]
    assert [share.formula for share in account[3:]] == [
        "B·H·N·d·s",
        "B·H·N·d·s + 3·B·H·N²·s",
        "B·H·N·d·s + 2·B·H·N²·s",
        "B·H·N·d·s + B·H·N²·s",
        "B·H·N·d·s + 4·B·H·N",
    ]


def test_heads_and_half_the_bytes_count():
    sizes = AttentionSizes(batch=2, heads=3, length=10, head_dim=5, element_bytes=2)
    assert (sizes.output_bytes, sizes.quadratic_bytes) == (600, 1200)
    assert sizes.held_bytes(0) == 600 + 240  # the log-sum-exp is float32 all the same
    assert sizes.quadratic_kept(600 + 2400) == 2
    assert sizes.quadratic_kept(600) == 0


def test_what_is_measured_is_one_of_these():
    q, k, v = (torch.randn(2, 3, 64, 16, requires_grad=True) for _ in range(3))
    sizes = AttentionSizes(2, 3, 64, 16, 4)

    def held(impl):
        reading = training_memory(
            lambda: attention(q, k, v, impl=impl), lambda out: None, inputs=[q, k, v], device="cpu"
        )
        return reading.held_bytes

    assert held("tiled") == sizes.held_bytes(0)
    assert 1 <= sizes.quadratic_kept(held("naive")) < 4


@pytest.mark.parametrize("changes", [{"batch": 0}, {"heads": 0}, {"length": -1}, {"head_dim": 0}, {"element_bytes": 0}])
def test_sizes_that_cannot_be_are_refused(changes):
    with pytest.raises(ValueError, match=f"{next(iter(changes))} must be at least 1"):
        AttentionSizes(**{"batch": 1, "heads": 1, "length": 1, "head_dim": 1, "element_bytes": 1} | changes)


def test_a_negative_number_of_tensors_is_refused():
    with pytest.raises(ValueError, match="quadratic must be at least 0; got -1"):
        AttentionSizes(1, 1, 1, 1, 4).held_bytes(-1)
