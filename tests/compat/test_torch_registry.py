"""The operators of torch's flash attention by this library: on a CPU by `tiled`, under the CPU's dispatch key."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from cs336_systems.attention import attention
from cs336_systems.compat import sdpa
from cs336_systems.compat.torch_registry import NAME, Handle
from cs336_systems.testing import (
    Shapes,
    assert_packed_within_budget,
    assert_within_budget,
    evaluate,
    make_inputs,
    make_packed,
    starts_of,
)

from ..attention.helpers import says

aten = torch.ops.aten


@pytest.fixture
def replaced(device):
    """torch's operators are this library's, on either device."""
    if device.type == "cuda":
        sdpa.activate()
        yield
        sdpa.restore()
    else:
        handle = Handle("CPU", "tiled")
        yield
        handle.remove()


@pytest.fixture
def dtype(device):
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def without_lse_gradient(inputs):
    return inputs._replace(dlse=torch.zeros_like(inputs.dlse))


def dense(q, k, v, causal=False, **options):
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, **options)
    return out, lse


def lengths_first(q, k, v, causal=False, **options):
    given = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse, *_ = aten._flash_attention_forward(*given, None, None, *SIZES, 0.0, causal, False, **options)
    return out.transpose(1, 2), lse


SIZES = 9, 9  # max_q and max_k, which nothing needs


def check(attend, inputs, **options):
    """out, lse and gradients against float64; lse has no gradient."""
    stashed = {}

    def out_of(q, k, v):
        out, stashed["lse"] = attend(q, k, v, causal=options.get("causal", False))
        assert not stashed["lse"].requires_grad
        return out

    results = evaluate(out_of, inputs)
    assert stashed["lse"].dtype == torch.float32
    results = {"out": results.pop("out"), "lse": stashed["lse"], **results}
    assert_within_budget(results, without_lse_gradient(inputs), **options)


@pytest.mark.parametrize("layout", ["contiguous", "length_before_heads", "packed", "kv_shared_by_heads"])
@pytest.mark.parametrize("attend", [dense, lengths_first])
@pytest.mark.parametrize("causal", [False, True])
def test_values_and_gradients(replaced, device, dtype, attend, causal, layout):
    shapes = Shapes.of(2, q_len=70, d=16, q_heads=4, kv_heads=2)
    check(attend, make_inputs(shapes, dtype=dtype, device=device, layout=layout), causal=causal)


@pytest.mark.parametrize("attend", [dense, lengths_first])
def test_the_last_query_belongs_to_the_last_key(replaced, device, dtype, attend):
    """As in torch's own operators, which its causal_lower_right calls; F's is_causal does not get here."""
    for q_len, k_len in ((5, 40), (40, 5)):
        shapes = Shapes.of(2, q_len=q_len, k_len=k_len, d=16, q_heads=2)
        check(attend, make_inputs(shapes, dtype=dtype, device=device), causal=True)


def test_scales_and_windows(replaced, device, dtype):
    inputs = make_inputs(Shapes.of(1, q_len=50, d=8, q_heads=2), dtype=dtype, device=device)
    check(partial(dense, scale=0.3), inputs, scale=0.3)
    attend = partial(lengths_first, window_size_left=3, window_size_right=-1)
    check(attend, inputs, causal=True, features={"window": (3, None)})


def test_packed_sequences(replaced, device, dtype):
    lengths = [(5, 5), (0, 3), (30, 41)]
    inputs = make_packed(lengths, dtype=dtype, device=device, heads=(4, 2), d=16)
    starts = [starts_of(column, device) for column in zip(*lengths, strict=True)]
    for causal in (False, True):
        stashed = {}

        def attend(q, k, v, causal=causal, stashed=stashed):
            out, stashed["lse"], *_ = aten._flash_attention_forward(q, k, v, *starts, 30, 41, 0.0, causal, False)
            return out

        results = evaluate(attend, inputs)
        results = {"out": results.pop("out"), "lse": stashed["lse"], **results}
        assert_packed_within_budget(results, without_lse_gradient(inputs), lengths, causal=causal)


def test_torchs_function_for_packed_sequences(replaced, device, dtype):
    """It also writes into a tensor that is given, since torch 2.13."""
    from torch.nn.attention import varlen

    q = make_packed([(4, 4), (6, 6)], dtype=dtype, device=device, heads=(2, 2), d=16).q
    starts = starts_of([4, 6], device)
    parts = [part.transpose(0, 1)[None] for part in q.split([4, 6])]
    expected = [attention(part, part, part, causal=True)[0].transpose(0, 1) for part in parts]
    out = varlen.varlen_attn(q, q, q, starts, starts, 6, 6, window_size=(-1, 0))
    torch.testing.assert_close(out, torch.cat(expected))
    if hasattr(varlen, "varlen_attn_out"):
        given = torch.empty_like(q)
        varlen.varlen_attn_out(given, q, q, q, starts, starts, 6, 6, window_size=(-1, 0))
        assert torch.equal(given, out)


def test_dropout_drops_the_same_in_the_backward(replaced, device, dtype):
    """The seed that the forward returns is this library's: the gradients are those of its own call."""
    inputs = make_inputs(Shapes.of(2, q_len=40, d=8, q_heads=2), dtype=dtype, device=device)
    stashed = {}

    def attend(q, k, v):
        out, *_, stashed["seed"], _, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.3)
        return out

    results = evaluate(attend, inputs)
    seed = stashed["seed"]
    assert (seed.dtype, seed.shape, seed.device) == (torch.uint64, (2,), inputs.q.device)
    own = {"dropout_p": 0.3, "seed": seed.view(torch.int64)[:1]}
    expected = evaluate(partial(attention, impl="naive", **own), inputs)
    torch.testing.assert_close(results, expected, rtol=2e-2, atol=2e-2 if dtype is torch.bfloat16 else 1e-5)
    torch.manual_seed(1)
    first, second = attend(*inputs[:3]), attend(*inputs[:3])
    torch.manual_seed(1)
    assert torch.equal(attend(*inputs[:3]), first)
    assert not torch.equal(first, second)


@pytest.mark.usefixtures("compile_afresh")
@pytest.mark.parametrize("layout", ["contiguous", "length_before_heads", "kv_shared_by_heads"])
def test_compiled(replaced, device, dtype, layout):
    """torch traces the operators without knowing whose they are, so results have the strides that it expects."""
    inputs = make_inputs(Shapes.of(2, q_len=20, d=8, q_heads=4), dtype=dtype, device=device, layout=layout)
    check(torch.compile(dense, fullgraph=True, backend="aot_eager"), inputs, causal=True)
    arguments = inputs.q, inputs.k, inputs.v, 0.0, True
    made = aten._scaled_dot_product_flash_attention(*arguments)
    meta = aten._scaled_dot_product_flash_attention(*[x.to("meta") for x in arguments[:3]], 0.0, True)
    seed, unused = made[6:8]
    gradients = aten._scaled_dot_product_flash_attention_backward(
        made[0], *arguments[:3], *made[:4], 20, 20, 0.0, True, seed, unused
    )
    for actual, expected in zip((*made[:2], *gradients), (*meta[:2], *arguments[:3]), strict=True):
        assert actual.shape == expected.shape
        assert actual.stride() == torch.empty_like(expected).stride()
        assert actual.dtype == expected.dtype


@pytest.mark.usefixtures("compile_afresh")
@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "inductor"])
def test_torchs_function_on_a_gpu(backend):
    """F.scaled_dot_product_attention reaches the operators, eagerly and compiled, and not after `restore`."""
    inputs = make_inputs(Shapes.of(2, q_len=300, d=64, q_heads=4, kv_heads=2), dtype=torch.bfloat16, device="cuda")

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def results_of(function):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return evaluate(function, inputs)

    torchs = results_of(attend)
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nn.attention.activate_flash_attention_impl(NAME)
    try:
        assert nn.attention.current_flash_attention_impl() == NAME
        results = results_of(torch.compile(attend, backend=backend) if backend else attend)
        without_a_choice = evaluate(attend, inputs)
    finally:
        nn.attention.restore_flash_attention_impl()
    assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn
    assert_within_budget(results, inputs, causal=True, return_lse=False)
    own = evaluate(partial(attention, causal=True, impl="flash"), inputs)
    assert torch.equal(results["out"], own["out"])
    assert torch.equal(without_a_choice["out"], own["out"])
    assert torch.equal(results_of(attend)["out"], torchs["out"])


def test_what_cannot_be_right_is_refused(replaced, device):
    q = torch.randn(2, 6, 2, 8, device=device)
    starts = torch.tensor([0, 6], dtype=torch.int32, device=device)

    def forward(q=q, k=q, v=q, cum_seq_q=None, cum_seq_k=None, dropout_p=0.0, debug=False, **options):
        return aten._flash_attention_forward(q, k, v, cum_seq_q, cum_seq_k, 6, 6, dropout_p, False, debug, **options)

    known = {argument.name for argument in aten._flash_attention_forward.default._schema.arguments}
    for message, options in (
        *[(f"{name} must be None; got a tensor of shape (2,)", {name: starts}) for name in known & {"block_table"}],
        ("return_debug_mask must be False; got True", {"debug": True}),
        ("seqused_k must be None; got a tensor of shape (2,)", {"seqused_k": starts}),
        ("alibi_slopes must be None; got a tensor of shape (2,)", {"alibi_slopes": torch.ones(2, device=device)}),
        (
            "cum_seq_k must be given where cum_seq_q is; got None",
            {"q": q[0], "k": q[0], "v": q[0], "cum_seq_q": starts},
        ),
        ("query must have 4 dimensions, or 3 with cum_seq_q; got (6, 2, 8)", {"q": q[0], "k": q[0], "v": q[0]}),
        ("value must have the head dimension of query, 8; got (2, 6, 2, 4)", {"v": q[..., :4]}),
    ):
        with pytest.raises(ValueError, match=says(message)):
            forward(**options)
    with pytest.raises(TypeError, match=r"^query must be float16, bfloat16 or float32; got torch\.float64$"):
        forward(*[q.double()] * 3)
    with pytest.raises(ValueError, match=r"^return_debug_mask must be False; got True$"):
        aten._scaled_dot_product_flash_attention(q, q, q, 0.0, False, True)
    if not hasattr(aten, "_flash_attention_forward_no_dropout_inplace"):
        return  # before torch 2.13
    with pytest.raises(ValueError, match=r"^dropout_p must be 0 where out is given; got 0\.1$"):
        aten._flash_attention_forward_no_dropout_inplace(q, q, q, q, None, None, 6, 6, 0.1, False, False)
    out = q[:1].clone()
    with pytest.raises(ValueError, match=r"^out must be \(2, 6, 2, 8\) torch\.float32 to match query; got \(1, "):
        aten._flash_attention_forward_no_dropout_inplace(out, q, q, q, None, None, 6, 6, 0.0, False, False)


def test_restore_takes_the_operators_back():
    assert NAME in nn.attention.list_flash_attention_impls()
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    before = torch._C._dispatch_dump("aten::_scaled_dot_product_flash_attention")
    sdpa.activate()
    assert nn.attention.current_flash_attention_impl() == NAME
    assert torch._C._dispatch_dump("aten::_scaled_dot_product_flash_attention") != before
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    sdpa.restore()
    assert nn.attention.current_flash_attention_impl() is None
    assert torch._C._dispatch_dump("aten::_scaled_dot_product_flash_attention") == before
    assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn
