// Compression of values where they lie: on the CPU by csrc/cpu/compression, on devices by their kernels, bit
// for bit alike. Raises ValueError and TypeError for what does not fit, and NotImplementedError for a device
// without kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace pyruntime {

// Says why values on that device cannot be quantized or packed as fp8; empty if they can.
std::string why_no_compression(c10::Device device);

// As cpu/compression/fp8.h says.
void pack_fp8(const at::Tensor& values, const at::Tensor& packed);
void unpack_fp8(const at::Tensor& packed, const at::Tensor& out);

// As cpu/compression/quantize.h says.
void quantize(const at::Tensor& values, int64_t bits, const at::Tensor& packed,
              const std::optional<at::Tensor>& residual,
              const std::optional<std::pair<int64_t, int64_t>>& rounding);
void dequantize(const at::Tensor& packed, int64_t bits, const at::Tensor& out, bool add);

}  // namespace pyruntime
