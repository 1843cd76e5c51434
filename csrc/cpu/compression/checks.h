// Checks of the arguments of this folder's operators.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <string_view>

namespace pyruntime::cpu {

inline void check_flat(const at::Tensor& tensor, c10::Device device, std::string_view op,
                       std::string_view name) {
  TORCH_CHECK_VALUE(tensor.device() == device, op, ": ", name, " is on ", tensor.device(), "; it must be on ",
                    device, ".");
  TORCH_CHECK_VALUE(tensor.dim() == 1 && tensor.is_contiguous(), op, ": ", name, " has shape ",
                    tensor.sizes(), " and strides ", tensor.strides(),
                    "; it must have one dimension and be contiguous.");
}

inline void check_flat(const at::Tensor& tensor, c10::Device device, at::ScalarType dtype,
                       std::string_view op, std::string_view name) {
  check_flat(tensor, device, op, name);
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, op, ": ", name, " has dtype ", tensor.scalar_type(),
                   "; it must be ", dtype, ".");
}

inline void check_size(const at::Tensor& tensor, int64_t size, std::string_view op, std::string_view name) {
  TORCH_CHECK_VALUE(tensor.numel() == size, op, ": ", name, " has ", tensor.numel(),
                    " elements; it must have ", size, ".");
}

// values: float32, bfloat16 or float16. residual: float32, the loss of earlier rounds, if given.
inline void check_values(const at::Tensor& values, const std::optional<at::Tensor>& residual,
                         c10::Device device, std::string_view op) {
  check_flat(values, device, op, "values");
  const at::ScalarType dtype = values.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, op,
                   ": values has dtype ", dtype, "; it must be float32, bfloat16 or float16.");
  if (residual) {
    check_flat(*residual, device, at::kFloat, op, "residual");
    check_size(*residual, values.numel(), op, "residual");
  }
}

}  // namespace pyruntime::cpu
