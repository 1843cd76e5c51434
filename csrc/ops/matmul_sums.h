// Products that are summed over the ranks of a group while the next ones are made: those of linears whose
// weights are cut both ways, over this group and over that which their rows travel in.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/string_view.h>

#include <deque>
#include <vector>

#include "ops/gather_matmul.h"
#include "ops/matmul_scatter.h"

namespace pyruntime {

// The group of that name, where it has several ranks, else none.
Group* group_of_sums(c10::string_view name);

// Whether an op over `group`, or one over that of its sums, waits for other hosts.
bool waits_for_hosts(Group& group, c10::string_view sums, c10::Device device);

class MatmulSums {
 public:
  using Gemm = GatherMatmul::Gemm;

  // `out` of all GEMMs becomes their sum over the ranks of `group`, which all multiply the same rows, each by
  // weights of its own; its bias, the same on all of them, is added once.
  MatmulSums(Group& group, TierChoice choice, std::vector<Gemm> gemms, bool transposed);

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

  Group& group_;
  TierChoice choice_;
  std::vector<Gemm> gemms_;
  bool transposed_;
  std::vector<std::vector<WeightGemm>> products_;  // of all parts, by GEMM
  std::deque<Sum> under_way_;
};

}  // namespace pyruntime
