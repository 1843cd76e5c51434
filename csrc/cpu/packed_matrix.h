// The right operand of a bf16 GEMM, arranged once for a processor with AVX512-BF16 and multiplied with as
// many blocks of rows as come. One thread at a time.
//
// A library arranges its right operand anew in every call, which for the few rows of a chunk costs a fifth to
// a third of the time; here 16 rows run as fast as 512. Every element of a product is summed over k in order,
// in fp32, and rounded once, whatever rows are multiplied with it: how rows are cut into chunks cannot change
// a bit.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace pyruntime::cpu {

class PackedMatrix {
 public:
  // Whether b [k, n] can be one: bf16 on a CPU with AVX512-BF16 and without AMX, which oneDNN has kernels
  // for.
  static bool can_hold(const at::Tensor& b);

  // b: [k, n] bf16 of any strides, read by the first product.
  explicit PackedMatrix(const at::Tensor& b);

  // out = a @ b [+ bias], or out += a @ b. a [m, k] and out [m, n]: rows of contiguous elements; bias [n].
  void multiply(const at::Tensor& out, const at::Tensor& a, const at::Tensor& bias, bool accumulate) const;
  // out = a^T @ b, or out += a^T @ b, of the columns of a from `first` on, as many as out [*, n] has rows. a:
  // [k, m], packed.
  void multiply_transposed(const at::Tensor& out, const PackedMatrix& a, int64_t first,
                           bool accumulate) const;

 private:
  // One panel, packed now unless all are.
  int32_t* panel(int64_t index) const;
  // work(index, panel, begin, end) for all rows of all panels, on the threads that torch computes with.
  template <typename Work>
  void for_panels(int64_t rows, const Work& work) const;
  void pack() const;

  int64_t depth_, width_;
  bool by_columns_;            // whether b's columns are contiguous
  mutable at::Tensor source_;  // b; undefined once it is packed
  // Panels of 64 columns, [panels, ceil(k / 2), 64, 2]: what two neighbours along k are multiplied with lies
  // together. Beyond the matrix there are zeros.
  at::Tensor panels_;
};

}  // namespace pyruntime::cpu
