// An activation seen as the engine sees it: blocks x rows x width.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "core/chunk_plan.h"

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

  // Raises ValueError where x has no such dimension or is a vector.
  static Operand of(const at::Tensor& x, int64_t dim, const char* what);

  // x [.., K] as one block of rows, whatever its leading dimensions.
  static Operand of_rows(const at::Tensor& x, const char* what);

  // Sizes of a tensor like x with `rows` along the cut dimension and `width` as its last.
  std::vector<int64_t> sizes_with(int64_t rows, int64_t width) const;
  // The rows of one chunk, [blocks, chunk.rows * inner, width] (strided when there are several blocks).
  at::Tensor rows_of(const Chunk& chunk) const { return rows_of(data, chunk); }
  // The same rows of another tensor of the form [blocks, rows * inner, *].
  at::Tensor rows_of(const at::Tensor& other, const Chunk& chunk) const;
  // All other rows of such a tensor, in order.
  at::Tensor rows_but(const at::Tensor& other, const Chunk& chunk) const;
};

// --- checks of what a user passes; each raises ValueError or TypeError with a sentence

// x [..., K] and weights [N_i, K] on one device, of one floating dtype; biases are [N_i].
void check_linear(const char* op, const at::Tensor& x, at::TensorList weights, at::TensorList biases);

// This rank's share of `rows` is what x_shard holds.
void check_shard_rows(const char* op, const ChunkPlan& plan, const Operand& x_shard);

// Every optional as a tensor, undefined where absent; an empty list stands for `count` absent ones.
std::vector<at::Tensor> optional_tensors(const c10::List<std::optional<at::Tensor>>& given, size_t count,
                                         const char* op);

}  // namespace pyruntime
