// torch.library registration of the primitives, with autograd.
#pragma once

#include <torch/library.h>

namespace pyruntime {

void register_primitives(torch::Library& library);
// linear.cpp; called by register_primitives.
void register_linear(torch::Library& library);

}  // namespace pyruntime
