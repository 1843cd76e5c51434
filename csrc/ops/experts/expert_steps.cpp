#include "ops/experts/expert_steps.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mv.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "ops/gemm/gemm.h"
#include "ops/weight_gradient.h"

namespace pyruntime {

namespace {

constexpr const char* kOp = "experts";

// --- arguments

at::ScalarType dtype_of_sums(const at::Tensor& rows) {
  return rows.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

struct Held {
  int64_t first, count;
};

// The experts of a rank, as torch.chunk cuts them.
Held held_by(const Group& group, int64_t experts) {
  const int64_t chunk = (experts + group.world_size() - 1) / group.world_size();
  const int64_t first = std::min(experts, group.rank() * chunk);
  return {first, std::min(chunk, experts - first)};
}

int64_t features_of(const ExpertParameters& parameters, bool transposed) {
  return parameters.down.size(transposed ? 1 : 2);
}

void check(const Operand& x, const at::Tensor& ids, const at::Tensor& weights, const ExpertParameters& given,
           const ExpertOptions& options, const Group& group) {
  const int64_t experts = options.experts;
  const Held held = held_by(group, experts);
  const at::Tensor &gate_up = given.gate_up, &down = given.down;
  const int64_t in = options.transposed ? 1 : 2, out = 3 - in;
  const bool fit = gate_up.dim() == 3 && down.dim() == 3 && gate_up.size(0) == held.count &&
                   down.size(0) == held.count && gate_up.size(in) == x.width && down.size(out) == x.width &&
                   gate_up.size(out) == 2 * down.size(in);
  TORCH_CHECK_VALUE(fit, kOp, ": gate_up has shape ", gate_up.sizes(), " and down ", down.sizes(),
                    "; for rows of ", x.width, " features rank ", group.rank(), " of ", group.world_size(),
                    " needs [", held.count, ", 2 F, ", x.width, "] and [", held.count, ", ", x.width, ", F]",
                    options.transposed ? " with the last two dimensions swapped" : "",
                    ", its share of experts=", experts, ".");
  const auto is_bias = [&](const at::Tensor& bias, int64_t width) {
    return bias.dim() == 2 && bias.size(0) == held.count && bias.size(1) == width;
  };
  const bool none = !given.gate_up_bias.defined() && !given.down_bias.defined();
  TORCH_CHECK_VALUE(
      none || (given.gate_up_bias.defined() && given.down_bias.defined() &&
               is_bias(given.gate_up_bias, gate_up.size(out)) && is_bias(given.down_bias, x.width)),
      kOp, ": biases must be [", held.count, ", ", gate_up.size(out), "] and [", held.count, ", ", x.width,
      "], or both left out; these are not.");
  for (const at::Tensor& bias : {given.gate_up_bias, given.down_bias}) {
    TORCH_CHECK_TYPE(!bias.defined() || bias.scalar_type() == gate_up.scalar_type(), kOp,
                     ": a bias has dtype ", bias.scalar_type(), " and gate_up ", gate_up.scalar_type(),
                     "; they must agree.");
  }
  TORCH_CHECK_TYPE(
      gate_up.scalar_type() == x.data.scalar_type() && down.scalar_type() == x.data.scalar_type(), kOp,
      ": x has dtype ", x.data.scalar_type(), ", gate_up ", gate_up.scalar_type(), " and down ",
      down.scalar_type(), "; they must agree.");
  TORCH_CHECK_VALUE(ids.dim() == 2 && ids.sizes() == weights.sizes() && ids.size(0) == x.rows, kOp,
                    ": ids have shape ", ids.sizes(), " and weights ", weights.sizes(), "; both must be [",
                    x.rows, ", k], k experts for each row of x.");
  TORCH_CHECK_VALUE(1 <= ids.size(1) && ids.size(1) <= experts, kOp, ": ", ids.size(1),
                    " experts a row were asked for, of experts=", experts, ".");
  TORCH_CHECK_TYPE(c10::isIntegralType(ids.scalar_type(), /*includeBool=*/false), kOp, ": ids have dtype ",
                   ids.scalar_type(), "; they must be integers.");
  if (ids.is_cpu() && ids.numel() > 0) {  // on a device this would wait
    const int64_t low = ids.min().item<int64_t>(), high = ids.max().item<int64_t>();
    TORCH_CHECK_VALUE(low >= -1 && high < experts, kOp, ": ids reach from ", low, " to ", high,
                      "; they must be in [0, ", experts, "), or -1 for no expert.");
  }
}

// --- the passes

Route whole(Group& group, int64_t rows) {
  Route route{group, rows, {Tier::kChunked}};
  route.together = true;
  return route;
}

Route route_of(const char* op, const Operand& x, int64_t features, const ExpertOptions& options,
               int64_t rows) {
  Call call{.op = op,
            .x = x,
            .n = features,
            .k = x.width,
            .group = options.group,
            .tier = options.tier,
            .under_other_work = options.under_other_work};
  if (options.cut) call.rows = rows;
  return choose_route(call);
}

Route checked_route(const Operand& x, const at::Tensor& ids, const at::Tensor& weights,
                    const ExpertParameters& parameters, const ExpertOptions& options, int64_t rows) {
  check(x, ids, weights, parameters, options, Group::get(options.group));
  return route_of(kOp, x, features_of(parameters, options.transposed), options, rows);
}

// Each row times its weight.
at::Tensor weighted(const at::Tensor& rows, const at::Tensor& weights) {
  return (rows * weights.unsqueeze(-1)).to(rows.scalar_type());
}

// The weights of outputs: those of rows, unless these multiply inputs.
at::Tensor weights_of_outputs(const ExpertRows& routed, const ExpertOptions& options) {
  return options.scales_input ? at::ones_like(routed.weights()) : routed.weights();
}

void add_to(at::Tensor& sum, const at::Tensor& term) {
  if (sum.defined()) {
    sum.add_(term);
  } else {
    sum = term;
  }
}

}  // namespace

bool reads_inputs(bool need_gate_up, const ExpertOptions& options) {
  return need_gate_up || options.scales_input;
}

std::shared_ptr<const ExpertRows> routed_by(const at::Tensor& table, const ExpertOptions& options,
                                            const at::Tensor& gate_up) {
  const Held held = held_by(Group::get(options.group), options.experts);
  const int64_t mean = table.size(0) * table.size(1) / 2 / options.experts;  // rows of an expert
  const bool pads = held.count > 0 && library_multiplies(gate_up.select(0, 0), mean);
  return std::make_shared<const ExpertRows>(table, held.first, held.count, pads);
}

// --- forward

ExpertsForward::ExpertsForward(const ExpertOptions& options, const ExpertParameters& parameters,
                               const at::Tensor& x_shard, const at::Tensor& ids, const at::Tensor& weights,
                               int64_t rows)
    : options_(options),
      parameters_(parameters),
      x_(Operand::of(x_shard, 0, "x")),
      group_(Group::get(options.group)),
      route_(checked_route(x_, ids, weights, parameters, options, rows)) {
  const c10::DeviceGuard on(x_shard.device());
  const at::ScalarType precise = dtype_of_sums(x_shard);
  table_ = at::cat({ids.to(precise), weights.to(precise)}, 1);
  // First, as it is small and awaited first.
  if (options.cut) {
    const Operand own = Operand::of(table_, 0, "ids");
    tables_.emplace(whole(group_, route_.rows), Op::kAllGather, own, RowsAre::kKept);
  }
  rows_.emplace(route_, x_, options.cut);
  // There only the stream waits, and what the host needs of it is under way until multiply().
  if (!x_shard.is_cpu()) take_table();
}

void ExpertsForward::take_table() {
  if (tables_) {
    table_ = tables_->rows().select(0, 0);
    tables_->finish();
    tables_.reset();
  }
  routed_ = routed_by(table_, options_, parameters_.gate_up);
}

void ExpertsForward::multiply(bool keep_inputs) {
  const c10::DeviceGuard on(x_.data.device());
  if (!routed_) take_table();
  const ExpertRows& routed = *routed_;
  const at::TensorOptions like = x_.data.options();
  hidden_ = at::empty({routed.size(), 2 * features_of(parameters_, options_.transposed)}, like);
  const bool keep = keep_inputs && options_.cut && group_.crosses_hosts(like.device());
  kept_ = at::empty({keep ? routed.size() : 0, x_.width}, like);
  const at::Tensor of_outputs = weights_of_outputs(routed, options_);
  ExpertGemms up(parameters_.gate_up, !options_.transposed, routed, parameters_.gate_up_bias);
  ExpertGemms back(parameters_.down, !options_.transposed, routed);
  SumsOfExperts sums(route_, x_, routed, parameters_.gate_up, [&](const Share& share, const at::Tensor& out) {
    const ExpertRows::Run& run = share.run;
    const at::Tensor rows = keep ? run.of(kept_) : at::empty({run.count, x_.width}, like);
    rows_->copy(routed, share, rows);
    up.write(share, run.of(hidden_), options_.scales_input ? weighted(rows, run.of(routed.weights())) : rows);
    const at::Tensor p = run.of(of_outputs);
    back.write(share, out, layers::call_weighted_gating(run.of(hidden_), p, options_.gating));
    if (!parameters_.down_bias.defined()) return;
    for_each_expert(routed, share, [&](int64_t expert, const ExpertRows::Run& own) {
      own.of(out).add_(own.of(p).unsqueeze(1) * parameters_.down_bias.select(0, expert));
    });
  });
  if (options_.under_other_work) {
    sums.make_all();
    rows_->finish();
  }
  scatter_.emplace(route_, sums.parts(), /*all=*/!options_.cut);
  if (options_.under_other_work) {
    scatter_->reduce_beside();
  } else {
    rows_->finish();
  }
  rows_.reset();
  if (keep) routed.clear_padding(kept_);
  if (!keep_inputs) kept_ = kept_.view({0});  // tells the backward that it has none
}

at::Tensor ExpertsForward::finish() {
  const c10::DeviceGuard on(x_.data.device());
  return scatter_->finish().view(x_.sizes);
}

void ExpertsForward::forget() {
  hidden_ = kept_ = at::Tensor();
}

// --- backward

ExpertsBackward::ExpertsBackward(const ExpertOptions& options, const at::Tensor& grad,
                                 const at::Tensor& x_shard, std::shared_ptr<const ExpertRows> routed,
                                 int64_t rows, int64_t k, int64_t features, bool reads_x, bool has_kept)
    : options_(options),
      x_(reads_x ? Operand::of(x_shard, 0, "x") : Operand::form_of(x_shard, 0, "x")),
      dy_(Operand::of(grad.contiguous(), 0, "grad")),
      group_(Group::get(options.group)),
      route_(route_of("experts_backward", dy_, features, options, rows)),
      routed_(std::move(routed)),
      k_(k),
      reads_x_(reads_x),
      has_kept_(has_kept && options.cut && group_.crosses_hosts(grad.device())) {
  const c10::DeviceGuard on(grad.device());
  rows_of_dy_.emplace(route_, dy_, options.cut);
  if (reads_x && !has_kept_) rows_of_x_.emplace(route_, x_, options.cut);
}

void ExpertsBackward::multiply(const ExpertParameters& parameters, const at::Tensor& hidden,
                               const at::Tensor& kept, bool need_gate_up, bool need_down,
                               ExpertParameters& gradients) {
  const c10::DeviceGuard on(dy_.data.device());
  const ExpertRows& routed = *routed_;
  const int64_t features = hidden.size(1) / 2;
  const at::TensorOptions like = dy_.data.options();
  const at::TensorOptions precise = like.dtype(dtype_of_sums(dy_.data));
  // The gradient of a matrix reads all places. Without it, rows last as long as they are computed with.
  const auto empty = [&](int64_t rows, int64_t width) { return at::empty({rows, width}, like); };
  const auto for_all = [&](bool needed, int64_t width) {
    return needed ? empty(routed.size(), width) : at::Tensor();
  };
  const auto rows_in = [&](const at::Tensor& all, const ExpertRows::Run& run, int64_t width) {
    return all.defined() ? run.of(all) : empty(run.count, width);
  };
  const at::Tensor dy_rows = for_all(need_down, x_.width), products = for_all(need_down, features);
  const at::Tensor dhidden = for_all(need_gate_up, 2 * features);
  const at::Tensor x_rows = has_kept_ ? kept : for_all(reads_x_, x_.width);
  const at::Tensor dp = at::zeros({route_.rows * k_}, precise);
  const at::Tensor of_outputs = weights_of_outputs(routed, options_);
  ExpertGemms through_down(parameters.down, options_.transposed, routed);
  ExpertGemms through_up(parameters.gate_up, options_.transposed, routed);
  SumsOfExperts sums(route_, x_, routed, parameters.gate_up, [&](const Share& share, const at::Tensor& out) {
    const ExpertRows::Run& run = share.run;
    const at::Tensor dy_run = rows_in(dy_rows, run, x_.width);
    const at::Tensor dhidden_run = rows_in(dhidden, run, 2 * features);
    rows_of_dy_->copy(routed, share, dy_run);
    if (rows_of_x_) rows_of_x_->copy(routed, share, run.of(x_rows));
    const at::Tensor dproduct = empty(run.count, features);
    through_down.write(share, dproduct, dy_run);
    const at::Tensor dots = at::empty({run.count}, precise);
    layers::call_weighted_gating_backward(dproduct, run.of(hidden), run.of(of_outputs), options_.gating,
                                          dhidden_run, rows_in(products, run, features), dots);
    through_up.write(share, out, dhidden_run);
    if (options_.scales_input) {
      dots.copy_((run.of(x_rows).to(dots.scalar_type()) * out).sum(-1));
      out.copy_(weighted(out, run.of(routed.weights())));
    } else if (parameters.down_bias.defined()) {
      for_each_expert(routed, share, [&](int64_t expert, const ExpertRows::Run& own) {
        const at::Tensor bias = parameters.down_bias.select(0, expert).to(dots.scalar_type());
        own.of(dots).add_(at::mv(own.of(dy_run).to(dots.scalar_type()), bias));
      });
    }
    // On a device there is no padding.
    const ExpertRows::Run rows = share.experts == 1 ? routed.of(share.first, share.range) : run;
    dp.index_copy_(0, rows.of(routed.places()), dots.narrow(0, 0, rows.count));
  });
  const auto finish_rows = [&] {
    rows_of_dy_->finish();
    if (rows_of_x_) rows_of_x_->finish();
  };
  if (options_.under_other_work) {
    sums.make_all();
    finish_rows();
  }
  scatter_.emplace(route_, sums.parts(), /*all=*/!options_.cut);
  if (options_.under_other_work) {
    scatter_->reduce_beside();
  } else {
    finish_rows();
  }
  // Every weight belongs to one expert, so only one rank's term is not zero.
  const Operand terms = Operand::of(dp.view({route_.rows, k_}), 0, "dweights");
  scatter_of_weights_.emplace(
      whole(group_, route_.rows),
      MatmulScatter::Parts{
          .operands = {terms},
          .weights = {},
          .transposed = false,
          .compute = [&](const at::Tensor& out, const Chunk& chunk) { out.copy_(terms.rows_of(chunk)); }},
      /*all=*/!options_.cut);
  for (const at::Tensor& values : {dy_rows, dhidden, products, has_kept_ ? at::Tensor() : x_rows}) {
    if (values.defined()) routed.clear_padding(values);
  }
  const auto add_gradient = [&](at::Tensor& sum, const at::Tensor& stack, const at::Tensor& out_rows,
                                const at::Tensor& in_rows) {
    sum = stack_gradient(stack, options_.transposed ? in_rows : out_rows,
                         options_.transposed ? out_rows : in_rows, routed.ends(), sum);
  };
  if (need_gate_up) {
    const at::Tensor inputs = options_.scales_input ? weighted(x_rows, routed.weights()) : x_rows;
    add_gradient(gradients.gate_up, parameters.gate_up, dhidden, inputs);
  }
  if (need_down) add_gradient(gradients.down, parameters.down, dy_rows, products);
  if (!parameters.down_bias.defined()) return;
  if (need_gate_up) {
    const at::Tensor dbias = parameters.gate_up.new_empty({routed.experts(), 2 * features});
    for (int64_t expert = 0; expert < routed.experts(); ++expert) {
      dbias.select(0, expert).copy_(routed.of(expert).of(dhidden).sum(0));
    }
    add_to(gradients.gate_up_bias, dbias);
  }
  if (need_down) {
    const at::Tensor dbias = parameters.down_bias.new_empty(parameters.down_bias.sizes());
    for (int64_t expert = 0; expert < routed.experts(); ++expert) {
      const ExpertRows::Run run = routed.of(expert);
      const at::Tensor dy_of = run.of(dy_rows).to(precise.dtype());
      dbias.select(0, expert).copy_(at::mv(dy_of.t(), run.of(of_outputs)));
    }
    add_to(gradients.down_bias, dbias);
  }
}

std::pair<at::Tensor, at::Tensor> ExpertsBackward::finish() {
  const c10::DeviceGuard on(dy_.data.device());
  const at::Tensor dx = scatter_->finish().view(x_.sizes);
  return {dx, scatter_of_weights_->finish().view({-1, k_})};
}

}  // namespace pyruntime
