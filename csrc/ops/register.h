// torch.library registration of the primitives, with autograd.
#pragma once

#include <torch/library.h>

namespace pyruntime {

void register_primitives(torch::Library& library);

// One for each domain, in the files of these names; called by register_primitives.
void register_column_linears(torch::Library& library);
void register_row_linears(torch::Library& library);
void register_collectives(torch::Library& library);
// linear.cpp
void register_linear(torch::Library& library);
void register_device_adamw(torch::Library& library);
void register_device_layers(torch::Library& library);

}  // namespace pyruntime
