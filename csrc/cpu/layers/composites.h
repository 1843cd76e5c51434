// What the layers with device kernels (csrc/ops/device_layers.cpp) share with those of the CPU: the checks of
// their arguments, and their composites of ATen's operations, for devices that have no kernels.
//
// Checks raise ValueError or TypeError with what was found and what is needed; `op` is named in them.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace pyruntime::layers {

void check_gate_up(const char* op, const at::Tensor& gate_up);
at::Tensor swiglu_composite(const at::Tensor& gate_up);
at::Tensor swiglu_backward_composite(const at::Tensor& grad, const at::Tensor& gate_up);

void check_rope(const char* op, const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin,
                int64_t batch, int64_t positions, int64_t heads, int64_t kv_heads);
void check_rope_backward(const at::Tensor& dq, const at::Tensor& dk, const at::Tensor& dv,
                         const at::Tensor& cos, const at::Tensor& sin);
// Raises ValueError unless the rows of qkv are contiguous, as they must be to be rotated in place.
void check_rows_in_place(const at::Tensor& qkv);
// q, k and v as they lie in qkv: [B, heads, S, hd] each. Rows of qkv are contiguous.
std::tuple<at::Tensor, at::Tensor, at::Tensor> heads_in_place(const at::Tensor& qkv, c10::SymInt batch,
                                                              c10::SymInt positions, c10::SymInt heads,
                                                              c10::SymInt kv_heads);
std::tuple<at::Tensor, at::Tensor, at::Tensor> apply_rope_qkv_composite(const at::Tensor& qkv,
                                                                        const at::Tensor& cos,
                                                                        const at::Tensor& sin, int64_t batch,
                                                                        int64_t positions, int64_t heads,
                                                                        int64_t kv_heads, bool overwrite_qkv);
void rotate_qkv_composite(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin, int64_t batch,
                          int64_t positions, int64_t heads, int64_t kv_heads);
at::Tensor apply_rope_qkv_backward_composite(const at::Tensor& dq, const at::Tensor& dk, const at::Tensor& dv,
                                             const at::Tensor& cos, const at::Tensor& sin);

void check_logits(const char* op, const at::Tensor& logits, const at::Tensor& labels);
void check_logits_backward(const char* op, const at::Tensor& logits, const at::Tensor& labels,
                           const at::Tensor& lse, const at::Tensor& grad);
at::Tensor cross_entropy_stats_composite(const at::Tensor& logits, const at::Tensor& labels,
                                         int64_t vocab_start);
at::Tensor cross_entropy_backward_composite(const at::Tensor& logits, const at::Tensor& labels,
                                            const at::Tensor& lse, const at::Tensor& grad,
                                            int64_t vocab_start);
void cross_entropy_backward_inplace_composite(const at::Tensor& logits, const at::Tensor& labels,
                                              const at::Tensor& lse, const at::Tensor& grad,
                                              int64_t vocab_start);

}  // namespace pyruntime::layers
