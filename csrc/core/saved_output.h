// What an autograd function saves of its own outputs.
#pragma once

#include <ATen/core/Tensor.h>

namespace pyruntime {

// The same memory, and the same counter of what was written in place, without a history. An output itself
// would keep the function alive that keeps it: torch parts the two when a function is done, which activation
// checkpointing does not let it be (it ends the second forward pass by an exception, in the midst of saving).
// To be called where autograd's keys are not excluded.
inline at::Tensor saved_output(const at::Tensor& output) {
  return output.detach();
}

}  // namespace pyruntime
