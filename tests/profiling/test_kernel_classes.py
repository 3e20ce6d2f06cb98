"""Kernels are classified by names as the libraries give them."""

from __future__ import annotations

import pytest

from cs336_systems.profiling.kernel_classes import (
    ATTENTION,
    CLASSES,
    COMMUNICATION,
    COPY,
    ELEMENTWISE,
    HOST,
    INDEX,
    LOSS,
    MATMUL,
    NORM,
    OPTIMIZER,
    OTHER,
    REDUCTION,
    RULES,
    SOFTMAX,
    class_of,
)

NATIVE = "void at::native::"
NAMES = {
    MATMUL: [
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn",
        "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_stage4_warpsize2x2x1_ffma_aligna4_alignc4_execute",
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_nn_align8>(cutlass_80::Params)",
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal<",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true, false>",
        "void gemmSN_NN_kernel<float, 128, 2, 4, 8, 3, 4, false, cublasGemvTensorStridedBatched<float const>>",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, false>",
        "void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensor<float const>, cublasGemvTensor<float>>>",
        "magma_sgemmEx_kernel<float, float, float, false, true, 6, 4, 6, 3, 4>",
        *("triton_bmm", "triton_tem_fused_addmm_relu_3"),
        *("aten::mm", "aten::addmm", "aten::linear", "aten::mkldnn_linear", "aten::_scaled_mm"),
    ],
    ATTENTION: [
        *("forward_kernel", "forward_more_kernel", "backward_kernel", "dq_kernel", "backward_wide_kernel"),
        *("dkdv_kernel", "prepare_kernel", "finish_kernel", "pair_gradient_kernel", "cached_kernel"),
        *("merge_kernel", "rewrite_kernel"),
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false>>",
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64, 128, 128, 8, 4, 4, 4>>",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloop<",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel::Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_64x128x64_4x1x1_kernel0_0",
        "triton_tem_fused_flex_attention_0",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_efficient_attention_forward",
        "FlashAttentionFunction",
    ],
    SOFTMAX: [
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, false, false>(float*, float const*)",
        NATIVE + "(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, SoftMaxForwardEpilogue>",
        NATIVE + "(anonymous namespace)::cunn_SoftMaxBackward<8, float, float, float, LogSoftMaxBackwardEpilogue>",
        "triton_per_fused__softmax_masked_fill_mul_5",
        "triton_red_fused__log_softmax_nll_loss_forward_2",
        *("aten::_softmax", "aten::_softmax_backward_data", "aten::_log_softmax"),
    ],
    LOSS: [
        NATIVE + "(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(float*, float*)",
        "aten::nll_loss_forward",
    ],
    NORM: [
        NATIVE + "(anonymous namespace)::vectorized_layer_norm_kernel<float, float, true>(int, float, float const*)",
        NATIVE + "(anonymous namespace)::RowwiseMomentsCUDAKernel<float, float, true>(long, float, float const*)",
        NATIVE + "(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float, 32u, 1u, 32u, true>",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3",
        "aten::_fused_rms_norm",
    ],
    ELEMENTWISE: [
        "swiglu_forward_kernel",
        "cs336_systems::swiglu_forward",
        NATIVE + "vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>>",
        NATIVE + "elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::BinaryFunctor<float, float,"
        " float, at::native::binary_internal::MulFunctor<float>>>(at::TensorIteratorBase&)::{lambda(int)#1}>",
        NATIVE + "unrolled_elementwise_kernel<at::native::(anonymous namespace)::where_kernel_impl(TensorIterator&)>",
        NATIVE + "elementwise_kernel<128, 4, at::native::gpu_kernel_impl<at::native::(anonymous namespace)::"
        "masked_fill_kernel(at::TensorIterator&, c10::Scalar const&)>",
        NATIVE + "(anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange_cuda_out>",
        "triton_poi_fused_mul_silu_6",
        "triton_poi_fused__to_copy_add_mul_stack_sub_1",
        *("aten::mul", "aten::masked_fill_", "aten::silu_backward"),
    ],
    REDUCTION: [
        NATIVE + "reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float, sum_functor>>>",
        "void cub::detail::reduce::DeviceReduceSingleTileKernel<cub::detail::reduce::policy_hub<float>>",
        "triton_red_fused_mul_sum_8",
        "aten::sum",
        "aten::linalg_vector_norm",
    ],
    COPY: [
        "cs336_systems::swiglu_weights",
        "Memcpy HtoD (Pageable -> Device)",
        "Memset (Device)",
        NATIVE + "elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda>>",
        NATIVE + "(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<4u>, unsigned int, 4, 64, 64>",
        NATIVE + "vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul>>",
        *("triton_poi_fused__to_copy_4", "triton_poi_fused_clone_transpose_5"),
        *("aten::copy_", "aten::_to_copy", "aten::cat"),
    ],
    INDEX: [
        NATIVE + "(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>",
        NATIVE + "(anonymous namespace)::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long)",
        NATIVE + "embedding_backward_feature_kernel<float, float, long>(long const*, float const*, float*, int)",
        NATIVE + "(anonymous namespace)::compute_grad_weight<float, long>(long const*, float const*, long const*)",
        "void cub::detail::radix_sort::DeviceRadixSortOnesweepKernel<cub::policy_hub<long, long, unsigned long>>",
        "triton_poi_fused_embedding_0",
        "aten::embedding_dense_backward",
    ],
    OPTIMIZER: [
        NATIVE + "(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, "
        "FusedAdamMathFunctor<float, 4, ADAM_MODE::ADAMW, false>>",
        NATIVE + "(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor<float>>",
        "aten::_fused_adamw_",
        "aten::_foreach_addcdiv_",
    ],
    COMMUNICATION: [
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "c10d::allreduce_",
        "record_param_comms",
    ],
    HOST: [
        "SwiGLUFunction",
        "SwiGLUFunctionBackward",
        "TorchDynamo Cache Lookup",
        "AOTDispatcher Runtime Wrapper Prologue",
        *("aten::view", "MulBackward0", "torch::autograd::AccumulateGrad", "aten::t"),
    ],
    OTHER: ["## Call CompiledFxGraph f7zdugq5aur66 ##", "aten::never_heard_of", "void mystery<float>(float*)"],
}


@pytest.mark.parametrize(("name", "expected"), [(name, each) for each, names in NAMES.items() for name in names])
def test_names(name, expected):
    assert class_of(name) == expected


def test_every_class_is_tried():
    assert set(NAMES) == set(CLASSES) == {each for each, _ in RULES} | {OTHER}
