// torch's symm_mem operators, implemented by the primitives.
//
// torch (torch/distributed/_symmetric_memory) defines them and implements them only for its GPUs. The results
// have the shapes and strides of torch's own: code that torch.compile has made relies on both.
#pragma once

#include <c10/core/DeviceType.h>

namespace pyruntime {

// Registers our operators for tensors on such devices, in place of torch's if it has any. May be called
// again. torch must have defined them.
void use_symm_mem_operators(c10::DeviceType device);

}  // namespace pyruntime
