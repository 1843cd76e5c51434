// The scattering engine, the second of two: GEMMs compute each rank's part of all rows, and the parts are
// summed over the ranks as they arrive; each owner sums its own rows. It serves the forward of a row linear
// and the backward of a column linear, and sums without a GEMM.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "ops/gemm/gemm.h"
#include "ops/operand.h"
#include "ops/tier/route.h"
#include "transport/flights.h"
#include "transport/inside.h"

namespace pyruntime {

class MatmulScatter {
 public:
  // A rank's term of the sum: a_1 @ W_1^T (+ bias, added once), or the sum of all a_i @ W_i, or, without
  // weights, a_1, or what `compute` writes.
  struct Parts {
    std::vector<Operand> operands;
    std::vector<at::Tensor> weights;
    bool transposed;  // requires exactly one weight
    at::Tensor bias = {};
    const std::vector<WeightGemm>* products = nullptr;  // with the weights; null: arranged here
    // Writes the chunk's rows to `out` [blocks, chunk.rows * inner, width of a_1]; then only the form of a_1
    // counts.
    std::function<void(const at::Tensor& out, const Chunk& chunk)> compute = {};
    // Called with the order of chunks before `compute`, if they are several.
    std::function<void(const std::vector<Chunk>& order)> prepare = {};

    bool is_given() const { return weights.empty() && !compute; }  // a_1 is the term

    int64_t width() const {
      return weights.empty() ? operands.front().width : weights.front().size(transposed ? 0 : 1);
    }
  };

  // Multiplies, and publishes parts as they are computed. `all`: every rank gets the sums of all rows.
  MatmulScatter(const Route& route, Parts parts, bool all);

  // Waits for the other ranks' parts of this rank's sums; with `all` the sums leave then.
  void reduce();
  // Does the same on a device beside what the caller's stream gets from now on, if that can be.
  void reduce_beside();
  // Does the same only if it need not wait.
  void reduce_if_come();
  // Returns the sums, [blocks, *, width].
  at::Tensor finish();
  // Writes the sums of all rows to `out`; only with `all`.
  void finish(const at::Tensor& out);

 private:
  void begin(Transport& transport, int pieces);
  std::vector<WeightGemm> gemms() const;
  void write(const std::vector<WeightGemm>& gemms, const at::Tensor& out, const Chunk& chunk,
             const at::Tensor& bias) const;
  at::Tensor multiply_all(const at::Tensor& bias) const;
  // The chunks in their order; together: joined where they lie in one piece of a device's memory.
  std::vector<JoinedChunk> runs(bool together) const;
  void publish_all(const at::Tensor& parts, bool together);
  void publish_chunks(bool together);
  at::Tensor multiply_fused(const std::string& tiles);
  at::Tensor empty(int64_t rows) const;
  void end_with(at::Tensor sums);

  Parts parts_;
  bool all_;
  int64_t own_rows_;
  at::Tensor sums_;      // once they are complete
  at::Tensor own_sums_;  // once this rank has summed, unless all_
  bool reduced_ = false;
  // Empty in a group of one rank.
  Op op_ = Op::kMatmulReduceScatter;
  GroupContext* context_ = nullptr;
  double begun_ = 0;
  std::optional<Inside> inside_;
  std::unique_ptr<ScatterFlight> flight_;
};

}  // namespace pyruntime
