// Packs the k largest magnitudes, fused with error feedback (Aji and Heafield 2017, arXiv 1704.05021).
//
// Memory: k indices, int32, ascending; then k values, float32. Among equal magnitudes the first are taken, so
// that the result depends only on the values. NaN counts as the largest magnitude.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace pyruntime::cpu {

// The bytes of k packed values.
int64_t top_k_bytes(int64_t k);

// Writes the k largest of x = values (+ residual, if given) to packed uint8 [top_k_bytes]; residual becomes x
// without them, or zero if a value is not finite. values [n], n < 2^31, float32, bfloat16 or float16;
// residual float32 [n].
void top_k(const at::Tensor& values, int64_t k, const at::Tensor& packed,
           const std::optional<at::Tensor>& residual);

// Returns ||x - Q(x)||^2 of x = values (+ residual) for each k, changing nothing. Not finite if x is not.
std::vector<double> top_k_errors(const at::Tensor& values, const std::vector<int64_t>& ks,
                                 const std::optional<at::Tensor>& residual);

// Adds the packed values to out float32 [n] at their places. Raises IndexError for a place outside out.
void add_top_k(const at::Tensor& packed, const at::Tensor& out);

}  // namespace pyruntime::cpu
