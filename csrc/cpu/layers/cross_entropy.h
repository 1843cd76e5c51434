// The operators of cross_entropy.cpp, for other operators.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>

namespace pyruntime::layers {

// [rows, 3], see cross_entropy.cpp.
at::Tensor call_cross_entropy_stats(const at::Tensor& logits, const at::Tensor& labels, int64_t vocab_start);
// The losses and log-sum-exps of all rows, from the statistics of all shards.
std::tuple<at::Tensor, at::Tensor> call_cross_entropy_loss(const at::Tensor& logits, const at::Tensor& labels,
                                                           const at::Tensor& stats, int64_t vocab_start,
                                                           int64_t vocab_size, int64_t ignore_index);
// Writes the logits' gradient over them. of_lse: the gradient of the log-sum-exps, 0 in ignored rows, or
// undefined.
void write_cross_entropy_gradient(at::Tensor logits, const at::Tensor& labels, const at::Tensor& lse,
                                  const at::Tensor& of_loss, const at::Tensor& of_lse, int64_t vocab_start,
                                  int64_t ignore_index);

}  // namespace pyruntime::layers
