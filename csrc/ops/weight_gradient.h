// dW = dY^T X of a linear layer, and where it goes.
//
// Autograd gets it as a tensor, unless the weight has a sink: then dY and X are handed over as they are, so
// that data parallelism can write each chunk of rows where it leaves from, and autograd is given nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace pyruntime {

// dy [rows, N], x [rows, K], both contiguous or transposable without a copy.
using WeightGradientSink = std::function<void(const at::Tensor& dy, const at::Tensor& x)>;

// From now on the gradient of `weight` goes to `sink`; an empty one gives it back to autograd. The weight is
// known by its memory, and a sink ends with it.
void set_weight_gradient_sink(const at::Tensor& weight, WeightGradientSink sink);
bool has_weight_gradient_sink(const at::Tensor& weight);

// dy^T @ x summed over all rows of all blocks, dy [blocks, rows, N], x [blocks, rows, K]: [N, K], or
// undefined where the weight's sink took them.
at::Tensor weight_gradient(const at::Tensor& weight, const at::Tensor& dy, const at::Tensor& x);

}  // namespace pyruntime
