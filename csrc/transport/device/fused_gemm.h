// GEMMs whose rows move between the ranks inside one kernel: which kernel, by which tiles.
#pragma once

#include <string>
#include <vector>

#include "transport/device/block_budget.h"
#include "transport/device/library.h"
#include "transport/device_sharing.h"

namespace pyruntime {

// Names of the tiles of the fused kernels on the current device: "small" and, where there is room for them,
// "large" of the portable kernels; with "sm90-" in front those of the kernels for Hopper.
std::vector<std::string> tile_names(const DeviceLibrary& library);
// Of these, the ones that are not what the rule takes for [rows, k] x [k, n], rows being of all ranks.
std::vector<std::string> other_tile_names(const DeviceLibrary& library, int world_size, int64_t rows,
                                          int64_t n, int64_t k);

// Which tiles compute a GEMM is each rank's own affair: what ranks signal to each other is the same for
// all. Where the kernel for Hopper refuses a GEMM, by name or not, the portable one takes it, by its rule.

// Where a fused kernel runs. `owner`: whose graphs it is captured into.
struct FusedPlace {
  BlockBudget& budget;
  c10::Stream stream;
  void* handle;  // the stream, as the library takes it
  bool is_captured;
  const void* owner;
};

// Why a fused GEMM [rows, *] x [*, n] would be crowded there now, rows being of all ranks; empty where it
// would not. This rank's own affair: it depends on what else its device does.
std::string why_crowded(const DeviceLibrary& library, int world_size, int64_t rows, int64_t n,
                        const FusedPlace& place);

// A kernel of the library: the portable one, or that for Hopper, which may be missing.
using FusedKernel = decltype(&pyruntime_all_gather_matmul);

// `rows` over all ranks. A gather's slot stays readable; a scatter ends its flight.
void multiply_fused(const DeviceLibrary& library, const PyruntimeGroup& group, int64_t rows,
                    const FusedGemm& gemm, const FusedPlace& place, FusedKernel portable, FusedKernel hopper);

}  // namespace pyruntime
