"""Launches of the backward for Hopper where a step's columns of q and dout come in pieces."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.kernels.call import Wanted
from cs336_systems.kernels.sm90 import backend

from .test_hopper_launches import call_of, calls  # noqa: F401 - a fixture


@pytest.mark.parametrize(("d", "dv"), [(512, 400), (264, 264)])
def test_wide_heads_have_a_launch_for_dv_and_one_for_dk_and_dq(calls, d, dv):  # noqa: F811
    call = call_of(d, dv)
    out, lse, dout = torch.empty(*call.q.shape[:-1], dv), torch.empty(call.q.shape[:-1]), torch.randn(2, 4, 200, dv)
    run = backend.plan_backward(call, out.bfloat16(), dout.bfloat16(), False, Wanted())
    gradients = run(call.q, call.k, call.v, out.bfloat16(), lse, dout.bfloat16(), None, call.aux)
    names = "prepare_kernel", "backward_kernel", "backward_kernel", "finish_kernel"
    assert [name for name, *_ in calls] == [*names]
    (_, prepare, _), (_, of_k, k_launch), (_, of_v, v_launch), (_, finish, _) = calls
    dk_ptr, dv_ptr = (x.data_ptr() for x in gradients[1:3])
    assert (of_k[6:8], of_v[6:8]) == ((dk_ptr, None), (None, dv_ptr))
    assert of_k[:6] == of_v[:6] == (call.q.data_ptr(), prepare[1], call.k.data_ptr(), call.v.data_ptr(), *prepare[4:6])
    assert of_k[8:10] == of_v[8:10] == (prepare[6], None)
    assert finish[0] == prepare[6]
    # Pieces that have columns of dout, for dK, and of q, for dV.
    assert [launch.constants["PIECES"] for launch in (k_launch, v_launch)] == [-(-call.v_head_dim // 64), -(-d // 128)]
    blocks = [[x.block_shape[-1] for x in launch.tensors[:4]] for launch in (k_launch, v_launch)]
    assert blocks == [[512, 64, 512, 512], [128, 512, 512, 512]]
