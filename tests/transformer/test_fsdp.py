"""FSDP2 in a group of one process: every block a unit of its own, as a DTensor, with nothing that it cannot shard."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from cs336_systems.transformer import Transformer, generate, swiglu

# torch notes that a CPU's random numbers for DTensor are not those of one process.
pytestmark = [
    pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning"),
    pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed"),
]
WHOLE = StateDictOptions(full_state_dict=True)


@pytest.fixture
def mesh(device):
    on_gpu = device.type == "cuda"
    place = {"backend": "nccl", "device_id": torch.device("cuda", 0)} if on_gpu else {"backend": "gloo"}
    if on_gpu:
        torch.cuda.set_device(0)  # else torch warns where there are several GPUs, if none has been used yet
    dist.init_process_group(**place, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh(device.type, (1,))
    finally:
        dist.destroy_process_group()


def sharded(config, mesh, device, **settings):
    """A model whose blocks are sharded before they have memory."""
    model = Transformer(config, checkpoint_every=settings.pop("checkpoint_every", None), device="meta")
    for block in model.layers:
        fully_shard(block, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    model.to_empty(device=device)
    model.reset_parameters()
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("settings", [{}, {"checkpoint_every": 1}, {"reshard_after_forward": False}])
def test_sharded_blocks_give_the_same_gradients(tiny, device, tokens, mesh, tied, settings):
    config = tiny(tie_embeddings=tied, attn="auto")
    model = sharded(config, mesh, device, **settings)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    whole = Transformer(config, device=device)
    set_model_state_dict(model, whole.state_dict(), options=WHOLE)
    expected = whole.loss(*tokens)
    loss = model.loss(*tokens, chunk=10)
    torch.testing.assert_close(loss, expected)
    expected.backward()
    loss.backward()
    for (name, parameter), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(
            parameter.grad.full_tensor(), other.grad, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert generate(model, [[1, 2], [3]], 5, temperature=0) == generate(whole, [[1, 2], [3]], 5, temperature=0)


@pytest.mark.parametrize("settings", [{}, {"mp_policy": MixedPrecisionPolicy(torch.float16, torch.float32)}])
def test_the_fused_ffn_keeps_nothing_of_what_was_gathered(tiny, flash_device, mesh, settings, monkeypatch):
    """Else a block's weights would be whole until its backward pass, whatever FSDP does with its own."""
    if flash_device.type == "cpu":
        monkeypatch.setattr(swiglu, "fused", swiglu.can_be_fused)
    model = sharded(tiny(num_layers=1, d_ff=160), mesh, flash_device, **settings)
    x = torch.randn(1, 3, 32, device=flash_device, requires_grad=True)
    shapes = set()

    def keep(tensor):
        if not isinstance(tensor, torch.nn.Parameter):
            shapes.add(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model.layers[0](x)
    assert (3, 320) in shapes
    assert not {(160, 32), (32, 160), (320, 32)} & shapes
    out.sum().backward()
    assert all(weight.grad.full_tensor().isfinite().all() for weight in model.layers[0].ffn.parameters())


def test_mixed_precision_leaves_positions_exact(tiny, device, tokens, mesh):
    """What goes into a block is cast to bfloat16: the sines and cosines must not come that way."""
    model = sharded(tiny(), mesh, device, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    rope = model.get_submodule("layers.0.attn.rope")
    seen = {}
    rope.register_forward_hook(lambda module, x, out: seen.update(x=x[0].dtype, table=module.table.dtype))
    model.loss(*tokens).backward()
    assert seen == {"x": torch.bfloat16, "table": torch.float32}
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    assert torch.equal(rope.table, Transformer(tiny(), device=device).get_buffer("layers.0.attn.rope.table"))
