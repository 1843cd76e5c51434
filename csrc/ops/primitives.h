// The fused primitives, forward and backward, without autograd. See pyruntime/ops/primitives.py for their
// mathematics.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

namespace pyruntime {

using Tensors = std::vector<at::Tensor>;
using OptionalTensors = std::vector<std::optional<at::Tensor>>;

// all_gather_matmul.cpp
Tensors all_gather_matmul(const at::Tensor& x_shard, const Tensors& weights, const OptionalTensors& biases,
                          const std::string& group, int64_t dim, int64_t rows, bool return_gathered,
                          const std::string& tier);
// [dX_shard if need_dx] + [dW_i if need_dw].  `x` is the shard, or the gathered operand when gathered is
// true.
Tensors all_gather_matmul_backward(const Tensors& grads, const at::Tensor& x, bool gathered,
                                   const Tensors& weights, const std::string& group, int64_t dim,
                                   bool need_dx, bool need_dw, const std::string& tier);

// matmul_reduce_scatter.cpp
at::Tensor matmul_reduce_scatter(const at::Tensor& x, const at::Tensor& weight,
                                 const std::optional<at::Tensor>& bias, const std::string& group, int64_t dim,
                                 const std::string& tier);
// [dX if need_dx] + [dW if need_dw] + [dbias if need_db].
Tensors matmul_reduce_scatter_backward(const at::Tensor& grad_shard, const at::Tensor& x,
                                       const at::Tensor& weight, const std::string& group, int64_t dim,
                                       bool need_dx, bool need_dw, bool need_db, const std::string& tier);

// matmul_all_reduce.cpp
at::Tensor matmul_all_reduce(const at::Tensor& x, const at::Tensor& weight,
                             const std::optional<at::Tensor>& bias, const std::string& group,
                             const std::string& tier);
// Column linears on an x that every rank holds whole: Y_i = x @ W_i^T (+ bias_i). Nothing travels forward.
Tensors replicated_matmul(const at::Tensor& x, const Tensors& weights, const OptionalTensors& biases);
// Their backward: dX = sum over ranks and weights of dY_i @ W_i, dW_i = dY_i^T @ x.
Tensors replicated_matmul_backward(const Tensors& grads, const at::Tensor& x, const Tensors& weights,
                                   const std::string& group, bool need_dx, bool need_dw,
                                   const std::string& tier);

// plain_collectives.cpp
at::Tensor all_gather(const at::Tensor& x_shard, const std::string& group, int64_t dim, int64_t rows);
at::Tensor reduce_scatter(const at::Tensor& x, const std::string& group, int64_t dim);
at::Tensor all_reduce(const at::Tensor& x, const std::string& group);
at::Tensor all_gather_stats(const at::Tensor& x, const std::string& group);

}  // namespace pyruntime
