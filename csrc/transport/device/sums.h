// What the owner of rows does with the ranks' parts of them, on any device.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "transport/device/library.h"

namespace pyruntime {

// As the library's functions take it; bf16, fp16 or fp32.
PyruntimeDtype library_dtype(c10::ScalarType dtype);

// out = round(parts[0] + parts[1] + ... (+ bias [width], added to every row)), in that order, in fp32 (fp64
// for doubles); the parts have the shape of `out` [.., width]. By one kernel of `library` on `stream`, the
// current one; by torch's where `library` is nullptr, for doubles, and for more parts than the kernel takes.
void sum_in_order(const at::Tensor& out, const std::vector<at::Tensor>& parts, const at::Tensor& bias,
                  const DeviceLibrary* library, void* stream);

}  // namespace pyruntime
