// Products whose rows move between the ranks inside one kernel: which kernel, by which tiles.
#pragma once

#include "transport/device_library.h"
#include "transport/transport.h"

namespace pyruntime {

// `rows` over all ranks. The gather's slot stays readable; the scatter ends its flight.
void gather_and_multiply(const DeviceLibrary& library, const PyruntimeGroup& group, int64_t rows,
                         const FusedProduct& product, void* stream);
void multiply_and_scatter(const DeviceLibrary& library, const PyruntimeGroup& group, int64_t rows,
                          const FusedProduct& product, void* stream);

}  // namespace pyruntime
