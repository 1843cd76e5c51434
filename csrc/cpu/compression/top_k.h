// The k values of largest magnitude, fused with error feedback (Aji and Heafield 2017, arXiv 1704.05021).
//
// In memory: k indices, int32, ascending; then k values, float32. Of values of one magnitude the first ones
// are taken, so that the result depends on nothing but the values. NaN counts as the largest magnitude.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace pyruntime::cpu {

// Bytes that k values take.
int64_t top_k_bytes(int64_t k);

// packed uint8 [top_k_bytes] = the k largest of x = values (+ residual, where that is given, which becomes x
// without them). values [n], n < 2^31, float32, bfloat16 or float16; residual float32 [n].
void top_k(const at::Tensor& values, int64_t k, const at::Tensor& packed,
           const std::optional<at::Tensor>& residual);

// ||x - Q(x)||^2 of x = values (+ residual) for each of so many k; nothing is changed. Not finite where a
// value is not.
std::vector<double> top_k_errors(const at::Tensor& values, const std::vector<int64_t>& ks,
                                 const std::optional<at::Tensor>& residual);

// out float32 [n] += the values at their places. Raises IndexError for a place that out does not have.
void add_top_k(const at::Tensor& packed, const at::Tensor& out);

}  // namespace pyruntime::cpu
