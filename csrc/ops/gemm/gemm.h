// GEMMs on row chunks, in the three forms that a linear layer has.
//
// Operands are [blocks, rows, width] as in ops/operand.h; weights are [N, K]. Results are rounded once from
// fp32 sums. The vendor library computes them, except bf16 on CPUs where ours is known to be faster for the
// shape (gemm_rule.h): ours is as fast with few rows at once (cpu/packed_matrix.h). On a CPU fp16 runs in
// fp32, several times faster than the library's emulation. So does bf16 that is not ours if the CPU has no
// AVX-512, a hundred times faster.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "cpu/packed_matrix.h"

namespace pyruntime {

// [blocks, rows, width] as [blocks * rows, width]; a view if all rows have one stride.
inline at::Tensor as_matrix(const at::Tensor& blocks) {
  return blocks.flatten(0, -2);
}

// Whether torch lets oneDNN multiply on this CPU: bf16, and fp32 too; elsewhere it raises. ONEDNN_MAX_CPU_ISA
// counts.
bool library_has_bf16();

// x @ weight^T [+ bias], x [..., K], weight [N, K]: [..., N].
at::Tensor linear_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

// rows @ weight^T if `transposed`, else rows @ weight, chunk by chunk, for `rows` rows in all. Their number
// and the weight's shape decide whether the weight is arranged once for all chunks; nobody may write into it
// meanwhile.
class WeightGemm {
 public:
  WeightGemm(const at::Tensor& weight, bool transposed, int64_t rows);

  // out = rows @ ... [+ bias], or out += rows @ ... without bias. rows [b, m, *], out [b, m, *], which may be
  // strided over b.
  void write(const at::Tensor& out, const at::Tensor& rows, const at::Tensor& bias, bool accumulate) const;

 private:
  at::Tensor right_;
  std::optional<cpu::PackedMatrix> packed_;
};

// Whether products of `rows` rows with this weight, either way, are a CPU library's. It prepares one for each
// number of rows, which takes longer than the product of a few hundred rows, and keeps it.
bool library_multiplies(const at::Tensor& weight, int64_t rows);

// dy^T @ x, some rows of the result at a time. dy [rows, N], which may be columns of a wider matrix, x [rows,
// K].
class WeightGradientGemm {
 public:
  WeightGradientGemm(const at::Tensor& dy, const at::Tensor& x);

  // out = dy^T @ x, or out += dy^T @ x, for the rows of the result from `first` on. out [*, K] contiguous, of
  // the operands' dtype, or fp32 for narrower ones: then our GEMM adds without rounding (packed_matrix.h).
  void write(const at::Tensor& out, int64_t first, bool accumulate) const;
  // out [b, m, K], of the operands' dtype: block i = rows first + i * step and following of dy^T @ x. Blocks
  // are contiguous, but may lie apart. One launch on a device.
  void write_blocks(const at::Tensor& out, int64_t first, int64_t step) const;

 private:
  at::Tensor dy_, x_;
  std::optional<cpu::PackedColumns> packed_dy_;
  std::optional<cpu::PackedMatrix> packed_x_;
};

// dy^T @ x summed over all rows of all blocks. dy [b, m, N], x [b, m, K]; returns [N, K].
at::Tensor linear_wgrad(const at::Tensor& dy, const at::Tensor& x);

}  // namespace pyruntime
