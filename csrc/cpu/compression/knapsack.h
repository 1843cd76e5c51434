// The knapsack with classes that pyruntime/data_parallel/compression/allocation.py solves.
#pragma once

#include <cstdint>
#include <vector>

namespace pyruntime::cpu {

// Returns one choice for each layer: the sum of sizes is the least for which the sum of steps is at most
// `levels`. Empty if no choices satisfy that. sizes, steps: [layer][choice]; raises ValueError for negative
// steps or unequal lengths.
std::vector<int64_t> least_choices(const std::vector<std::vector<double>>& sizes,
                                   const std::vector<std::vector<int64_t>>& steps, int64_t levels);

}  // namespace pyruntime::cpu
