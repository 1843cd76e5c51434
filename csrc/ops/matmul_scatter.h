// The second of the two engines: GEMMs make each rank's part of all rows, and the parts are summed over the
// ranks as they come. It serves the forward of a row linear and the backward of a column linear.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "ops/gemm.h"
#include "ops/operand.h"
#include "ops/row_exchange.h"
#include "ops/tier.h"

namespace pyruntime {

class MatmulScatter {
 public:
  // What a rank adds to the sum: a_1 @ W_1^T (+ bias, added once), or the sum of all a_i @ W_i.
  struct Parts {
    std::vector<Operand> operands;
    std::vector<at::Tensor> weights;
    bool transposed;  // then there is one
    at::Tensor bias = {};
    const std::vector<WeightGemm>* products = nullptr;  // with the weights, where others have arranged them

    int64_t width() const { return weights.front().size(transposed ? 0 : 1); }
  };

  // Multiplies, and the parts leave as they are made. `all`: every rank gets all sums, not those of its rows.
  MatmulScatter(Group& group, Parts parts, bool all, TierChoice choice);

  // Waits for the other ranks' parts of what this rank sums; with `all` the sums leave then.
  void reduce();
  // The same where it need not wait.
  void reduce_if_come();
  // The sums, [blocks, *, width].
  at::Tensor finish();
  // The same where `all`, into `out`.
  void finish(const at::Tensor& out);

 private:
  std::vector<WeightGemm> gemms() const;
  void write(const std::vector<WeightGemm>& gemms, const at::Tensor& out, const Chunk& chunk,
             const at::Tensor& bias) const;
  at::Tensor multiply_all(const at::Tensor& bias) const;
  at::Tensor multiply_fused();
  void end_with(at::Tensor sums);

  Parts parts_;
  TierChoice choice_;
  at::Tensor sums_;  // once they are there
  bool reduced_ = false;
  std::optional<RowScatter> flight_;  // none in a group of one rank
};

}  // namespace pyruntime
