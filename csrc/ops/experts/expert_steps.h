// The two directions of the operator of experts, in steps, between which other work may run:
//
//     forward   begin     the table, and this rank's rows of x, leave
//               multiply  the experts take rows: gate_up, and gating
//               scatter   down; sums leave
//               finish    the sums of this rank's rows are taken
//     backward  begin     this rank's rows of dY, and of x again, leave
//               multiply  the experts take rows: down, and gating
//               scatter   gate_up; sums of dX leave, and of weights' gradients; then the matrices' gradients
//               finish    the sums of this rank's rows are taken
//
// A whole call takes them one after the other: there the experts compute chunk by chunk in `scatter`, as rows
// arrive and sums leave. With `under_other_work` they compute all rows in one step, which ends the flights
// that brought them: so that slices, of which several are under way, have slots enough.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpu/layers/weighted_gating.h"
#include "ops/experts/dealt_routes.h"
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
  void scatter();
  // This rank's rows of the result.
  at::Tensor finish();

  // Known from multiply() on: the experts and weights of all ranks' rows, [rows, 2k], and what follows.
  const at::Tensor& table() const { return table_; }
  const std::shared_ptr<const ExpertRows>& routed() const { return routed_; }
  const std::shared_ptr<DealtRoutes>& dealt() const { return dealt_; }
  // gate_up's results, [routed rows, 2F], complete from scatter() on.
  const at::Tensor& hidden() const { return hidden_; }
  // Between hosts the routed rows of x, [routed rows, D], if they are to be kept; else without elements.
  const at::Tensor& kept() const { return kept_; }
  // Leaves the memory of these to those who hold them.
  void forget() { hidden_ = kept_ = at::Tensor(); }

 private:
  void take_table();
  // Gating of what gate_up makes of a share's rows, [share.run.count, F].
  at::Tensor products_of(const Share& share);
  // Returns what the experts make of `products`, [share.run.count, D].
  at::Tensor outputs_of(const Share& share, const at::Tensor& products, const Memory& memory);
  const at::Tensor& hidden_memory();

  ExpertOptions options_;
  ExpertParameters parameters_;
  Operand x_;
  Group& group_;
  Route route_;
  at::Tensor table_;
  std::optional<GatherMatmul> tables_;  // until the table is complete
  std::optional<AllRows> rows_;
  std::shared_ptr<const ExpertRows> routed_;
  std::shared_ptr<DealtRoutes> dealt_;  // null: rows are gathered
  bool keeps_ = false;
  at::Tensor of_outputs_;  // weights
  at::Tensor hidden_, kept_;
  std::optional<ExpertGemms> up_, back_;
  std::vector<at::Tensor> products_;  // by the first expert of a share, with under_other_work
  std::optional<SumsOfRanks> sums_;
};

class ExpertsBackward {
 public:
  // Begins. x_shard: only its form counts unless reads_x. `routed`, `dealt`: as in the forward, of `rows` of
  // all ranks with k experts each. has_kept: whether the routed rows of x were kept.
  ExpertsBackward(const ExpertOptions& options, const at::Tensor& grad, const at::Tensor& x_shard,
                  std::shared_ptr<const ExpertRows> routed, std::shared_ptr<DealtRoutes> dealt, int64_t rows,
                  int64_t k, int64_t features, bool reads_x, bool has_kept);

  void multiply(const ExpertParameters& parameters, const at::Tensor& hidden, const at::Tensor& kept,
                bool need_gate_up, bool need_down);
  // Adds to `sums` the gradients of parameters that are needed; those that are undefined are made, unless a
  // sink takes their operands.
  void scatter(ExpertParameters& sums);
  // This rank's rows of {dx, dweights [own rows, k]}.
  std::pair<at::Tensor, at::Tensor> finish();

 private:
  // Returns the gradients of what gate_up made of a share's rows, [share.run.count, 2F].
  at::Tensor take(const Share& share);
  // Returns the gradients of the experts' rows, [share.run.count, D], from those of gate_up's results.
  at::Tensor inputs_of(const Share& share, const at::Tensor& dhidden, const Memory& memory);
  void finish_rows();
  void set_weights(const Share& share, const at::Tensor& dots);
  void add_gradients(ExpertParameters& sums) const;

  ExpertOptions options_;
  Operand x_, dy_;
  Group& group_;
  Route route_;
  std::shared_ptr<const ExpertRows> routed_;
  std::shared_ptr<DealtRoutes> dealt_;
  int64_t k_, features_;
  bool reads_x_, has_kept_;
  ExpertParameters parameters_;
  bool need_gate_up_ = false, need_down_ = false;
  std::optional<AllRows> rows_of_dy_, rows_of_x_;
  std::optional<ExpertGemms> through_down_, through_up_;
  at::Tensor hidden_, of_outputs_;
  at::Tensor dp_;  // [rows * k]
  // Rows of all places, for a matrix's gradient or a later step; undefined if neither reads them.
  at::Tensor dy_rows_, products_, dhidden_, x_rows_;
  std::optional<SumsOfRanks> sums_;
  std::optional<MatmulScatter> scatter_of_weights_;
};

// Returns the ways of the table's rows if each goes only to ranks that need it; null if all ranks get them.
std::shared_ptr<DealtRoutes> dealt_by(const at::Tensor& table, const ExpertOptions& options);
// The routed rows of a table [rows, 2k] of all ranks, for this rank's experts with these matrices.
std::shared_ptr<const ExpertRows> routed_by(const at::Tensor& table, const ExpertOptions& options,
                                            const at::Tensor& gate_up);

}  // namespace pyruntime
