// The knapsack with classes of pyruntime/data_parallel/compression/allocation.py.
#pragma once

#include <cstdint>
#include <vector>

namespace pyruntime::cpu {

// Of each layer the choice, so that sizes add up to the least that there is while steps add up to at most
// `levels`; empty where no choices do. sizes, steps: of each layer, by choice; steps are not negative.
std::vector<int64_t> least_choices(const std::vector<std::vector<double>>& sizes,
                                   const std::vector<std::vector<int64_t>>& steps, int64_t levels);

}  // namespace pyruntime::cpu
