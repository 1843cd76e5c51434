// An activation in the form that the engines use: blocks x rows x width.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "core/chunk_plan.h"
#include "transport/descriptor.h"

namespace pyruntime {

// x [d_0, ..., d_dim, ..., K] as [blocks, rows * inner, K]: blocks = product of the dimensions before `dim`,
// inner = product of those between `dim` and the last. dim = 0 of [M, K] gives [1, M, K]; dim = 1 of [B, S,
// K] gives [B, S, K].
struct Operand {
  at::Tensor data;  // [blocks, rows * inner, width], contiguous
  int64_t blocks;
  int64_t rows;  // size along the cut dimension
  int64_t inner;
  int64_t width;
  std::vector<int64_t> sizes;  // of the original tensor
  int64_t dim;

  // Raises ValueError if x has no such dimension or is a vector.
  static Operand of(const at::Tensor& x, int64_t dim, const char* what);

  // x [.., K] as one block of rows, whatever its leading dimensions.
  static Operand of_rows(const at::Tensor& x, const char* what);
  // The same where only the form of x counts and its elements are not read: x may have one for all.
  static Operand form_of(const at::Tensor& x, int64_t dim, const char* what);

  // x as one of these two (without `dim`: of_rows), for a linear with weights [N_i, K] on the same device and
  // in the same floating dtype; biases are [N_i], or undefined. Raises ValueError or TypeError with a
  // sentence.
  static Operand of_linear(const char* op, const at::Tensor& x, std::optional<int64_t> dim, const char* what,
                           at::TensorList weights, at::TensorList biases);

  // The description of a flight of such rows, which ranks compare: its rows over all ranks and its width.
  FlightDescriptor flight(Op op, int64_t all_rows, int64_t width_of_flight) const {
    const auto dtype = static_cast<int32_t>(data.scalar_type());
    return {op, dtype, all_rows, blocks, inner, width_of_flight, /*with_bias=*/false, rows};
  }

  // The sizes of a tensor like x with `rows` along the cut dimension and `width` as its last.
  std::vector<int64_t> sizes_with(int64_t rows, int64_t width) const;
  // The rows of one chunk, [blocks, chunk.rows * inner, width] (strided when there are several blocks).
  at::Tensor rows_of(const Chunk& chunk) const { return rows_of(data, chunk); }
  // The same rows of another tensor of the form [blocks, rows * inner, *].
  at::Tensor rows_of(const at::Tensor& other, const Chunk& chunk) const;
  // All other rows of such a tensor, in order.
  at::Tensor rows_but(const at::Tensor& other, const Chunk& chunk) const;
};

// Every optional as a tensor, undefined where absent; an empty list stands for `count` absent ones. Raises
// ValueError for another number of them.
std::vector<at::Tensor> optional_tensors(const c10::List<std::optional<at::Tensor>>& given, size_t count,
                                         const char* op);

}  // namespace pyruntime
