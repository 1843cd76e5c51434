// Products that are summed over the ranks of a group while the next ones are made: those of linears whose
// weights are cut both ways, over this group and over that which their rows travel in.
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

  // `out` of all GEMMs becomes their sum over the ranks of the route's group, which all multiply the same
  // rows, each by weights of its own; its bias, the same on all of them, is added once.
  MatmulSums(Route route, std::vector<Gemm> gemms, bool transposed);

  // The rows of that chunk of all rows, [blocks, chunk.rows * inner, K], as a flight of their own: while they
  // are multiplied, those before them are summed and return. `like` has the form of the rows.
  void multiply(const Operand& like, const Chunk& chunk, const at::Tensor& rows);
  // All sums have come.
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
  std::vector<std::vector<WeightGemm>> products_;  // of all parts, by GEMM
  std::deque<Sum> under_way_;
};

}  // namespace pyruntime
