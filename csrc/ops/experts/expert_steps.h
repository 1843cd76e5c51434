// The two directions of the operator of experts, in three steps each, between which other work may run:
//
//     forward    begin: the table, and this rank's rows of x, leave     backward   rows of dY, and of x,
//     leave
//                multiply: the experts compute, sums leave                         the same, and dW
//                finish: the sums of this rank's rows are taken                    the same
//
// A whole call takes them one after the other, and its experts take rows as they arrive. With
// `under_other_work` rows travel beside the caller's work between two steps: then experts compute with all
// rows before sums leave, so that no rank has more than three flights of a call open.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "cpu/layers/weighted_gating.h"
#include "ops/experts/expert_passes.h"
#include "ops/experts/expert_rows.h"
#include "ops/gather_matmul.h"
#include "ops/matmul_scatter.h"
#include "ops/operand.h"
#include "ops/tier/route.h"

namespace pyruntime {

// The parameters of a rank's experts, or their gradients, of which some are undefined.
struct ExpertParameters {
  at::Tensor gate_up, down;  // [E_r, 2F, D] and [E_r, D, F], or if `transposed` the latter two swapped
  at::Tensor gate_up_bias, down_bias;  // [E_r, 2F] and [E_r, D]; both undefined for none
};

struct ExpertOptions {
  std::string group;
  int64_t experts;  // of all ranks
  bool cut;         // whether rows are cut over the group
  std::string tier;
  bool transposed;
  bool scales_input;
  layers::Gating gating;
  bool under_other_work = false;
};

// Whether the backward reads the rows of x: for the gradient of gate_up or its bias, or of the weights.
bool reads_inputs(bool need_gate_up, const ExpertOptions& options);

class ExpertsForward {
 public:
  // Begins. rows: of all ranks, or kUnknownRows. Raises ValueError or TypeError for what does not fit.
  ExpertsForward(const ExpertOptions& options, const ExpertParameters& parameters, const at::Tensor& x_shard,
                 const at::Tensor& ids, const at::Tensor& weights, int64_t rows);

  // keep_inputs: whether the backward reads x.
  void multiply(bool keep_inputs);
  // This rank's rows of the result.
  at::Tensor finish();

  // The experts and weights of all ranks' rows, [rows, 2k]; known from multiply() on, as the following.
  const at::Tensor& table() const { return table_; }
  const std::shared_ptr<const ExpertRows>& routed() const { return routed_; }
  const at::Tensor& hidden() const { return hidden_; }  // gate_up's results, [routed rows, 2F]
  // Between hosts the routed rows of x, [routed rows, D], if they are to be kept; else without elements.
  const at::Tensor& kept() const { return kept_; }
  // Leaves the memory of these to those who hold them.
  void forget();

 private:
  void take_table();

  ExpertOptions options_;
  ExpertParameters parameters_;
  Operand x_;
  Group& group_;
  Route route_;
  at::Tensor table_;
  std::optional<GatherMatmul> tables_;  // until the table is complete
  std::optional<AllRows> rows_;
  std::shared_ptr<const ExpertRows> routed_;
  at::Tensor hidden_, kept_;
  std::optional<MatmulScatter> scatter_;
};

class ExpertsBackward {
 public:
  // Begins. x_shard: only its form counts unless reads_x. `routed`: as in the forward, of `rows` of all ranks
  // with k experts each. has_kept: whether the routed rows of x were kept.
  ExpertsBackward(const ExpertOptions& options, const at::Tensor& grad, const at::Tensor& x_shard,
                  std::shared_ptr<const ExpertRows> routed, int64_t rows, int64_t k, int64_t features,
                  bool reads_x, bool has_kept);

  // Adds to `sums` the gradients of parameters that are needed; those that are undefined are made, unless a
  // sink takes their operands. They are computed while sums travel.
  void multiply(const ExpertParameters& parameters, const at::Tensor& hidden, const at::Tensor& kept,
                bool need_gate_up, bool need_down, ExpertParameters& sums);
  // This rank's rows of {dx, dweights [own rows, k]}.
  std::pair<at::Tensor, at::Tensor> finish();

 private:
  ExpertOptions options_;
  Operand x_, dy_;
  Group& group_;
  Route route_;
  std::shared_ptr<const ExpertRows> routed_;
  int64_t k_;
  bool reads_x_, has_kept_;
  std::optional<AllRows> rows_of_dy_, rows_of_x_;
  std::optional<MatmulScatter> scatter_, scatter_of_weights_;
};

// The routed rows of a table [rows, 2k] of all ranks, for this rank's experts with these matrices.
std::shared_ptr<const ExpertRows> routed_by(const at::Tensor& table, const ExpertOptions& options,
                                            const at::Tensor& gate_up);

}  // namespace pyruntime
