// What all implementations of pyruntime::adamw_ share: its arguments and their checks.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace pyruntime::layers {

struct AdamwOptions {
  double lr, beta1, beta2, eps;
  int64_t step;
  // By tensor: of the random rounding, and the index of its first element in what is cut; empty: to nearest.
  at::IntArrayRef seeds, firsts;

  bool rounds_at_random() const { return !seeds.empty(); }
};

struct AdamwLists {
  at::TensorList params, grads, exp_avg, exp_avg_sq, masters;
  at::ArrayRef<double> weight_decay;
  const std::optional<at::Tensor>& grad_scale;

  // The master of a tensor, or undefined where it has none (an empty list, or an empty tensor in its place).
  at::Tensor master_of(size_t i) const;
};

// Raises ValueError or TypeError with what was found and what is needed.
void check_adamw(const AdamwOptions& options, const AdamwLists& lists);

using Adamw = void(const AdamwOptions& options, const AdamwLists& lists);

// By ATen's operations, on any device.
Adamw adamw_composite;

// The op pyruntime::adamw_ as the dispatcher calls it.
template <Adamw adamw>
void adamw_op(at::TensorList params, at::TensorList grads, at::TensorList exp_avg, at::TensorList exp_avg_sq,
              at::TensorList masters, const std::optional<at::Tensor>& grad_scale, double lr, double beta1,
              double beta2, double eps, at::ArrayRef<double> weight_decay, int64_t step,
              at::IntArrayRef seeds, at::IntArrayRef firsts) {
  adamw({lr, beta1, beta2, eps, step, seeds, firsts},
        {params, grads, exp_avg, exp_avg_sq, masters, weight_decay, grad_scale});
}

}  // namespace pyruntime::layers
