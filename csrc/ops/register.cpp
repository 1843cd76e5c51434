#include "ops/register.h"

namespace pyruntime {

void register_primitives(torch::Library& library) {
  register_column_linears(library);
  register_row_linears(library);
  register_collectives(library);
  register_linear(library);
  register_device_adamw(library);
  register_device_layers(library);
}

}  // namespace pyruntime
