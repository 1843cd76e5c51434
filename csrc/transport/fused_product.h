// Products whose rows move between the ranks inside one kernel: which kernel, by which tiles.
#pragma once

#include <string>
#include <vector>

#include "transport/block_budget.h"
#include "transport/device_library.h"
#include "transport/transport.h"

namespace pyruntime {

// Names of the tiles of the fused kernels on the current device: "small" and, where there is room for them,
// "large" of the portable kernels; with "sm90-" in front those of the kernels for Hopper.
std::vector<std::string> tile_names(const DeviceLibrary& library);
// Of these, the ones that are not what the rule takes for [rows, k] x [k, n], rows being of all ranks.
std::vector<std::string> other_tile_names(const DeviceLibrary& library, int world_size, int64_t rows,
                                          int64_t n, int64_t k);

// Which tiles compute a product is each rank's own affair: what ranks signal to each other is the same for
// all. Where the kernel for Hopper refuses a product, by name or not, the portable one takes it, by its rule.

// Where a fused kernel runs. `owner`: whose graphs it is captured into.
struct FusedPlace {
  BlockBudget& budget;
  c10::Stream stream;
  void* handle;  // the stream, as the library takes it
  bool is_captured;
  const void* owner;
};

// Why a fused product [rows, *] x [*, n] would be crowded there now, rows being of all ranks; empty where it
// would not. This rank's own affair: it depends on what else its device does.
std::string why_crowded(const DeviceLibrary& library, int world_size, int64_t rows, int64_t n,
                        const FusedPlace& place);

// `rows` over all ranks. The gather's slot stays readable; the scatter ends its flight.
void gather_and_multiply(const DeviceLibrary& library, const PyruntimeGroup& group, int64_t rows,
                         const FusedProduct& product, const FusedPlace& place);
void multiply_and_scatter(const DeviceLibrary& library, const PyruntimeGroup& group, int64_t rows,
                          const FusedProduct& product, const FusedPlace& place);

}  // namespace pyruntime
