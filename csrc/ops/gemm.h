// The vendor library's GEMM on row chunks, in the three forms that a linear layer has.
//
// Operands are [blocks, rows, width] as in ops/operand.h; weights are [N, K]. GEMMs are rounded once from
// the library's fp32 accumulators. On a CPU fp16 runs in fp32, several times faster than the library's own
// emulation, and so does bf16 where the CPU has no AVX-512, a hundred times faster.
#pragma once

#include <ATen/core/Tensor.h>

namespace pyruntime {

// [blocks, rows, width] as [blocks * rows, width]; a view where the rows lie at one distance.
inline at::Tensor as_matrix(const at::Tensor& blocks) {
  return blocks.flatten(0, -2);
}

// x @ weight^T [+ bias], x [..., K], weight [N, K]: [..., N].
at::Tensor linear_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);
// out = x @ weight^T [+ bias].  x [b, m, K], weight [N, K], out [b, m, N], which may be strided over b.
void linear_forward(const at::Tensor& out, const at::Tensor& x, const at::Tensor& weight,
                    const at::Tensor& bias);

// out = dy @ weight, or out += dy @ weight.  dy [b, m, N], out [b, m, K].
void linear_dgrad(const at::Tensor& out, const at::Tensor& dy, const at::Tensor& weight, bool accumulate);

// dy^T @ x summed over all rows of all blocks.  dy [b, m, N], x [b, m, K]; returns [N, K].
at::Tensor linear_wgrad(const at::Tensor& dy, const at::Tensor& x);
// out = dy^T @ x, or out += dy^T @ x.  dy [rows, N], which may be columns of a wider matrix, x [rows, K], out
// [N, K] contiguous.
void write_linear_wgrad(const at::Tensor& out, const at::Tensor& dy, const at::Tensor& x, bool accumulate);

}  // namespace pyruntime
