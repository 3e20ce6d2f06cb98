"""Computes attention with the `cs336_systems` of one checkout, on request of compare_trees.py.

Runs with that checkout first on PYTHONPATH. Each line of standard input is a request in JSON: {"do", "case", "device",
"warmup", "rep"}, where "do" is "prepare" or "time". Each line of standard output is {"value"}, milliseconds, or
{"failure"}. Of the checkout only `attention`, `attention_with_cache` and `Transformer` are used, so that checkouts of
any age can be compared.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cs336_systems.attention import attention

LONGEST_CHECKED = 512
VOCABULARY = 4096
# Relative error against float64, in the Frobenius norm, with a margin.
_BOUNDS = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 2e-5}


def make_tensors(case: dict[str, Any], device: str) -> list[Tensor]:
    """q, k, v and the gradient of the output; the same for every checkout."""
    generator = torch.Generator(device).manual_seed(0)
    keys = (case["batch"], case["kv_heads"], case["length"], case["head_dim"])
    queries = (case["batch"], case["heads"], 1 if case["which"] == "decode" else case["length"], case["head_dim"])
    dtype = getattr(torch, case["dtype"])
    shapes = (queries, keys, keys, queries)
    return [torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in shapes]


def attend(case: dict[str, Any], provider: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The call of a case."""
    if case["which"] != "decode":
        return attention(q, k, v, causal=case["mask"] == "causal", impl=provider)
    from cs336_systems.attention import attention_with_cache  # older checkouts lack it

    return attention_with_cache(q, k, v, torch.full((k.shape[0],), k.shape[2], device=k.device), impl=provider)


def model_sizes(case: dict[str, Any]) -> dict[str, Any]:
    """The sizes of the model whose training step is a case: arguments of `TransformerConfig`."""
    d_model = case["heads"] * case["head_dim"]
    sizes = {"vocab_size": VOCABULARY, "context_length": case["length"], "d_model": d_model, "d_ff": 4 * d_model}
    heads = {"num_layers": 4, "num_heads": case["heads"], "num_kv_heads": case["kv_heads"]}
    return {**sizes, **heads, "attn": case["provider"]}


def make_step(case: dict[str, Any], device: str) -> Callable[[], Tensor]:
    """A function of which one call is a training step, with AdamW and autocast to the case's dtype, and its loss."""
    from cs336_systems.transformer import Transformer, TransformerConfig

    torch.manual_seed(0)
    model = Transformer(TransformerConfig(**model_sizes(case)), device=torch.device(device))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(VOCABULARY, (case["batch"], case["length"] + 1), device=device)
    dtype = getattr(torch, case["dtype"])
    autocast = {"device_type": torch.device(device).type, "dtype": dtype, "enabled": dtype is not torch.float32}

    def step() -> Tensor:
        with torch.autocast(**autocast):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def make_call(case: dict[str, Any], provider: str, tensors: list[Tensor]) -> Callable[[], Any]:
    """A function of which one call is one pass, and which returns its output or gradients."""
    *inputs, gradient = tensors
    forward = functools.partial(attend, case, provider, *inputs)
    if case["which"] in ("forward", "decode"):
        return forward
    for x in inputs:
        x.requires_grad_()
    if case["which"] == "both":
        return lambda: torch.autograd.grad(forward(), inputs, gradient)
    output = forward()
    return lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)


@functools.lru_cache(maxsize=1)
def call_of(case: str, device: str) -> Callable[[], Any]:
    """The call of a case in JSON; the last one is kept."""
    values = json.loads(case)
    if values["which"] == "step":
        return make_step(values, device)
    return make_call(values, values["provider"], make_tensors(values, device))


@functools.cache
def check(case: str, device: str) -> None:
    """Compare output and gradients with float64. Raises AssertionError if they differ by more than rounding."""
    values = json.loads(case)
    tensors = make_tensors(values, device)
    exact = [x.double() for x in tensors]
    for which in ("decode",) if values["which"] == "decode" else ("forward", "backward"):
        computed = make_call(values | {"which": which}, values["provider"], tensors)()
        expected = make_call(values | {"which": which}, "naive", exact)()
        pairs = [(computed, expected)] if isinstance(computed, Tensor) else zip(computed, expected, strict=True)
        error = max(float((x - right).norm() / right.norm()) for x, right in pairs)
        bound = _BOUNDS[values["dtype"]]
        if not error <= bound:
            raise AssertionError(f"{which}: expected a relative error of at most {bound:g}; got {error:.1e}")


def milliseconds(call: Callable[[], Any], device: str, warmup: float, rep: float) -> float:
    """The median time of a call."""
    if device.startswith("cuda"):
        from triton.testing import do_bench

        return float(do_bench(call, warmup=warmup, rep=rep, return_mode="median"))
    from torch.utils.benchmark import Timer  # the import asks for GPUs, after which no fork of a process can use one

    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    timer.blocked_autorange(min_run_time=warmup * 1e-3)
    return timer.blocked_autorange(min_run_time=rep * 1e-3).median * 1e3


def answer(request: dict[str, Any]) -> float:
    """Do what a request says, and return milliseconds; 0 if nothing is timed."""
    case, device = request["case"], request["device"]
    if request["do"] == "prepare":
        # The oracle keeps every pair of a query and a key. This length is a multiple of no tile.
        small = case | {"length": min(case["length"], LONGEST_CHECKED) - 3, "batch": 1}
        check(json.dumps(small), device)
    call = call_of(json.dumps(case), device)
    if request["do"] == "prepare":
        call()
        return 0.0
    return milliseconds(call, device, request["warmup"], request["rep"])


def main() -> None:
    """Answer requests until standard input ends. Anything else that is printed goes to standard error."""
    gc.disable()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply: dict[str, Any] = {"value": answer(json.loads(line))}
        except Exception as error:
            reply = {"failure": f"{type(error).__name__}: {' '.join(str(error).split())[:1000]}"}
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main()
