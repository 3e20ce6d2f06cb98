"""torch's own attention, called so that it computes what the other implementations do."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..kernels.call import Aux, Call, Options
from ..kernels.torch_names import must_dispatch
from .naive import naive
from .pairs import Pairs, seen_pairs

ANY_SCALE = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
NOT_CUDNN = [SDPBackend.FLASH_ATTENTION, *ANY_SCALE]
LEAST_SCALE = 2.0**-126
"""The least positive number that is normal in float32."""
MOST_SCALE = 2.0**10
"""Above, the rounding of large scores could make the weights of torch's backward on a CPU infinite."""
_ALIGNMENT = 16
"""Bytes."""


def supports(call: Call) -> str | None:
    """Why torch cannot compute a call as the other implementations do, or None if it can."""
    options, by_sequence = call.options, _has_known_sequences(call)
    if call.aux.cache_lengths is not None and call.q_len == 1:
        options = options._replace(window_left=None)
    if (call.aux.tensors and not by_sequence) or not options.is_causal_or_full:
        return "torch's kernels are asked for causal masks alone"
    if call.options.deterministic and call.device.type == "cuda":
        return "not all of torch's kernels are deterministic"
    if call.return_lse:
        return "torch's scaled_dot_product_attention does not return the log-sum-exp"
    if call.is_empty:
        return "torch's kernels disagree on empty inputs"
    if call.hides_rows and not by_sequence:
        return "torch's kernels disagree on queries that see no key"
    return None


def _has_known_sequences(call: Call) -> bool:
    """Whether all that is known besides q, k and v are lengths of sequences, which a CPU can look at."""
    aux = call.aux
    lengths = (aux.cu_seqlens_q, aux.cu_seqlens_k) if aux.cache_lengths is None else (aux.cache_lengths,)
    if None in lengths or len(aux.tensors) > len(lengths) or call.device.type != "cpu":
        return False
    return not must_dispatch(call.q, call.k, call.v, *aux.tensors)


def sdpa_by_sequence(q: Tensor, k: Tensor, v: Tensor, options: Options, aux: Aux) -> Tensor:
    """`sdpa`, of packed sequences and of a KV cache one sequence after another."""
    if aux.cache_lengths is not None:
        return _over_cache(q, k, v, options, aux.cache_lengths.tolist())
    if aux.cu_seqlens_q is None or aux.cu_seqlens_k is None:
        return sdpa(q, k, v, options)
    q_lens, k_lens = aux.cu_seqlens_q.diff().tolist(), aux.cu_seqlens_k.diff().tolist()
    # Queries that see nothing: the first ones of sequences with fewer keys, those without keys, and the rest.
    causal = options.window_right is not None and options.bottom_right
    blind = [n if m == 0 else max(0, n - m) if causal else 0 for n, m in zip(q_lens, k_lens, strict=True)]
    if blind == q_lens:
        return naive(q, k, v, options, False, aux)[0]
    # split, whose gradient is one concatenation, where each slice would make a gradient of all rows.
    rest = q.shape[-2] - sum(q_lens)
    q_pieces = q.split([*q_lens, rest], -2)
    k_pieces, v_pieces = (x.split([*k_lens, x.shape[-2] - sum(k_lens)], -2) for x in (k, v))
    out = []
    for q_own, k_own, v_own, hidden in zip(q_pieces, k_pieces, v_pieces, [*blind, rest], strict=True):
        out.append(q.new_zeros(*q.shape[:-2], hidden, v.shape[-1]))
        if hidden < q_own.shape[-2]:
            out.append(sdpa(q_own[..., hidden:, :], k_own, v_own, options))
    return torch.cat(out, -2)


def _over_cache(q: Tensor, k: Tensor, v: Tensor, options: Options, lengths: list[int]) -> Tensor:
    """Each entry's queries over the slots it has filled; one call for all where they have as many."""
    new, before = q.shape[-2], options.window_left
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    all_alike = len(set(lengths)) == 1
    for number, length in enumerate(lengths[:1] if all_alike else lengths):
        entries = slice(None) if all_alike else slice(number, number + 1)
        hidden = max(0, new - length)
        # A window comes with a single query.
        slots = slice(0 if before is None else max(0, length - 1 - before), length)
        if hidden < new:
            out[entries, :, hidden:] = sdpa(q[entries, :, hidden:], k[entries, :, slots], v[entries, :, slots], options)
    return out


def sdpa(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    """torch's ``scaled_dot_product_attention``, whose fused kernels take four dimensions."""
    q4, k4, v4 = q, k, v
    if q.ndim == 3:
        q4, k4, v4 = q[:, None], k[:, None], v[:, None]
    elif q.ndim > 4:
        q4, k4, v4 = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
    on_cuda = q.device.type == "cuda"
    if on_cuda:
        q4, k4, v4 = map(_aligned, (q4, k4, v4))
    q_len, k_len = q.shape[-2], k.shape[-2]
    mask = None
    is_causal = options.window_right is not None
    if options.bottom_right and not torch.compiler.is_compiling() and q_len == 1:
        is_causal = False  # the last query sees all keys
    if is_causal and options.bottom_right and q_len != k_len:
        if torch.compiler.is_compiling() or F.scaled_dot_product_attention is not scaled_dot_product_attention:
            # The subclass, which lets the fused kernels skip what is hidden, is more than torch.compile can trace, and
            # it calls what F has under this name, which may be this library (see `cs336_systems.compat.sdpa`).
            pairs = Pairs.of_matrices(q, k, slice(0, q_len), slice(0, k_len))
            mask = seen_pairs(options, pairs, options.band(q_len, k_len), ())
        else:
            # Here, because it imports all of torch.compile, which takes as long as torch itself.
            from torch.nn.attention.bias import causal_lower_right

            mask = causal_lower_right(q_len, k_len)
    # Asked in an `if`, the comparison is a bool also where torch.compile keeps sizes symbolic.
    grouped = {"enable_gqa": True} if q4.shape[1] != k4.shape[1] else {}
    with _right_backends(q4, k4, v4, options.scale):
        out = scaled_dot_product_attention(
            q4,
            k4,
            v4,
            attn_mask=mask,
            is_causal=is_causal and mask is None,
            scale=options.scale,
            **grouped,
        )
    if on_cuda and out.requires_grad and not must_dispatch(q, k, v):
        out.register_hook(_aligned)
    return out if q.ndim == 4 else out.reshape(*q.shape[:-1], v.shape[-1])


def _right_backends(q: Tensor, k: Tensor, v: Tensor, scale: float) -> AbstractContextManager[object]:
    """Inside, torch does not choose a kernel that returns wrong numbers for these inputs.

    Seen with torch 2.13 and 2.15 on a CPU: causal flash returns NaN for scales below 0, and for those that are 0 in
    float32; with torch 2.13 its gradients are NaN for scales of 1e10 and above. Seen with torch 2.11 on an H200, in 16
    bits: flash returns NaN for scales of 0 and below. For cuDNN see `_aligned`.
    """
    half_on_cuda = q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16)
    on_cpu = q.device.type == "cpu"
    if (scale < LEAST_SCALE and (half_on_cuda or on_cpu)) or (scale > MOST_SCALE and on_cpu):
        return sdpa_kernel(ANY_SCALE)
    return sdpa_kernel(NOT_CUDNN) if half_on_cuda and must_dispatch(q, k, v) else nullcontext()


def _aligned(x: Tensor) -> Tensor:
    """x, or a contiguous copy where its rows are not contiguous or do not begin at multiples of 16 bytes.

    Seen with torch 2.11 on an H100 and an H200 for other rows: cuDNN 9.19 returns wrong numbers in 16 bits, and raises
    where rows share memory; the memory-efficient kernel raises in float32, or reads a misaligned address, after which
    the process can no longer use the GPU.
    """
    *strides, last = x.stride()
    size = x.element_size()
    rows = last == 1 and strides[-1] > 0 and all(stride * size % _ALIGNMENT == 0 for stride in strides)
    # torch itself does not choose these kernels for head dimensions whose rows have another size.
    # Tensors of a graph, or of a transform, have no addresses.
    if (rows or x.is_contiguous()) and (must_dispatch(x) or x.data_ptr() % _ALIGNMENT == 0):
        return x
    return x.clone(memory_format=torch.contiguous_format)
