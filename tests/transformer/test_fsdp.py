"""FSDP2 in a group of one process: every block is sharded, with nothing that cannot be a DTensor."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from cs336_systems.transformer import Transformer, swiglu

from .conftest import saved_tensors

pytestmark = [
    # torch warns that a CPU's random numbers for DTensor differ from those of one process.
    pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning"),
    pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed"),
]


@pytest.fixture
def mesh(device):
    group: dict[str, object] = {"backend": "gloo"}
    if device.type == "cuda":
        group = {"backend": "nccl", "device_id": torch.device("cuda", 0)}
        torch.cuda.set_device(0)  # torch warns if there are several GPUs and none is set
    dist.init_process_group(**group, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh(device.type, (1,))
    finally:
        dist.destroy_process_group()


def sharded(config, mesh, device, **options):
    """A model whose blocks are sharded before they are allocated."""
    model = Transformer(config, device="meta")
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, **options)
    model.to_empty(device=device)
    model.reset_parameters()
    return model


@pytest.mark.parametrize("options", [{}, {"mp_policy": MixedPrecisionPolicy(torch.float16, torch.float32)}])
def test_the_fused_ffn_saves_no_gathered_weights(tiny, flash_device, mesh, options, monkeypatch):
    """They would keep a block's gathered weights in memory until its backward pass."""
    if flash_device.type == "cpu":
        monkeypatch.setattr(swiglu, "fused", swiglu.can_be_fused)
    model = sharded(tiny(num_layers=1, d_ff=160), mesh, flash_device, **options)
    x = torch.randn(1, 3, 32, device=flash_device, requires_grad=True)
    saved = saved_tensors(lambda: model.layers[0](x))
    shapes = {tuple(tensor.shape) for tensor in saved if not isinstance(tensor, torch.nn.Parameter)}
    assert (3, 320) in shapes
    assert not {(160, 32), (32, 160), (320, 32)} & shapes
    model.layers[0](x).sum().backward()
    assert all(weight.grad.full_tensor().isfinite().all() for weight in model.layers[0].ffn.parameters())


def test_mixed_precision_keeps_the_rope_table_in_float32(tiny, device, tokens, mesh):
    model = sharded(tiny(), mesh, device, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    rope = model.get_submodule("layers.0.attn.rope")
    seen = {}
    rope.register_forward_hook(lambda module, x, out: seen.update(x=x[0].dtype, table=module.table.dtype))
    model.loss(*tokens).backward()
    assert seen == {"x": torch.bfloat16, "table": torch.float32}
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    assert torch.equal(rope.table, Transformer(tiny(), device=device).get_buffer("layers.0.attn.rope.table"))
