// The formats in which rows travel between ranks: unchanged, or rounded to fewer bytes.
// pyruntime/comm/wire.py has the same formats for messages.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/string_view.h>

#include <cstdint>

namespace pyruntime {

class Wire {
 public:
  Wire() = default;  // unchanged

  // format: "same", "bf16" or "fp8" (cpu/compression/fp8.h). Raises ValueError for another name, for a format
  // that rounds unless rows are float32, bfloat16 or float16, and for fp8 on devices without their kernels.
  static Wire named(c10::string_view format, c10::ScalarType dtype, c10::Device device);

  bool rounds() const { return format_ != Format::kSame; }
  c10::ScalarType travels_as(c10::ScalarType dtype) const;
  // The elements of a row as it travels.
  int64_t travelling_width(int64_t width) const;

  // Writes rows [blocks, n, width] to travelled [blocks, n, travelling_width(width)]; each may be strided
  // over blocks.
  void write(const at::Tensor& rows, const at::Tensor& travelled) const;
  // The inverse of write(): reads `travelled` into rows.
  void read(const at::Tensor& travelled, const at::Tensor& rows) const;
  // Returns rows [.., width] as a receiver reads them, in new memory, or `rows` itself if nothing is rounded.
  // Rounding again changes nothing.
  at::Tensor rounded(const at::Tensor& rows) const;

 private:
  enum class Format { kSame, kBfloat16, kFp8 };
  explicit Wire(Format format) : format_(format) {}

  Format format_ = Format::kSame;
};

}  // namespace pyruntime
