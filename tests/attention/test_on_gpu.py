"""What only a GPU shows: long sequences, pipelined loops, memory, graphs, streams, several devices, huge tensors."""

from __future__ import annotations

import gc
import math
import threading
from concurrent.futures import wait
from functools import partial

import pytest
import torch
import triton
from torch import nn

from cs336_systems.attention import Attention, attention, attention_varlen, dispatch
from cs336_systems.kernels import launching
from cs336_systems.testing import (
    Inputs,
    Shapes,
    assert_within_budget,
    budget_of,
    compare,
    evaluate,
    make_inputs,
)

from .helpers import BFLOAT, FLOAT, FLOATS, check

pytestmark = pytest.mark.gpu
each_dtype = pytest.mark.parametrize("dtype", FLOATS)
full_and_causal = pytest.mark.parametrize("causal", [False, True])


def made(*leading, dtype=BFLOAT, device="cuda", layout="contiguous", **sizes):
    return make_inputs(Shapes.of(*leading, **sizes), dtype=dtype, device=device, layout=layout)


def hold(findings):
    assert all(finding.holds for finding in findings), "\n".join(map(str, findings))


def same(results, expected, *, dq_in_any_order=False):
    """To the bit; but the kernels for Hopper may add up dQ in any order."""
    assert results.keys() == expected.keys()
    for name, x in expected.items():
        loose = name == "dq" and dq_in_any_order
        tolerances = {"rtol": 2**-6, "atol": 2**-7} if loose else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(results[name].to(x.device), x, **tolerances)


@each_dtype
@pytest.mark.parametrize("d", [16, 32, 64, 80, 128, 256])
@full_and_causal
def test_loops_over_many_tiles(d, causal, dtype):
    """The pipeline has a start, a steady state and an end only where there are more tiles than stages."""
    for q_len, k_len in ((515, 515), (1024, 2049), (2049, 1000)):
        sizes = {"q_len": q_len, "k_len": k_len, "d": d, "q_heads": 4, "kv_heads": 2}
        check("flash", made(1, **sizes, dtype=dtype, layout="length_before_heads"), causal=causal)


@each_dtype
@pytest.mark.parametrize("d", [64, 128])
@full_and_causal
def test_a_long_sequence(d, causal, dtype):
    check("flash", made(1, q_len=8193, d=d, dtype=dtype), causal=causal)


@pytest.mark.parametrize("dtype", [BFLOAT, FLOAT])
def test_heads_wider_than_a_tile(dtype):
    check("flash", made(1, q_len=700, k_len=1000, d=576, dv=512, q_heads=4, kv_heads=1, dtype=dtype), causal=True)


@each_dtype
@full_and_causal
def test_memory_held_for_the_backward(causal, dtype):
    """The inputs, which are there already, the output, and one float32 a row: within a percent."""
    q, k, v = (x.requires_grad_() for x in made(1, q_len=16384, d=64, q_heads=4, dtype=dtype)[:3])
    attention(q, k, v, causal=causal, impl="flash")  # what is allocated once is not held for this call
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = attention(q, k, v, causal=causal, impl="flash")
    held = torch.cuda.memory_allocated() - before
    accounted = out.numel() * out.element_size() + 4 * out.shape[:-1].numel()
    assert accounted <= held <= 1.01 * accounted


@each_dtype
def test_memory_at_the_peak_is_linear(dtype):
    """A matrix of scores of this length would be 4 GiB in float16."""
    inputs = made(1, q_len=46341, d=64, dtype=dtype)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    evaluate(partial(attention, impl="flash"), inputs)
    assert torch.cuda.max_memory_allocated() - before < 2**28


@each_dtype
def test_repeated_calls_give_the_same_bits(dtype):
    inputs = made(4, q_len=1027, d=64, q_heads=8, kv_heads=2, dtype=dtype)
    attend = partial(attention, causal=True, impl="flash", return_lse=True, deterministic=True)
    first = evaluate(attend, inputs)
    for _ in range(5):
        same(evaluate(attend, inputs), first)


@each_dtype
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_cuda_graph_replays_forward_and_backward(dtype, deterministic, return_lse):
    make = partial(made, 2, q_len=130, k_len=200, d=64, q_heads=4, kv_heads=2, dtype=dtype)
    attend = partial(attention, causal=True, impl="flash", return_lse=return_lse, deterministic=deterministic)
    static, side = make(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # compiled and loaded before the capture, which allows neither
            evaluate(attend, static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = evaluate(attend, static)
    for _ in range(3):
        fresh = make()
        for target, source in zip(static, fresh, strict=True):
            target.copy_(source)
        graph.replay()
        same(captured, evaluate(attend, fresh), dq_in_any_order=not deterministic)


# torch captures an empty graph of its own, to begin with.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_a_compiled_model_with_cuda_graphs():
    attend = partial(attention, causal=True, impl="flash")
    compiled = torch.compile(lambda q, k, v: attend(q, k, v), fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        inputs = made(2, q_len=130, d=64, q_heads=4)
        results = {name: x.clone() for name, x in evaluate(compiled, inputs).items()}
        same(results, evaluate(attend, inputs), dq_in_any_order=True)


def test_kernels_run_on_the_current_stream():
    """Behind work that is still under way on it, not concurrently on another one."""
    inputs, attend = made(8, q_len=256, d=64), partial(attention, impl="flash", return_lse=True)
    expected = evaluate(attend, inputs)
    stale = Inputs(*[torch.full_like(x, math.nan) for x in inputs])
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for target, source in zip(stale, inputs, strict=True):
            target.copy_(source)
        results = evaluate(attend, stale)
    stream.synchronize()
    same(results, expected)


@pytest.mark.multi_gpu
@each_dtype
def test_tensors_on_a_device_that_is_not_the_current_one(dtype):
    inputs = made(2, q_len=130, d=64, q_heads=4, dtype=dtype, device="cuda:0")
    there = Inputs(*[x.to("cuda:1") for x in inputs])
    attend = partial(attention, causal=True, impl="flash", return_lse=True)
    with torch.cuda.device(0):
        for _ in range(2):  # planned, then found
            results, expected = evaluate(attend, there), evaluate(attend, inputs)
            assert torch.cuda.current_device() == 0
            assert all(x.device == torch.device("cuda:1") for x in results.values())
            same(results, expected)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("impl", ["flash", "auto"])
def test_data_parallel(impl):
    inputs, module = made(6, q_len=70, d=64, q_heads=4, device="cuda:0"), Attention(causal=True, impl=impl)
    same(evaluate(nn.DataParallel(module, device_ids=[0, 1]), inputs), evaluate(module, inputs))


@pytest.mark.multi_gpu
def test_threads_on_different_devices():
    """Plans are those of all threads together: none may take another's device or arguments."""
    failures = []

    def work(device, d):
        try:
            with torch.cuda.device(device):
                inputs = made(2, q_len=70, d=d, q_heads=2, device=device)
                attend = partial(attention, causal=True, impl="flash", return_lse=True)
                expected = budget_of(inputs, causal=True)
                for _ in range(20):
                    hold(compare(evaluate(attend, inputs), *expected))
        except Exception as error:
            failures.append(error)

    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    threads = [threading.Thread(target=work, args=(device, d)) for device in devices for d in (32, 64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def needs_memory(gibibytes):
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < gibibytes * 2**30:
        pytest.skip(f"needs {gibibytes} GiB of free GPU memory")


@pytest.fixture
def _alone_with_much_memory(tmp_path_factory):
    """Waits until no other worker of pytest runs such a test, and leaves none of the memory behind."""
    import fcntl

    with (tmp_path_factory.getbasetemp().parent / "much_memory.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        yield
        torch.cuda.empty_cache()


def fills_the_gpu(test):
    """One such test at a time: two together would not find the memory that each needs."""
    return pytest.mark.slow(pytest.mark.usefixtures("_alone_with_much_memory")(test))


@fills_the_gpu
@each_dtype
@full_and_causal
def test_rows_more_than_two_billion_elements_apart(causal, dtype):
    """Views of one buffer, so that offsets within a single head do not fit 32 bits."""
    needs_memory(14)
    length, d, row_stride = 300, 64, 2**31 // 250 + 8
    buffer = torch.empty(length * row_stride, dtype=dtype, device="cuda")
    dense = made(1, q_len=length, d=d, q_heads=1, dtype=dtype)
    views = []
    for index, x in enumerate(dense[:4]):
        view = buffer.as_strided(x.shape, (0, 0, row_stride, 1), index * d)
        assert (length - 1) * view.stride(-2) > 2**31
        views.append(view.copy_(x))
    attend = partial(attention, causal=causal, impl="flash", return_lse=True)
    assert_within_budget(evaluate(attend, Inputs(*views, dense.dlse)), dense, causal=causal)


@fills_the_gpu
@pytest.mark.parametrize(("dtype", "gibibytes"), [(BFLOAT, 100), (FLOAT, 120)])
def test_tensors_of_more_than_two_billion_elements(dtype, gibibytes):
    """A batch so large that its last entries start beyond 2**31, checked at both ends and around the limit."""
    needs_memory(gibibytes)
    limit = 2**31 // (16 * 64)
    inputs = made(limit + 5, q_len=16, d=64, dtype=dtype)
    results = evaluate(partial(attention, causal=True, impl="flash", return_lse=True), inputs)
    for entries in (slice(0, 3), slice(limit - 2, limit + 2), slice(limit + 2, None)):
        own = Inputs(*[x[entries] for x in inputs])
        assert_within_budget({name: x[entries] for name, x in results.items()}, own, causal=True)


@pytest.mark.parametrize("dtype", [BFLOAT, FLOAT])
@pytest.mark.parametrize("d", [64, 96])
@pytest.mark.parametrize("is_packed", [False, True])
def test_the_backward_launches_what_was_compiled_during_the_forward(monkeypatch, dtype, d, is_packed):
    compiled = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, src, **_: compiled.append(src.name))
    length = 1000 if is_packed else 100
    q, k, v = (torch.randn(length, 4, d, dtype=dtype, device="cuda", requires_grad=True) for _ in range(3))
    for kernels in dispatch.KERNELS:
        assert kernels.module  # imports its kernels
    for kernel in [x for x in gc.get_objects() if issubclass(type(x), triton.JITFunction)]:
        kernel.device_caches.clear()
    dispatch.clear_plans()
    if is_packed:
        out = attention_varlen(q, k, v, torch.tensor([0, 10, 1000], device="cuda"), causal=True)
    else:
        out = attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), causal=True)
    wait([future for futures in launching._in_background.values() for future in futures])
    assert compiled
    compiled.clear()
    out.backward(torch.randn_like(out))
    torch.cuda.synchronize()
    assert compiled == []


@pytest.mark.slow
def test_more_than_two_billion_scores_a_head():
    """The index of a score would not fit 32 bits, if anything counted them."""
    q, k, v, dout, dlse = made(1, q_len=65537, d=16)
    out, lse = attention(q, k, v, causal=True, impl="flash", return_lse=True)
    last = Inputs(q[:, -64:], k, v, dout[:, -64:], dlse[:, -64:])
    assert_within_budget({"out": out[:, -64:], "lse": lse[:, -64:]}, last, causal=True)
