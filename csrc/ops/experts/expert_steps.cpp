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

// Whether rows with k experts each go only to the ranks that need them. The answer is the same on all ranks,
// if they name the same tier.
bool deals(const ExpertOptions& options, c10::Device device, at::ScalarType of_sums, int64_t k) {
  Group& group = Group::get(options.group);
  const bool can = options.cut && group.world_size() > 1 && kernels_for(device, of_sums) != nullptr;
  if (!can || tier_named(options.tier).tier == Tier::kUnfused) return false;
  const Transport& transport = group.transport(device);
  return transport.why_not_deal().empty() &&
         deals_share(share_of_rows(options.experts, group.world_size(), k), transport.ranks_of_rail(),
                     options.under_other_work);
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

std::shared_ptr<DealtRoutes> dealt_by(const at::Tensor& table, const ExpertOptions& options) {
  if (!deals(options, table.device(), table.scalar_type(), table.size(1) / 2)) return nullptr;
  const Group& group = Group::get(options.group);
  return std::make_shared<DealtRoutes>(table, group.rank(), group.world_size(), options.experts);
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
  if (!deals(options, x_shard.device(), precise, ids.size(1))) {
    rows_.emplace(route_, x_, options.cut, /*dealt=*/nullptr);
  }
  // There only the stream waits, and what the host needs of it is under way until multiply().
  if (!x_shard.is_cpu()) take_table();
}

void ExpertsForward::take_table() {
  if (tables_) {
    table_ = tables_->rows().select(0, 0);
    tables_->finish();
    tables_.reset();
  }
  dealt_ = dealt_by(table_, options_);
  if (dealt_ != nullptr) rows_.emplace(route_, x_, options_.cut, dealt_);
  routed_ = routed_by(table_, options_, parameters_.gate_up);
}

at::Tensor ExpertsForward::products_of(const Share& share) {
  const ExpertRows::Run& run = share.run;
  const at::Tensor rows = keeps_ ? run.of(kept_) : at::empty({run.count, x_.width}, x_.data.options());
  rows_->copy(*routed_, share, rows);
  const at::Tensor inputs = options_.scales_input ? weighted(rows, run.of(routed_->weights())) : rows;
  const at::Tensor hidden = up_->multiply(share, inputs, [&] { return run.of(hidden_memory()); });
  if (!hidden.is_cpu()) hidden_ = hidden;
  return layers::call_weighted_gating(hidden, run.of(of_outputs_), options_.gating);
}

const at::Tensor& ExpertsForward::hidden_memory() {
  if (!hidden_.defined()) {
    const int64_t features = features_of(parameters_, options_.transposed);
    hidden_ = at::empty({routed_->size(), 2 * features}, x_.data.options());
  }
  return hidden_;
}

at::Tensor ExpertsForward::outputs_of(const Share& share, const at::Tensor& products, const Memory& memory) {
  const at::Tensor out = back_->multiply(share, products, memory);
  if (!parameters_.down_bias.defined()) return out;
  for_each_expert(*routed_, share, [&](int64_t expert, const ExpertRows::Run& own) {
    const at::Tensor p = own.of(share.run.of(of_outputs_));
    own.of(out).add_(p.unsqueeze(1) * parameters_.down_bias.select(0, expert));
  });
  return out;
}

void ExpertsForward::multiply(bool keep_inputs) {
  const c10::DeviceGuard on(x_.data.device());
  if (!routed_) take_table();
  const at::TensorOptions like = x_.data.options();
  const int64_t places = routed_->size();
  keeps_ = keep_inputs && options_.cut && group_.crosses_hosts(like.device());
  kept_ = at::empty({keeps_ ? places : 0, x_.width}, like);
  of_outputs_ = weights_of_outputs(*routed_, options_);
  up_.emplace(parameters_.gate_up, !options_.transposed, *routed_, parameters_.gate_up_bias);
  back_.emplace(parameters_.down, !options_.transposed, *routed_);
  if (!keep_inputs) kept_ = kept_.view({0});  // tells the backward that it has none
  if (!options_.under_other_work) return;
  products_.resize(routed_->experts());
  for (const Share& share : all_shares(*routed_, route_.rows, like.device())) {
    products_[share.first] = products_of(share);
  }
  rows_->finish();
}

void ExpertsForward::scatter() {
  const c10::DeviceGuard on(x_.data.device());
  const bool has_products = options_.under_other_work;
  SumsOfExperts made(route_, x_, *routed_, parameters_.gate_up, [&](const Share& share, const Memory& out) {
    return outputs_of(share, has_products ? products_[share.first] : products_of(share), out);
  });
  if (has_products) made.make_all();
  sums_.emplace(route_, x_, options_.cut, dealt_, made);
  if (has_products) sums_->reduce_beside();
  rows_->finish();
  hidden_memory();
  if (keeps_) routed_->clear_padding(kept_);
  products_.clear();
  up_.reset();
  back_.reset();
}

at::Tensor ExpertsForward::finish() {
  const c10::DeviceGuard on(x_.data.device());
  return sums_->finish().view(x_.sizes);
}

// --- backward

ExpertsBackward::ExpertsBackward(const ExpertOptions& options, const at::Tensor& grad,
                                 const at::Tensor& x_shard, std::shared_ptr<const ExpertRows> routed,
                                 std::shared_ptr<DealtRoutes> dealt, int64_t rows, int64_t k,
                                 int64_t features, bool reads_x, bool has_kept)
    : options_(options),
      x_(reads_x ? Operand::of(x_shard, 0, "x") : Operand::form_of(x_shard, 0, "x")),
      dy_(Operand::of(grad.contiguous(), 0, "grad")),
      group_(Group::get(options.group)),
      route_(route_of("experts_backward", dy_, features, options, rows)),
      routed_(std::move(routed)),
      dealt_(std::move(dealt)),
      k_(k),
      features_(features),
      reads_x_(reads_x),
      has_kept_(has_kept && options.cut && group_.crosses_hosts(grad.device())) {
  const c10::DeviceGuard on(grad.device());
  rows_of_dy_.emplace(route_, dy_, options.cut, dealt_);
  if (reads_x && !has_kept_) rows_of_x_.emplace(route_, x_, options.cut, dealt_);
}

void ExpertsBackward::multiply(const ExpertParameters& parameters, const at::Tensor& hidden,
                               const at::Tensor& kept, bool need_gate_up, bool need_down) {
  const c10::DeviceGuard on(dy_.data.device());
  const bool at_once = options_.under_other_work;
  parameters_ = parameters;
  hidden_ = hidden;
  need_gate_up_ = need_gate_up;
  need_down_ = need_down;
  // Without the gradient of a matrix, rows last as long as they are computed with.
  const auto for_all = [&](bool needed, int64_t width) {
    return needed ? at::empty({routed_->size(), width}, dy_.data.options()) : at::Tensor();
  };
  dy_rows_ = for_all(need_down, x_.width);
  products_ = for_all(need_down, features_);
  dhidden_ = for_all(need_gate_up || at_once, 2 * features_);
  x_rows_ = has_kept_ ? kept : for_all(reads_x_, x_.width);
  dp_ = at::zeros({route_.rows * k_}, dy_.data.options().dtype(dtype_of_sums(dy_.data)));
  of_outputs_ = weights_of_outputs(*routed_, options_);
  through_down_.emplace(parameters.down, options_.transposed, *routed_);
  through_up_.emplace(parameters.gate_up, options_.transposed, *routed_);
  if (!at_once) return;
  for (const Share& share : all_shares(*routed_, route_.rows, dp_.device())) take(share);
  finish_rows();
}

at::Tensor ExpertsBackward::take(const Share& share) {
  const ExpertRows::Run& run = share.run;
  const auto rows_in = [&](const at::Tensor& all, int64_t width) {
    return all.defined() ? run.of(all) : at::empty({run.count, width}, dy_.data.options());
  };
  const at::Tensor dy_run = rows_in(dy_rows_, x_.width), dhidden = rows_in(dhidden_, 2 * features_);
  rows_of_dy_->copy(*routed_, share, dy_run);
  if (rows_of_x_) rows_of_x_->copy(*routed_, share, run.of(x_rows_));
  const at::Tensor dproduct = through_down_->multiply(
      share, dy_run, [&] { return at::empty({run.count, features_}, dy_.data.options()); });
  const at::Tensor dots = at::empty({run.count}, dp_.options());
  layers::call_weighted_gating_backward(dproduct, run.of(hidden_), run.of(of_outputs_), options_.gating,
                                        dhidden, rows_in(products_, features_), dots);
  if (options_.scales_input) return dhidden;  // there dots are those of inputs
  if (parameters_.down_bias.defined()) {
    for_each_expert(*routed_, share, [&](int64_t expert, const ExpertRows::Run& own) {
      const at::Tensor bias = parameters_.down_bias.select(0, expert).to(dots.scalar_type());
      own.of(dots).add_(at::mv(own.of(dy_run).to(dots.scalar_type()), bias));
    });
  }
  set_weights(share, dots);
  return dhidden;
}

at::Tensor ExpertsBackward::inputs_of(const Share& share, const at::Tensor& dhidden, const Memory& memory) {
  const at::Tensor out = through_up_->multiply(share, dhidden, memory);
  if (!options_.scales_input) return out;
  set_weights(share, (share.run.of(x_rows_).to(dp_.scalar_type()) * out).sum(-1));
  return out.copy_(weighted(out, share.run.of(routed_->weights())));
}

void ExpertsBackward::set_weights(const Share& share, const at::Tensor& dots) {
  // On a device there is no padding.
  const ExpertRows::Run rows = share.experts == 1 ? routed_->of(share.first, share.range) : share.run;
  dp_.index_copy_(0, rows.of(routed_->places()), dots.narrow(0, 0, rows.count));
}

void ExpertsBackward::finish_rows() {
  rows_of_dy_->finish();
  if (rows_of_x_) rows_of_x_->finish();
}

void ExpertsBackward::scatter(ExpertParameters& sums) {
  const c10::DeviceGuard on(dy_.data.device());
  const bool is_taken = options_.under_other_work;
  SumsOfExperts sums_of_dx(route_, x_, *routed_, parameters_.gate_up,
                           [&](const Share& share, const Memory& out) {
                             return inputs_of(share, is_taken ? share.run.of(dhidden_) : take(share), out);
                           });
  if (is_taken) sums_of_dx.make_all();
  sums_.emplace(route_, x_, options_.cut, dealt_, sums_of_dx);
  if (is_taken) sums_->reduce_beside();
  finish_rows();
  // Every weight belongs to one expert, so only one rank's term is not zero.
  const Operand terms = Operand::of(dp_.view({route_.rows, k_}), 0, "dweights");
  scatter_of_weights_.emplace(
      whole(group_, route_.rows),
      MatmulScatter::Parts{
          .operands = {terms},
          .weights = {},
          .transposed = false,
          .compute = [&](const at::Tensor& out, const Chunk& chunk) { out.copy_(terms.rows_of(chunk)); }},
      /*all=*/!options_.cut);
  for (const at::Tensor& values : {dy_rows_, dhidden_, products_, has_kept_ ? at::Tensor() : x_rows_}) {
    if (values.defined()) routed_->clear_padding(values);
  }
  add_gradients(sums);
  dy_rows_ = products_ = dhidden_ = x_rows_ = hidden_ = at::Tensor();
  through_down_.reset();
  through_up_.reset();
}

void ExpertsBackward::add_gradients(ExpertParameters& sums) const {
  const auto add_stack = [&](at::Tensor& sum, const at::Tensor& stack, const at::Tensor& out_rows,
                             const at::Tensor& in_rows) {
    sum = stack_gradient(stack, options_.transposed ? in_rows : out_rows,
                         options_.transposed ? out_rows : in_rows, routed_->ends(), sum);
  };
  if (need_gate_up_) {
    const at::Tensor inputs = options_.scales_input ? weighted(x_rows_, routed_->weights()) : x_rows_;
    add_stack(sums.gate_up, parameters_.gate_up, dhidden_, inputs);
  }
  if (need_down_) add_stack(sums.down, parameters_.down, dy_rows_, products_);
  if (!parameters_.down_bias.defined()) return;
  if (need_gate_up_) {
    const at::Tensor dbias = parameters_.gate_up.new_empty({routed_->experts(), 2 * features_});
    for (int64_t expert = 0; expert < routed_->experts(); ++expert) {
      dbias.select(0, expert).copy_(routed_->of(expert).of(dhidden_).sum(0));
    }
    add_to(sums.gate_up_bias, dbias);
  }
  if (need_down_) {
    const at::Tensor dbias = parameters_.down_bias.new_empty(parameters_.down_bias.sizes());
    for (int64_t expert = 0; expert < routed_->experts(); ++expert) {
      const ExpertRows::Run run = routed_->of(expert);
      const at::Tensor dy_of = run.of(dy_rows_).to(dp_.scalar_type());
      dbias.select(0, expert).copy_(at::mv(dy_of.t(), run.of(of_outputs_)));
    }
    add_to(sums.down_bias, dbias);
  }
}

std::pair<at::Tensor, at::Tensor> ExpertsBackward::finish() {
  const c10::DeviceGuard on(dy_.data.device());
  const at::Tensor dx = sums_->finish().view(x_.sizes);
  return {dx, scatter_of_weights_->finish().view({-1, k_})};
}

}  // namespace pyruntime
