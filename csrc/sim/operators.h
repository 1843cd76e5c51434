#pragma once

#include <ATen/core/Tensor.h>

namespace sim {

// A tensor of the CPU over the memory of one of a device, which it does not keep. For threads of streams.
at::Tensor over(const at::Tensor& tensor);

}  // namespace sim
