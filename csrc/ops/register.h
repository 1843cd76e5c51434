// torch.library registration of the primitives, with autograd.
#pragma once

#include <torch/library.h>

namespace pyruntime {

void register_primitives(torch::Library& library);

}  // namespace pyruntime
