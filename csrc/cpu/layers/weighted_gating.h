// The gating of experts for other operators: gate and up joined, times the weights of their rows
// (pyruntime::weighted_gating and weighted_gating_backward_).
#pragma once

#include <ATen/core/Tensor.h>

#include <limits>

namespace pyruntime::layers {

// How an expert joins gate and up: (up' + shift) * gate' * sigmoid(alpha * gate'), where gate' is gate up to
// `limit`, and up' is up within [-limit, limit]. As it is here: SwiGLU.
struct Gating {
  double alpha = 1, limit = std::numeric_limits<double>::infinity(), shift = 0;
  bool interleaved = false;  // gate in even columns, up in odd ones; else all of gate first
};

// y = p * gating(gate, up): gate_up [m, 2F], p [m]; returns [m, F]. p is fp32, or fp64 for fp64 rows.
at::Tensor call_weighted_gating(const at::Tensor& gate_up, const at::Tensor& p, const Gating& gating);

// Its gradients for `grad` [m, F]. Writes dgate_up [m, 2F], the result y [m, F] once more, and dp [m], the
// dot product of each row of grad with gating(gate, up).
void call_weighted_gating_backward(const at::Tensor& grad, const at::Tensor& gate_up, const at::Tensor& p,
                                   const Gating& gating, const at::Tensor& dgate_up, const at::Tensor& y,
                                   const at::Tensor& dp);

}  // namespace pyruntime::layers
