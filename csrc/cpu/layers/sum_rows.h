// Sums of rows, on CPUs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace pyruntime::layers {

// out[i] = the sum of values[places[j]] over begins[i] <= j < begins[i + 1], in that order, added in fp32
// (fp64 for fp64 rows) and rounded once. out [n, D], values [m, D]; begins has n + 1 numbers.
void sum_rows(const at::Tensor& out, const at::Tensor& values, const int64_t* begins, const int64_t* places);

}  // namespace pyruntime::layers
