"""Classes of kernels, and of PyTorch operators on a CPU, by name: matrix products, softmax, norm and so on.

The first of `RULES` whose pattern is found in the name decides. The names are those of cuBLAS, CUTLASS, cuDNN, ATen,
NCCL, Inductor's Triton kernels, and this library's own. A fused Inductor kernel counts as its costliest operator: a
product before softmax, softmax before a norm, a norm before elementwise operators.
"""

from __future__ import annotations

import functools
import re

MATMUL = "matrix products"
ATTENTION = "attention"  # fused kernels, which have products and softmax in one
SOFTMAX = "softmax"
LOSS = "loss"
NORM = "norm"
ELEMENTWISE = "elementwise"
REDUCTION = "reduction"
COPY = "copy"
INDEX = "embedding and index"
OPTIMIZER = "optimizer"
COMMUNICATION = "communication"
HOST = "host"  # on a CPU: views, allocation, autograd itself
OTHER = "other"  # no rule matches, as for the kernels that Inductor compiles for a CPU

CLASSES = (
    *(MATMUL, ATTENTION, SOFTMAX, LOSS, NORM, ELEMENTWISE, REDUCTION, COPY, INDEX, OPTIMIZER, COMMUNICATION),
    *(HOST, OTHER),
)

_OURS = (
    "forward_kernel|forward_more_kernel|backward_kernel|backward_wide_kernel|dq_kernel|dkdv_kernel|prepare_kernel|"
    "finish_kernel|pair_gradient_kernel|cached_kernel|merge_kernel|measure_kernel|rewrite_kernel"
)
_VIEWS = (
    "view|_unsafe_view|_reshape_alias|reshape|as_strided|t|transpose|permute|expand|slice|select|unsqueeze|squeeze|"
    "detach|alias|unbind|split|chunk|narrow|flatten|unflatten|empty|empty_like|empty_strided|new_empty|resize_|set_|"
    "resolve_conj|resolve_neg|result_type|promote_types|item|_local_scalar_dense|is_nonzero|lift_fresh|expand_as|"
    "view_as|movedim|swapaxes|diagonal|numpy_T|can_cast|record_stream|einsum|to|type_as|contiguous|detach_|unfold|"
    "broadcast_tensors|new_empty_strided"
)
_COPIES = "_to_copy|copy|clone|view|transpose|permute|cat|stack|zeros|zeros_like|full|new_zeros|t|_unsafe_view|expand"

RULES: tuple[tuple[str, str], ...] = (
    (COMMUNICATION, r"nccl|^c10d::|^_c10d_functional::|all_?reduce|all_?gather|reduce_scatter|record_param_comms"),
    # Case-sensitive: C++ templates of kernels have "backward" in their names, too.
    (HOST, r"^autograd::|^torch::autograd::|^\w+(?-i:Backward)\d*$|^CompiledFunction|^Torch-Compiled|^detach_?$"),
    (HOST, r"^TorchDynamo |^AOTDispatcher |^Pregraph bytecode"),
    (HOST, rf"^aten::({_VIEWS})$|^ProfilerStep|^cuda(Launch|Memcpy|Memset|Device|Stream|Event)\w*$"),
    (ELEMENTWISE, r"^swiglu_\w*kernel|^cs336_systems::swiglu_(for|back)ward$"),
    (COPY, r"^cs336_systems::swiglu_weights$"),
    (HOST, r"^SwiGLUFunction$"),
    (ATTENTION, rf"^({_OURS})(_\w+)?$|^cs336_systems::|^_?Flash\w*Function$"),
    (ATTENTION, r"flash_(fwd|bwd)|flash_attn|flash::|FlashAttn|fmha_|fmha\b|sdpa|flex_attention|attention"),
    (OPTIMIZER, r"multi_tensor_apply|adam|^aten::_foreach|^aten::_amp_|amp_(non_finite|update)|sgd"),
    (MATMUL, r"^triton_(mm|bmm|tem_fused\w*(mm|linear|bmm)\w*)|^triton_tem_"),
    (MATMUL, r"^aten::(mm|bmm|addmm|addbmm|baddbmm|addmv|mv|dot|vdot|matmul|linear|_scaled_mm|_int_mm)(_|\.out)?$"),
    (MATMUL, r"^aten::(mkldnn_linear|_addmm_activation|linear_backward|matmul_backward)|^mkldnn|onednn|mkl_linear"),
    (MATMUL, r"^(?!triton_).*(gemm|gemv|xmma|cutlass|nvjet|cublas|splitk|wgmma|magma|hmma|imma|tensorop|dot_kernel)"),
    (SOFTMAX, r"softmax"),
    (LOSS, r"nll_loss|cross_entropy"),
    (NORM, r"(rms|layer|group|batch)_?norm|rsqrt|RowwiseMoments|GammaBeta|cuComputeGradInput|ComputeInternalGradients"),
    (ELEMENTWISE, r"elementwise_kernel_with_index|^aten::arange$"),
    (INDEX, r"embedding|index|gather|scatter|radix_?sort|sort_pairs|DeviceSelect|compute_grad_weight|krn_partial"),
    (INDEX, r"^aten::(sort|argsort|topk|searchsorted|nonzero|unique|masked_select|take|bincount|cumsum)|multinomial"),
    (COPY, rf"^triton_(poi|per|red)_fused_(({_COPIES})(_|$))+\d*$"),
    (COPY, r"^(?!triton_).*(memcpy|memset|copy|CatArray|transpose|FillFunctor|clone|concat)"),
    (COPY, r"^aten::(cat|stack|flip|fill_|zero_|zeros|zeros_like|ones|ones_like|full|full_like|new_zeros|repeat)$"),
    (REDUCTION, r"reduce|^triton_(per|red)_|^aten::(sum|mean|amax|amin|max|min|argmax|norm|linalg_vector_norm|prod)$"),
    (REDUCTION, r"^aten::(logsumexp|var|std|var_mean|all|any|cumsum|sum_to_size|linalg_norm)$|scan_"),
    (ELEMENTWISE, r"elementwise|vectorized_|unrolled_|^triton_(poi|for)_|pointwise|distribution_|CUDAFunctor"),
    (
        ELEMENTWISE,
        r"^aten::(add|sub|rsub|mul|div|pow|neg|abs|sqrt|rsqrt|reciprocal|exp|exp2|log|log2|sin|cos|tanh|sigmoid|silu|"
        r"gelu|relu|clamp|clamp_min|clamp_max|minimum|maximum|where|masked_fill|eq|ne|lt|le|gt|ge|logical_\w+|"
        r"bitwise_\w+|isfinite|isnan|isinf|tril|triu|floor|floor_divide|ceil|round|remainder|sign|threshold|addcmul|"
        r"addcdiv|lerp|square|erf|dropout|native_dropout|bernoulli|uniform|normal|random|silu_backward|gelu_backward|"
        r"threshold_backward|sigmoid_backward|tanh_backward|native_dropout_backward|__\w+__)_?$",
    ),
)
"""Class and regular expression; case does not matter."""

_COMPILED = tuple((kernel_class, re.compile(pattern, re.IGNORECASE)) for kernel_class, pattern in RULES)


@functools.lru_cache(maxsize=4096)
def class_of(name: str) -> str:
    """The class, one of `CLASSES`, of a kernel or operator."""
    return next((kernel_class for kernel_class, pattern in _COMPILED if pattern.search(name)), OTHER)
