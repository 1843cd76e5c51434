// Lets an autograd function save its own outputs.
#pragma once

#include <ATen/core/Tensor.h>

namespace pyruntime {

// The same memory and in-place version counter, without a history. An output itself would keep alive the
// function that saves it. torch breaks this cycle when a function ends, but activation checkpointing leaves
// the second forward pass by an exception, in the middle of saving. Call it where autograd's keys are not
// excluded.
inline at::Tensor saved_output(const at::Tensor& output) {
  return output.detach();
}

}  // namespace pyruntime
