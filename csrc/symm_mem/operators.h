// torch's symm_mem operators, over the primitives.
//
// torch (torch/distributed/_symmetric_memory) defines them, and implements them for its GPUs alone. What they
// return has the shapes and the strides of torch's own: code that torch.compile has made relies on both.
#pragma once

#include <c10/core/DeviceType.h>

namespace pyruntime {

// From now on these operators are ours for tensors on such devices: in place of torch's, where it has any.
// May be called again. torch must have defined them.
void use_symm_mem_operators(c10::DeviceType device);

}  // namespace pyruntime
