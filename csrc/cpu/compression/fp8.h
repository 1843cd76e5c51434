// Rows of values in a byte each: e4m3 (sign, 4 bits of exponent, 3 of mantissa; to 448) times a power of two
// that every 128 values of a row share (after the MX formats of the Open Compute Project, which share one
// among 32).
//
// A power of two, so that a value which has been rounded once is packed again exactly, also as bfloat16. It
// is the least with which the largest magnitude is not above 448. A block that holds NaN or infinity is NaN
// where it is read; magnitudes below 2^-118 are 0.
//
// In memory, of a row [width]: its codes, then a byte for each block, the exponent of its scale as a float
// has it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace pyruntime::cpu {

// Bytes of a packed row of so many values.
int64_t fp8_bytes(int64_t width);

// packed uint8 [rows, fp8_bytes(width)] = values [rows, width], float32, bfloat16 or float16; both
// contiguous.
void pack_fp8(const at::Tensor& values, const at::Tensor& packed);

// out [rows, width] = what was packed.
void unpack_fp8(const at::Tensor& packed, const at::Tensor& out);

}  // namespace pyruntime::cpu
