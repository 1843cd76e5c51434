// What a call of the device kernels needs of torch.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "cuda/launchers.h"

namespace pyruntime {

// The device of a tensor is the current one while this lives, and `stream` its current stream as kernels take
// it; nullptr on the CPU, for which the kernels' host dialect stands.
struct DeviceCall {
  explicit DeviceCall(const at::Device& device) : on(device) {
    if (!device.is_cpu())
      stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
  }

  c10::DeviceGuard on;
  void* stream = nullptr;
};

// PyruntimeDtype; of float32 for all that is neither bfloat16 nor float16.
inline int32_t dtype_code(at::ScalarType dtype) {
  if (dtype == at::kBFloat16) return PYRUNTIME_BF16;
  return dtype == at::kHalf ? PYRUNTIME_FP16 : PYRUNTIME_FP32;
}

}  // namespace pyruntime
