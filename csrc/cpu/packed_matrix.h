// Operands of a bf16 GEMM, packed once and multiplied with any number of blocks of rows, on processors with
// AVX512-BF16 or AVX2. One thread at a time may use an operand.
//
// A library packs its right operand in every call, which for the few rows of a chunk costs a fifth to a third
// of the time; here 16 rows run as fast as 512. Every element of a product is summed over k in order, in
// fp32, and rounded once. So the bits do not depend on how rows are cut into chunks. Order of tiles:
// tile_order.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "cpu/tile_order.h"

namespace pyruntime::cpu {

// The packed columns of a [k, m], the left operand of a weight's gradient: they are the rows of a^T @ b.
class PackedColumns {
 public:
  // a: bf16, with contiguous rows.
  explicit PackedColumns(const at::Tensor& a);

 private:
  friend class PackedMatrix;
  // Returns the strip that begins with column `column`, in the block of `pairs` pairs that begins with
  // `pair`.
  const int32_t* strip_of(int64_t column, int64_t pair, int64_t pairs) const;

  TileOrder order_;
  int64_t depth_, width_, strips_;
  // For each block of the depth [strips, pairs of the block, kRows, 2]. Elements beyond the matrix are
  // undefined, and their products are discarded. The missing half of an odd k is zero.
  at::Tensor packed_;
};

// The packed right operand b [k, n].
class PackedMatrix {
 public:
  // Whether b [k, n] can be packed: bf16 on an x86 CPU with AVX2 but no AMX, for which oneDNN has kernels.
  static bool can_hold(const at::Tensor& b);

  // b: bf16 of any strides; it is read by the first product, so it must not change before.
  explicit PackedMatrix(const at::Tensor& b);

  // out = a @ b [+ bias], or out += a @ b. a [m, k] and out [m, n] have contiguous rows; bias [n].
  void multiply(const at::Tensor& out, const at::Tensor& a, const at::Tensor& bias, bool accumulate) const;
  // out = a^T @ b, or out += a^T @ b, for the columns of a [k, m] from `first` on, one a row of out [*, n].
  // In an fp32 out the sums are not rounded: products of the parts of a matrix, cut after even rows, add up
  // to the bits of the whole.
  void multiply_transposed(const at::Tensor& out, const PackedColumns& a, int64_t first,
                           bool accumulate) const;

 private:
  void* panel(int64_t index) const;
  // Does nothing if all panels are packed.
  void pack_panel(int64_t index) const;
  void pack() const;
  // Calls work(panel index, begin, end) for all rows of all panels, `group` rows at a time, on torch's
  // threads.
  template <typename Work>
  void for_panels(int64_t rows, int64_t group, const Work& work) const;

  int64_t depth_, width_;
  bool by_columns_;            // whether b's columns are contiguous
  mutable at::Tensor source_;  // b; undefined after packing
  // Panels of kPanel columns, [panels, bytes of one]; 0 beyond the matrix. bf16_tiles_*.h know how they lie.
  at::Tensor panels_;
};

}  // namespace pyruntime::cpu
