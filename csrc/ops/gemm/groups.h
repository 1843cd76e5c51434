// Products of several matrices with the rows of each, in one launch: torch's grouped GEMM. On a GPU a product
// for each expert leaves multiprocessors without work in its last wave.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace pyruntime {

// The end of each matrix's rows, G numbers for matrices [G, N, K].
using Ends = std::vector<int64_t>;

// Whether such devices multiply bf16 matrices in one launch: Hopper, for which the kernels are built.
// Elsewhere torch multiplies one after the other, and its host waits for the ends.
bool has_grouped_gemm(c10::DeviceType type);
// Whether products of these matrices [G, N, K] are one launch there: bf16 whose rows begin at multiples of 16
// bytes.
bool multiplies_groups(const at::Tensor& matrices);
// Sets it for devices of that type, whatever they are; nothing: as above. For tests.
void set_multiplies_groups(c10::DeviceType type, std::optional<bool> multiplies);

// The ends as the functions below take them, int32 on the device; the host does not wait.
at::Tensor ends_on(c10::Device device, const Ends& ends);
// Multiplies row i by the matrix whose rows it is among: row @ matrix^T if `transposed`, else row @ matrix.
// Rows from the last end on are not written.
at::Tensor multiply_groups(const at::Tensor& rows, const at::Tensor& matrices, bool transposed,
                           const at::Tensor& ends);
// Returns dy^T @ x over the rows of each, [G, N, K]; zero for one without rows. dy [rows, N], x [rows, K].
at::Tensor gradients_of_groups(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& ends);

}  // namespace pyruntime
