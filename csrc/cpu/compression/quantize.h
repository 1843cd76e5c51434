// Quantizes values uniformly to 1 to 8 bits, block by block, fused with error feedback.
//
// A block has 512 values, the last one the remaining ones. It stores a float32 step and codes of `bits` bits.
// With random rounding:
//
//     bits >= 2:   value = (code - M) step,   M = 2^(bits - 1) - 1,   step = max|x| / M
//     bits == 1:   value = (2 code - 1) step, step = max|x|
//
// Rounded to the nearest, the step is mean|x| for 1 bit, and at most 2 mean|x| for 2 bits: there are then
// only three values, and with a block's largest as the outer ones nearly all would become zero.
//
// From 2 bits on zero is one of the values. Rounded to the nearest, a value is therefore never further from
// its code than from zero, and a block loses at most itself. Error feedback requires that (Karimireddy et al.
// 2019, arXiv 1901.09847, assumption A). Random rounding is exact in the mean (Alistarh et al. 2017, QSGD,
// arXiv 1610.02132). A block that contains NaN or infinity has the step NaN and reads as NaN.
//
// Memory: the steps of all blocks, then each block's codes as `bits` planes of one bit a value. In a block of
// n values, bit j of byte i of a plane belongs to value j s + i, with s = ceil(n / 8). All widths share this
// layout, and it is packed and unpacked by whole vectors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace pyruntime::cpu {

inline constexpr int64_t kQuantizedBlock = 512;

// The bytes of `count` packed values. Raises ValueError for a negative count, or bits outside 1 to 8.
int64_t quantized_bytes(int64_t count, int64_t bits);

// Raise ValueError or TypeError for arguments that quantize() and dequantize() do not take on one device.
void check_quantize(const at::Tensor& values, int64_t bits, const at::Tensor& packed,
                    const std::optional<at::Tensor>& residual);
void check_dequantize(const at::Tensor& packed, int64_t bits, const at::Tensor& out);

// On the CPU. Writes the codes of x = values (+ residual, if given) to packed uint8 [quantized_bytes];
// residual becomes x minus the values of the codes. values [n] float32, bfloat16 or float16; residual float32
// [n]. rounding: to the nearest, or at random by (seed, index of the first value); the noise depends only on
// these.
void quantize(const at::Tensor& values, int64_t bits, const at::Tensor& packed,
              const std::optional<at::Tensor>& residual,
              const std::optional<std::pair<int64_t, int64_t>>& rounding);

// Writes the values of the codes to out float32 [n], or adds them.
void dequantize(const at::Tensor& packed, int64_t bits, const at::Tensor& out, bool add);

// Returns ||x - Q(x)||^2 of x = values (+ residual) for each number of bits, rounded to the nearest, in one
// pass that changes nothing; NaN if a value is not finite.
std::vector<double> quantization_errors(const at::Tensor& values, const std::vector<int64_t>& bits,
                                        const std::optional<at::Tensor>& residual);

}  // namespace pyruntime::cpu
