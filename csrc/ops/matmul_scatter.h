// The second of the two engines: GEMMs make each rank's part of all rows, and the parts are summed over the
// ranks as they come. It serves the forward of a row linear and the backward of a column linear, and sums
// without a GEMM.
//
// Every rank writes its part of all rows; each owner sums its own rows over the ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "ops/gemm/gemm.h"
#include "ops/operand.h"
#include "ops/tier/route.h"
#include "transport/inside.h"

namespace pyruntime {

class MatmulScatter {
 public:
  // A rank's term of the sum: a_1 @ W_1^T (+ bias, added once), or the sum of all a_i @ W_i, or, where
  // there are no weights, a_1.
  struct Parts {
    std::vector<Operand> operands;
    std::vector<at::Tensor> weights;
    bool transposed;  // then there is one
    at::Tensor bias = {};
    const std::vector<WeightGemm>* products = nullptr;  // with the weights, where others have arranged them

    int64_t width() const {
      return weights.empty() ? operands.front().width : weights.front().size(transposed ? 0 : 1);
    }
  };

  // Multiplies, and the parts leave as they are made. `all`: every rank gets all sums, not those of its rows.
  MatmulScatter(const Route& route, Parts parts, bool all);

  // Waits for the other ranks' parts of what this rank sums; with `all` the sums leave then.
  void reduce();
  // The same where it need not wait.
  void reduce_if_come();
  // The sums, [blocks, *, width].
  at::Tensor finish();
  // The same where `all`, into `out`.
  void finish(const at::Tensor& out);

 private:
  void begin(Transport& transport, int pieces);
  std::vector<WeightGemm> gemms() const;
  void write(const std::vector<WeightGemm>& gemms, const at::Tensor& out, const Chunk& chunk,
             const at::Tensor& bias) const;
  at::Tensor multiply_all(const at::Tensor& bias) const;
  void publish_all(const at::Tensor& parts);
  void publish_chunks();
  at::Tensor multiply_fused(const std::string& tiles);
  at::Tensor empty(int64_t rows) const;
  void end_with(at::Tensor sums);

  Parts parts_;
  bool all_;
  int64_t own_rows_;
  at::Tensor sums_;      // once they are there
  at::Tensor own_sums_;  // once this rank has summed, unless all_
  bool reduced_ = false;
  // None of these in a group of one rank.
  Op op_ = Op::kMatmulReduceScatter;
  GroupContext* context_ = nullptr;
  double begun_ = 0;
  std::optional<Inside> inside_;
  std::unique_ptr<ScatterFlight> flight_;
};

}  // namespace pyruntime
