// The arguments that all implementations of pyruntime::adamw_ and adamw_ahead_ share, and their checks.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace pyruntime::layers {

struct AdamwOptions {
  double lr, beta1, beta2, eps;
  int64_t step;
  // For each tensor the seed of the random rounding, and the index of its first element in the uncut tensor;
  // empty: to nearest.
  at::IntArrayRef seeds, firsts;

  bool rounds_at_random() const { return !seeds.empty(); }
};

struct AdamwLists {
  at::TensorList params, grads, exp_avg, exp_avg_sq, masters;
  at::ArrayRef<double> weight_decay;
  const std::optional<at::Tensor>& grad_scale;

  // Returns a tensor's master, or undefined if it has none (an empty list, or an empty tensor in its place).
  at::Tensor master_of(size_t i) const;
};

// Raises ValueError or TypeError with what was found and what is needed.
void check_adamw(const AdamwOptions& options, const AdamwLists& lists);

using Adamw = void(const AdamwOptions& options, const AdamwLists& lists);

// Implemented by ATen's operations, for any device.
Adamw adamw_composite;

// The arguments that adamw_ahead_ has besides those of adamw_.
struct AdamwAhead {
  at::TensorList tensors;        // to write
  at::TensorList earlier_grads;  // of a step that counts and the states do not have yet; empty: none
  double earlier_lr;
  double grad_scale;  // of both steps

  AdamwOptions earlier(const AdamwOptions& o) const {
    return {earlier_lr, o.beta1, o.beta2, o.eps, o.step - 1, {}, {}};
  }
};

void check_adamw_ahead(const AdamwOptions& options, const AdamwLists& lists, const AdamwAhead& ahead);

using AheadOfNorm = void(const AdamwOptions& options, const AdamwLists& lists, const AdamwAhead& ahead);

AheadOfNorm adamw_ahead_composite;

// The op pyruntime::adamw_ as the dispatcher calls it.
template <Adamw adamw>
void adamw_op(at::TensorList params, at::TensorList grads, at::TensorList exp_avg, at::TensorList exp_avg_sq,
              at::TensorList masters, const std::optional<at::Tensor>& grad_scale, double lr, double beta1,
              double beta2, double eps, at::ArrayRef<double> weight_decay, int64_t step,
              at::IntArrayRef seeds, at::IntArrayRef firsts) {
  adamw({lr, beta1, beta2, eps, step, seeds, firsts},
        {params, grads, exp_avg, exp_avg_sq, masters, weight_decay, grad_scale});
}

// The op pyruntime::adamw_ahead_ as the dispatcher calls it.
template <AheadOfNorm adamw_ahead>
void adamw_ahead_op(at::TensorList ahead, at::TensorList params, at::TensorList grads, at::TensorList exp_avg,
                    at::TensorList exp_avg_sq, at::TensorList masters, at::TensorList earlier_grads,
                    double grad_scale, double lr, double beta1, double beta2, double eps,
                    at::ArrayRef<double> weight_decay, int64_t step, double earlier_lr, at::IntArrayRef seeds,
                    at::IntArrayRef firsts) {
  const std::optional<at::Tensor> no_tensor;
  adamw_ahead({lr, beta1, beta2, eps, step, seeds, firsts},
              {params, grads, exp_avg, exp_avg_sq, masters, weight_decay, no_tensor},
              {ahead, earlier_grads, earlier_lr, grad_scale});
}

}  // namespace pyruntime::layers
