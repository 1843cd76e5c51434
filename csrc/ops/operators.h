// Registers the operators by domain; helpers of their autograd functions.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "core/operator.h"

namespace pyruntime {

using Tensors = std::vector<at::Tensor>;
using OptionalTensorList = c10::List<std::optional<at::Tensor>>;

// A bias' gradient: grad [..., N] summed over all dimensions but the last.
inline at::Tensor sum_over_rows(const at::Tensor& grad) {
  std::vector<int64_t> dims;
  for (int64_t d = 0; d < grad.dim() - 1; ++d) dims.push_back(d);
  return grad.sum(dims);
}

// Returns what a linear saves in place of its input x, which only the gradient of a weight reads: x itself,
// or for frozen weights one element in the form of x.
inline at::Tensor saved_input(const at::Tensor& x, at::TensorList weights) {
  for (const at::Tensor& weight : weights) {
    if (weight.requires_grad()) return x;
  }
  return at::empty({1}, x.options()).expand_symint(x.sym_sizes());
}

// Called at the beginning of an op's backward: a graph of it would lack what the ranks exchange.
inline void refuse_second_derivatives(const char* op) {
  TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(), op,
                              ": a gradient was asked for with create_graph=True, but second derivatives are "
                              "not computed; leave create_graph False.");
}

// Registered operators that other operators call; the files of their domains define these.
Tensors call_all_gather_matmul(const at::Tensor& x_shard, at::TensorList weights, c10::string_view group,
                               int64_t dim, c10::SymInt rows, bool return_gathered,
                               std::optional<bool> keep_gathered);
at::Tensor call_matmul_reduce_scatter(const at::Tensor& x, const at::Tensor& weight, c10::string_view group,
                                      int64_t dim);
Tensors call_replicated_matmul_backward(at::TensorList grads, const at::Tensor& x, at::TensorList weights,
                                        c10::string_view group, bool need_dx, bool need_dw,
                                        c10::string_view tier);
at::Tensor call_linear(const at::Tensor& x, const at::Tensor& weight);
at::Tensor call_all_gather(const at::Tensor& x_shard, c10::string_view group, int64_t dim, c10::SymInt rows);
at::Tensor call_reduce_scatter(const at::Tensor& x, c10::string_view group, int64_t dim);
at::Tensor call_all_reduce(const at::Tensor& x, c10::string_view group);

// One for each domain, in the files of these names.
void register_column_linears(torch::Library& library);
void register_row_linears(torch::Library& library);
void register_sliced_linears(torch::Library& library);
void register_collectives(torch::Library& library);
void register_linear(torch::Library& library);
void register_linear_cross_entropy(torch::Library& library);
void register_experts(torch::Library& library);
void register_sliced_experts(torch::Library& library);
void register_device_adamw(torch::Library& library);
void register_device_layers(torch::Library& library);

}  // namespace pyruntime
