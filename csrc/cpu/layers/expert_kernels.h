// The element-wise work of an expert on the rows that a router has sent to it. Vectorised on CPUs;
// ATen's operations on other devices. Weights and sums of rows are fp32, or fp64 for fp64 rows.
#pragma once

#include <ATen/core/Tensor.h>

namespace pyruntime::layers {

// y = p * silu(gate) * up: gate_up [m, 2F] = [gate | up], p [m]; returns [m, F].
at::Tensor weighted_swiglu(const at::Tensor& gate_up, const at::Tensor& p);

// Its gradients for `grad` [m, F]. Writes dgate_up [m, 2F], the result y [m, F] once more, and dp [m], the
// dot product of each row of grad with silu(gate) * up.
void weighted_swiglu_backward(const at::Tensor& grad, const at::Tensor& gate_up, const at::Tensor& p,
                              const at::Tensor& dgate_up, const at::Tensor& y, const at::Tensor& dp);

// out[i] = the sum of values[places[j]] over begins[i] <= j < begins[i + 1], in that order, rounded once; on
// CPUs. out [n, D], values [m, D]; begins has n + 1 numbers.
void sum_rows(const at::Tensor& out, const at::Tensor& values, const int64_t* begins, const int64_t* places);

}  // namespace pyruntime::layers
