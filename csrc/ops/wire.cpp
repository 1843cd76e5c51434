#include "ops/wire.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>

#include "cpu/compression/fp8.h"
#include "ops/device/device_compression.h"

namespace pyruntime {

Wire Wire::named(c10::string_view format, c10::ScalarType dtype, c10::Device device) {
  if (format == "same") return Wire();
  TORCH_CHECK_VALUE(format == "bf16" || format == "fp8", "wire='", format,
                    "' is no format of rows; use 'same', 'bf16' or 'fp8'.");
  const bool is_known = dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
  TORCH_CHECK_VALUE(is_known, "wire='", format, "' rounds float32, bfloat16 and float16, and rows are ",
                    dtype, "; use 'same'.");
  if (format == "bf16") return Wire(Format::kBfloat16);
  const std::string why_not = why_no_compression(device);
  TORCH_CHECK_VALUE(why_not.empty(), "wire='fp8' cannot round rows on ", device, ": ", why_not,
                    "; or use 'bf16'.");
  return Wire(Format::kFp8);
}

c10::ScalarType Wire::travels_as(c10::ScalarType dtype) const {
  if (format_ == Format::kSame) return dtype;
  return format_ == Format::kBfloat16 ? at::kBFloat16 : at::kByte;
}

int64_t Wire::travelling_width(int64_t width) const {
  return format_ == Format::kFp8 ? cpu::fp8_bytes(width) : width;
}

void Wire::write(const at::Tensor& rows, const at::Tensor& travelled) const {
  if (format_ != Format::kFp8) {
    travelled.copy_(rows);
    return;
  }
  for (int64_t block = 0; block < rows.size(0); ++block) {
    pack_fp8(rows.select(0, block), travelled.select(0, block));
  }
}

void Wire::read(const at::Tensor& travelled, const at::Tensor& rows) const {
  if (format_ != Format::kFp8) {
    rows.copy_(travelled);
    return;
  }
  for (int64_t block = 0; block < rows.size(0); ++block) {
    unpack_fp8(travelled.select(0, block), rows.select(0, block));
  }
}

at::Tensor Wire::rounded(const at::Tensor& rows) const {
  if (!rounds()) return rows;
  const at::Tensor block = rows.contiguous().flatten(0, -2).unsqueeze(0);
  const at::Tensor travelled = at::empty({1, block.size(1), travelling_width(block.size(2))},
                                         rows.options().dtype(travels_as(rows.scalar_type())));
  write(block, travelled);
  const at::Tensor result = at::empty_like(block);
  read(travelled, result);
  return result.view(rows.sizes());
}

}  // namespace pyruntime
