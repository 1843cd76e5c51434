// Sums the ranks' parts of an owner's rows, on any device.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "transport/device/library.h"

namespace pyruntime {

// The dtype in the form that the library's functions take: bf16, fp16 or fp32.
PyruntimeDtype library_dtype(c10::ScalarType dtype);

// out = round(parts[0] + parts[1] + ... (+ bias [width], added to every row)), in that order, in fp32 (fp64
// for doubles); the parts have the shape of `out` [.., width], and lie as pyruntime_reduce() says. One kernel
// of `library` sums on `stream`, the current one; torch sums if `library` is nullptr, and for doubles.
// most_blocks: as of pyruntime_reduce().
void sum_in_order(const at::Tensor& out, const std::vector<at::Tensor>& parts, const at::Tensor& bias,
                  const DeviceLibrary* library, void* stream, int32_t most_blocks = 0);

}  // namespace pyruntime
