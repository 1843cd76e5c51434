#include "transport/device/sums.h"

#include <ATen/OpMathType.h>

namespace pyruntime {

PyruntimeDtype library_dtype(c10::ScalarType dtype) {
  if (dtype == c10::ScalarType::BFloat16) return PYRUNTIME_BF16;
  return dtype == c10::ScalarType::Half ? PYRUNTIME_FP16 : PYRUNTIME_FP32;
}

void sum_in_order(const at::Tensor& out, const std::vector<at::Tensor>& parts, const at::Tensor& bias,
                  const DeviceLibrary* library, void* stream, int32_t most_blocks) {
  if (library == nullptr || out.scalar_type() == c10::ScalarType::Double) {
    at::Tensor sum =
        parts.front().to(at::toOpMathType(out.scalar_type()), /*non_blocking=*/false, /*copy=*/true);
    for (size_t rank = 1; rank < parts.size(); ++rank) sum.add_(parts[rank]);
    if (bias.defined()) sum.add_(bias);
    out.copy_(sum);
    return;
  }
  std::vector<const void*> addresses;
  for (const at::Tensor& part : parts) addresses.push_back(part.const_data_ptr());
  const at::Tensor added = bias.defined() ? bias.contiguous() : bias;
  library->check(library->reduce(out.data_ptr(), addresses.data(), static_cast<int32_t>(addresses.size()),
                                 out.numel(), library_dtype(out.scalar_type()),
                                 added.defined() ? added.const_data_ptr() : nullptr, out.size(-1),
                                 most_blocks, stream));
}

}  // namespace pyruntime
