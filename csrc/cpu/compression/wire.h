// What rows travel as between CPU ranks: as they are, or rounded to fewer bytes. pyruntime/comm/wire.py has
// the same formats for messages.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/string_view.h>

#include <cstdint>

namespace pyruntime::cpu {

class Wire {
 public:
  Wire() = default;  // as they are, on any device

  // "same", "bf16" or "fp8" (fp8.h). Raises ValueError for another name, and where it is to round rows that
  // are not float32, bfloat16 or float16 on the CPU.
  static Wire named(c10::string_view format, c10::ScalarType dtype, c10::Device device);

  bool rounds() const { return format_ != Format::kSame; }
  c10::ScalarType travels_as(c10::ScalarType dtype) const;
  // Elements of a row as it travels.
  int64_t travelling_width(int64_t width) const;

  // travelled [blocks, n, travelling_width(width)] = rows [blocks, n, width] as they travel; each may be
  // strided over blocks.
  void write(const at::Tensor& rows, const at::Tensor& travelled) const;
  // rows = what was written as `travelled`.
  void read(const at::Tensor& travelled, const at::Tensor& rows) const;
  // What is read of rows [.., width] once they have travelled, in new memory; `rows` where nothing is
  // rounded. Rounding it again changes nothing.
  at::Tensor rounded(const at::Tensor& rows) const;

 private:
  enum class Format { kSame, kBfloat16, kFp8 };
  explicit Wire(Format format) : format_(format) {}

  Format format_ = Format::kSame;
};

}  // namespace pyruntime::cpu
