// Torch's device, stream and dtype for a call of the device kernels.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "cuda/launchers.h"

namespace pyruntime {

// Makes `device` the current one within a scope; `stream` is its current stream in the form that kernels
// take, or nullptr on the CPU, for the kernels' host dialect.
struct DeviceCall {
  explicit DeviceCall(const at::Device& device) : on(device) {
    if (!device.is_cpu())
      stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
  }

  c10::DeviceGuard on;
  void* stream = nullptr;
};

// The kernels compute operators for these devices, if a library is there: GPUs, and an accelerator that
// registers with torch at run time.
inline constexpr c10::DispatchKey kDeviceKeys[] = {c10::DispatchKey::CUDA, c10::DispatchKey::PrivateUse1};

// The PyruntimeDtype; that of float32 for anything but bfloat16 and float16.
inline int32_t dtype_code(at::ScalarType dtype) {
  if (dtype == at::kBFloat16) return PYRUNTIME_BF16;
  return dtype == at::kHalf ? PYRUNTIME_FP16 : PYRUNTIME_FP32;
}

}  // namespace pyruntime
