#include "cpu/compression/fp8.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include "cpu/compression/fp8_kernels.h"

namespace pyruntime::cpu {

namespace {

constexpr int64_t kBlocksPerTask = 256;  // fixed, and large enough that waking a thread is worth it

// Calls f with a zero of type `dtype`.
template <typename F>
void with_type(at::ScalarType dtype, const F& f) {
  switch (dtype) {
    case at::kFloat:
      return f(float{});
    case at::kBFloat16:
      return f(c10::BFloat16{});
    default:
      return f(c10::Half{});
  }
}

template <typename F>
void for_blocks(const at::Tensor& values, const F& f) {
  at::parallel_for(0, values.size(0) * fp8_blocks(values.size(1)), kBlocksPerTask, f);
}

}  // namespace

int64_t fp8_bytes(int64_t width) {
  TORCH_CHECK_VALUE(width >= 0, "fp8_bytes: width=", width, "; a row cannot have fewer than 0 values.");
  return width + fp8_blocks(width);
}

void check_fp8(const at::Tensor& values, const at::Tensor& packed, std::string_view op) {
  for (const at::Tensor* each : {&values, &packed}) {
    TORCH_CHECK_VALUE(each->device() == values.device() && each->dim() == 2 && each->is_contiguous(), op,
                      ": found a tensor of shape ", each->sizes(), " and strides ", each->strides(), " on ",
                      each->device(), "; it must be contiguous rows on ", values.device(), ".");
  }
  const at::ScalarType dtype = values.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, op,
                   ": values have dtype ", dtype, "; they must be float32, bfloat16 or float16.");
  TORCH_CHECK_TYPE(packed.scalar_type() == at::kByte, op, ": packed has dtype ", packed.scalar_type(),
                   "; it must be uint8.");
  TORCH_CHECK_VALUE(packed.size(0) == values.size(0) && packed.size(1) == fp8_bytes(values.size(1)), op,
                    ": packed has shape ", packed.sizes(), "; of values ", values.sizes(), " it must be [",
                    values.size(0), ", ", fp8_bytes(values.size(1)), "].");
}

void pack_fp8(const at::Tensor& values, const at::Tensor& packed) {
  auto* to = packed.mutable_data_ptr<uint8_t>();
  const int64_t width = values.size(1);
  with_type(values.scalar_type(), [&](auto type) {
    const auto* from = values.const_data_ptr<decltype(type)>();
    for_blocks(values,
               [&](int64_t begin, int64_t end) { layers::simd_run<PackFp8>(from, width, to, begin, end); });
  });
}

void unpack_fp8(const at::Tensor& packed, const at::Tensor& out) {
  const auto* from = packed.const_data_ptr<uint8_t>();
  const int64_t width = out.size(1);
  with_type(out.scalar_type(), [&](auto type) {
    auto* to = out.mutable_data_ptr<decltype(type)>();
    for_blocks(out,
               [&](int64_t begin, int64_t end) { layers::simd_run<UnpackFp8>(from, width, to, begin, end); });
  });
}

}  // namespace pyruntime::cpu
