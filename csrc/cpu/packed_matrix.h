// Operands of a bf16 GEMM, arranged once for a processor with AVX512-BF16 and multiplied with as many blocks
// of rows as come. One thread at a time.
//
// A library arranges its right operand anew in every call, which for the few rows of a chunk costs a fifth to
// a third of the time; here 16 rows run as fast as 512. Every element of a product is summed over k in order,
// in fp32, and rounded once, whatever rows are multiplied with it: how rows are cut into chunks cannot change
// a bit. In which order tiles are visited: tile_order.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "cpu/tile_order.h"

namespace pyruntime::cpu {

// The columns of a [k, m], which become the rows of a^T @ b: the left operand of a weight's gradient.
class PackedColumns {
 public:
  // a: bf16 of contiguous rows.
  explicit PackedColumns(const at::Tensor& a);

 private:
  friend class PackedMatrix;
  // From column `column` and pair `pair` on, of a block of `pairs` that begins with that pair.
  const int32_t* at(int64_t column, int64_t pair, int64_t pairs) const;

  TileOrder order_;
  int64_t depth_, width_, strips_;
  // A part for each block of the depth, [strips, pairs of the block, kRows, 2]. Beyond the matrix there is
  // anything, whose products nobody keeps; the half of an odd k stands beside a zero.
  at::Tensor packed_;
};

// A right operand.
class PackedMatrix {
 public:
  // Whether b [k, n] can be one: bf16 on a CPU with AVX512-BF16 and without AMX, which oneDNN has kernels
  // for.
  static bool can_hold(const at::Tensor& b);

  // b: [k, n] bf16 of any strides, read by the first product.
  explicit PackedMatrix(const at::Tensor& b);

  // out = a @ b [+ bias], or out += a @ b. a [m, k] and out [m, n]: rows of contiguous elements; bias [n].
  void multiply(const at::Tensor& out, const at::Tensor& a, const at::Tensor& bias, bool accumulate) const;
  // out = a^T @ b, or out += a^T @ b, of the columns of a [k, m] from `first` on, as many as out [*, n] has
  // rows.
  void multiply_transposed(const at::Tensor& out, const PackedColumns& a, int64_t first,
                           bool accumulate) const;

 private:
  int32_t* panel(int64_t index) const;
  // Unless all are packed.
  void pack_panel(int64_t index) const;
  void pack() const;
  // work(index of a panel, begin, end) for all rows of all panels, `group` rows at a time, on the threads
  // that torch computes with.
  template <typename Work>
  void for_panels(int64_t rows, int64_t group, const Work& work) const;

  int64_t depth_, width_;
  bool by_columns_;            // whether b's columns are contiguous
  mutable at::Tensor source_;  // b; undefined once it is packed
  // Panels of 64 columns, [panels, ceil(k / 2), 64, 2]: what two neighbours along k are multiplied with lies
  // together. Beyond the matrix there are zeros.
  at::Tensor panels_;
};

}  // namespace pyruntime::cpu
