#pragma once

// The fused layer kernels: torch ops of namespace `pyruntime`. Each has a vectorised CPU kernel (float32,
// bfloat16, float16 and float64; arithmetic in float32, or float64 for float64) and, if other devices can
// call it, a composite of ATen ops. In their C++ autograd the backward is an op too. Each file registers its
// ops; fake kernels are in pyruntime/ops/layers.py and attention.py.
//
// This header has their argument checks, loops over rows, and the layout of heads.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <string_view>
#include <tuple>

#include "core/operator.h"
#include "simd.h"

// Calls the last argument, a lambda, with `scalar_t` as the C++ type of `dtype`.
#define PYRUNTIME_DISPATCH_FLOAT(dtype, name, ...) \
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, dtype, name, __VA_ARGS__)

namespace pyruntime::layers {

using at::Tensor;

// Elements in one task of at::parallel_for. Fixed, so that no result depends on the thread count; large
// enough that waking a thread is worth it.
constexpr int64_t kElementsPerTask = 1 << 14;

inline int64_t rows_per_task(int64_t columns) {
  return std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, columns));
}

// The rows of a contiguous tensor as a kernel reads them; an undefined tensor has none. With width 0 every
// row is the first one.
template <typename T>
struct RowsOf {
  T* data;
  int64_t width;

  T* from(int64_t row) const { return data == nullptr ? nullptr : data + row * width; }
};

template <typename T>
RowsOf<const T> read(const Tensor& tensor, int64_t width) {
  return {tensor.defined() ? tensor.const_data_ptr<T>() : nullptr, width};
}

template <typename T>
RowsOf<T> write(const Tensor& tensor, int64_t width) {
  return {tensor.defined() ? tensor.mutable_data_ptr<T>() : nullptr, width};
}

// Calls Kernel::run(first row of each operand, number of rows, columns, settings...) for every task of rows.
template <typename Kernel, typename... Operands, typename... Settings>
void run_rows(int64_t rows, int64_t columns, const std::tuple<Operands...>& operands, Settings... settings) {
  at::parallel_for(0, rows, rows_per_task(columns), [&](int64_t begin, int64_t end) {
    const auto run = [&](const auto&... operand) {
      simd_run<Kernel>(operand.from(begin)..., end - begin, columns, settings...);
    };
    std::apply(run, operands);
  });
}

inline Tensor with_contiguous_rows(const Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) <= 1 ? tensor : tensor.contiguous();
}

// Returns new heads with the shape of `like`, [B, H, S, D]: a transposed view of a contiguous [B, S, H, D].
inline Tensor empty_heads(const Tensor& like) {
  return at::empty({like.size(0), like.size(2), like.size(1), like.size(3)}, like.options()).transpose(1, 2);
}

// The dtype of statistics of tensors of `dtype`.
inline at::ScalarType statistics_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

inline void check_floating(const Tensor& tensor, std::string_view op, std::string_view name) {
  const at::ScalarType dtype = tensor.scalar_type();
  TORCH_CHECK_TYPE(
      dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kDouble, op, ": ",
      name, " has dtype ", dtype, "; it must be float32, bfloat16, float16 or float64.");
}

inline void check_same_dtype(const Tensor& a, std::string_view name_a, const Tensor& b,
                             std::string_view name_b, std::string_view op) {
  TORCH_CHECK_TYPE(a.scalar_type() == b.scalar_type(), op, ": ", name_a, " has dtype ", a.scalar_type(),
                   " and ", name_b, " has ", b.scalar_type(), "; convert one so that they agree.");
}

// Tells autograd that an op wrote to `tensor`, so that it refuses a backward that saved the old values.
inline void mark_written(const Tensor& tensor) {
  if (!tensor.is_inference()) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace pyruntime::layers
