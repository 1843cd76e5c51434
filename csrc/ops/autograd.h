// What the operators' autograd functions share.
//
// Autograd works on the registered operators, never on the C++ functions below them, so that torch.compile
// can trace both directions. Gradients come back in the order in which tensors went in; undefined ones stand
// for what nobody asked for.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKey.h>

#include <cstdint>
#include <string>
#include <vector>

namespace pyruntime {

inline constexpr auto kKernel = c10::DispatchKey::CompositeExplicitAutograd;
inline constexpr auto kAutograd = c10::DispatchKey::Autograd;

template <typename Signature>
c10::TypedOperatorHandle<Signature> operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// A bias' gradient: grad [..., N] summed over all dimensions but the last.
inline at::Tensor sum_over_rows(const at::Tensor& grad) {
  std::vector<int64_t> dims;
  for (int64_t d = 0; d < grad.dim() - 1; ++d) dims.push_back(d);
  return grad.sum(dims);
}

// The registered reduce_scatter; in register_collectives.cpp.
at::Tensor call_reduce_scatter(const at::Tensor& x, const std::string& group, int64_t dim);

}  // namespace pyruntime
