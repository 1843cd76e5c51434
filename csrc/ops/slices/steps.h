// Operators in steps share the tensor between two steps, and the access to what autograd's functions hold.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

namespace pyruntime {

// The tensor between two steps: without elements, so that no device is asked for them or their sums.
inline at::Tensor mark_like(const at::Tensor& x) {
  return at::empty({0}, x.options());
}

// The custom class that an autograd function has saved under this name.
template <typename Pointer>
Pointer held(torch::autograd::AutogradContext* ctx, const char* name) {
  return ctx->saved_data[name].toCustomClass<typename Pointer::element_type>();
}

}  // namespace pyruntime
