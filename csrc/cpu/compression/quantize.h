// Uniform quantisation of values to 1 to 8 bits, block by block, fused with error feedback.
//
// A block is 512 values, the last one what is left. It has one float32, its step, and codes of `bits` bits:
//
//     bits >= 2:   value = (code - M) step,   M = 2^(bits - 1) - 1,   step = max|x| / M
//     bits == 1:   value = (2 code - 1) step, step = max|x|
//
// where values are rounded at random. To the nearest, step = mean|x| of 1 bit, and of 2 bits at most
// 2 mean|x|: of three values of which the outer ones are a block's largest, nearly all would be zero.
//
// so that zero is a value from 2 bits on: rounded to the nearest, a value is never further from its code than
// from zero, and what is lost of a block is at most the block (error feedback asks for that: Karimireddy et
// al. 2019, arXiv 1901.09847, assumption A). Rounded at random the mean is exact (Alistarh et al. 2017, QSGD,
// arXiv 1610.02132). A block that holds NaN or infinity has the step NaN, and is NaN where it is read.
//
// In memory: the steps of all blocks, then each block's codes as `bits` planes of a bit each. Of a block of n
// values, bit j of byte i of a plane belongs to the value j s + i, with s = ceil(n / 8): a layout that every
// width shares, and that is packed and unpacked by whole vectors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace pyruntime::cpu {

inline constexpr int64_t kQuantizedBlock = 512;

// Bytes that so many values take.
int64_t quantized_bytes(int64_t count, int64_t bits);

// packed uint8 [quantized_bytes] = the codes of x = values (+ residual, where that is given, which becomes
// x - the values of the codes). values [n] float32, bfloat16 or float16; residual float32 [n]. rounding: to
// the nearest, or at random by (seed, index of the first value): each value by its seed and index alone.
void quantize(const at::Tensor& values, int64_t bits, const at::Tensor& packed,
              const std::optional<at::Tensor>& residual,
              const std::optional<std::pair<int64_t, int64_t>>& rounding);

// out float32 [n] = the values of the codes, or += them.
void dequantize(const at::Tensor& packed, int64_t bits, const at::Tensor& out, bool add);

// ||x - Q(x)||^2 of x = values (+ residual) at each of so many bits, rounded to the nearest, in one pass that
// changes nothing; NaN where a value is not finite.
std::vector<double> quantization_errors(const at::Tensor& values, const std::vector<int64_t>& bits,
                                        const std::optional<at::Tensor>& residual);

}  // namespace pyruntime::cpu
