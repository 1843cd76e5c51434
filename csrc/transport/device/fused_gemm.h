// Runs GEMMs whose rows move between the ranks inside one kernel: chooses the kernel and its tiles.
#pragma once

#include <string>
#include <vector>

#include "transport/device/block_budget.h"
#include "transport/device/library.h"
#include "transport/device_sharing.h"

namespace pyruntime {

// Names of the tiles of the fused kernels on the current device: "small" and, if there is room for them,
// "large" of the portable kernels; with the prefix "sm90-" those of the kernels for Hopper.
std::vector<std::string> tile_names(const DeviceLibrary& library);
// The tile names that the rule does not choose for [rows, k] x [k, n]; rows are of all ranks.
std::vector<std::string> other_tile_names(const DeviceLibrary& library, int world_size, int64_t rows,
                                          int64_t n, int64_t k);

// Each rank may choose its tiles: ranks signal the same to each other with any. If the kernel for Hopper
// refuses a GEMM, named or not, the portable one computes it, by its own rule.

// The place where a fused kernel runs. `owner` owns the graphs that capture it.
struct FusedPlace {
  BlockBudget& budget;
  c10::Stream stream;
  void* handle;  // the stream, as the library takes it
  bool is_captured;
  const void* owner;
};

// Says why a fused GEMM [rows, *] x [*, n] would be crowded there now; empty if it would not. Rows are of all
// ranks. Ranks may differ: it depends on what else their devices do.
std::string why_crowded(const DeviceLibrary& library, int world_size, int64_t rows, int64_t n,
                        const FusedPlace& place);

// A kernel of the library: the portable one, or the one for Hopper, which may be missing.
using FusedKernel = decltype(&pyruntime_all_gather_matmul);

// Runs the GEMM; `rows` are of all ranks. A gather's slot stays readable; a scatter ends its flight.
void multiply_fused(const DeviceLibrary& library, const PyruntimeGroup& group, int64_t rows,
                    const FusedGemm& gemm, const FusedPlace& place, FusedKernel portable, FusedKernel hopper);

}  // namespace pyruntime
