"""Where processes compute: the CPU, over gloo, and two GPUs, over NCCL."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.multi_gpu])])
def place(request):
    """The type of the device, which is sent to other processes."""
    return request.param
