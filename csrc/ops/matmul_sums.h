// Sums products over the ranks of a group while the next ones are computed. For linears whose weights are cut
// both ways: over this group, and over the group in which their rows travel.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <vector>

#include "ops/gather_matmul.h"
#include "ops/matmul_scatter.h"

namespace pyruntime {

class MatmulSums {
 public:
  using Gemm = GatherMatmul::Gemm;

  // `out` of each GEMM becomes the sum over the ranks of the route's group. All ranks multiply the same rows,
  // each by its own weights; the bias, the same on all ranks, is added once.
  MatmulSums(Route route, std::vector<Gemm> gemms, bool transposed);

  // Multiplies the rows of that chunk of all rows, [blocks, chunk.rows * inner, K], in a flight of their own.
  // While they are multiplied, earlier ones are summed and return. `like` has the form of the rows.
  void multiply(const Operand& like, const Chunk& chunk, const at::Tensor& rows);
  // Waits until all sums have arrived.
  void finish();

 private:
  struct Sum {
    MatmulScatter parts;
    at::Tensor out;
  };
  void take_oldest();

  Route route_;
  std::vector<Gemm> gemms_;
  bool transposed_;
  std::vector<std::vector<WeightGemm>> products_;  // arranged weights for all parts, by GEMM
  std::deque<Sum> under_way_;
};

}  // namespace pyruntime
