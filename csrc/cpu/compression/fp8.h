// Packs each value of a row into one byte: e4m3 (sign, 4 bits of exponent, 3 of mantissa; up to 448) times a
// power of two that 128 values share. The MX formats of the Open Compute Project share one among 32.
//
// The scale is the least power of two with which the largest magnitude is at most 448. Packing a value that
// has already been rounded is therefore exact, also as bfloat16. A block that contains NaN or infinity reads
// as NaN; magnitudes below 2^-118 become 0.
//
// Memory of a row [width]: its codes, then a byte for each block, its scale's biased exponent as in a float.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

namespace pyruntime::cpu {

// The bytes of a packed row of `width` values. Raises ValueError for a negative width.
int64_t fp8_bytes(int64_t width);

// Raises ValueError or TypeError, in the name of `op`, unless values [rows, width] are float32, bfloat16 or
// float16, packed is uint8 [rows, fp8_bytes(width)], and both are contiguous on one device.
void check_fp8(const at::Tensor& values, const at::Tensor& packed, std::string_view op);

// Packs values into packed, and unpacks packed into out; both on the CPU, as check_fp8() says.
void pack_fp8(const at::Tensor& values, const at::Tensor& packed);
void unpack_fp8(const at::Tensor& packed, const at::Tensor& out);

}  // namespace pyruntime::cpu
