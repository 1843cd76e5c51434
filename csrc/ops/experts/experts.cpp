// The experts of a mixture, of which each rank has some whole, by the two engines: rows are gathered and the
// experts take those that were sent to them, chunk by chunk; what they make of a chunk leaves as soon as it
// is summed over this rank's experts, and its owner sums over the ranks.
//
// Expert e of row t: y += down_e (p gating(gate, up)) + p c_e, with [gate | up] = gate_up_e x + b_e. The
// weight p is within, so that its gradient is known where the expert is, and no expert's result need be kept.
// With `scales_input` it multiplies x there, and nothing else.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mv.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "core/saved_output.h"
#include "cpu/layers/weighted_gating.h"
#include "ops/experts/expert_passes.h"
#include "ops/experts/expert_rows.h"
#include "ops/gather_matmul.h"
#include "ops/gemm/gemm.h"
#include "ops/matmul_scatter.h"
#include "ops/operators.h"
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

// The parameters of a rank's experts.
struct Parameters {
  at::Tensor gate_up, down;  // [E_r, 2F, D] and [E_r, D, F], or if `transposed` the latter two swapped
  at::Tensor gate_up_bias, down_bias;  // [E_r, 2F] and [E_r, D]; both undefined for none
  bool transposed;

  int64_t features() const { return down.size(transposed ? 1 : 2); }  // F
  bool has_bias() const { return gate_up_bias.defined(); }
};

Held check(const Operand& x, const at::Tensor& ids, const at::Tensor& weights, const Parameters& given,
           const Group& group, int64_t experts) {
  const Held held = held_by(group, experts);
  const at::Tensor &gate_up = given.gate_up, &down = given.down;
  const int64_t in = given.transposed ? 1 : 2, out = 3 - in;
  const bool fit = gate_up.dim() == 3 && down.dim() == 3 && gate_up.size(0) == held.count &&
                   down.size(0) == held.count && gate_up.size(in) == x.width && down.size(out) == x.width &&
                   gate_up.size(out) == 2 * down.size(in);
  TORCH_CHECK_VALUE(fit, kOp, ": gate_up has shape ", gate_up.sizes(), " and down ", down.sizes(),
                    "; for rows of ", x.width, " features rank ", group.rank(), " of ", group.world_size(),
                    " needs [", held.count, ", 2 F, ", x.width, "] and [", held.count, ", ", x.width, ", F]",
                    given.transposed ? " with the last two dimensions swapped" : "",
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
  return held;
}

// --- the passes

// All ranks' rows of a table.
at::Tensor gathered(Group& group, const at::Tensor& own, int64_t rows) {
  Route whole{group, rows, {Tier::kUnfused}};
  whole.together = true;
  return GatherMatmul(whole, Op::kAllGather, Operand::of(own, 0, "ids"), RowsAre::kKept).rows().select(0, 0);
}

Route route_of(const char* op, const Operand& x, int64_t features, c10::string_view group,
               c10::string_view tier, bool cut, int64_t rows) {
  Call call{.op = op, .x = x, .n = features, .k = x.width, .group = group, .tier = tier};
  if (cut) call.rows = rows;
  return choose_route(call);
}

bool pads(const at::Tensor& matrices, const at::Tensor& table, int64_t experts) {
  const int64_t rows = table.size(0) * table.size(1) / 2 / experts;  // mean of an expert
  return matrices.size(0) > 0 && library_multiplies(matrices.select(0, 0), rows);
}

// Each row times its weight.
at::Tensor weighted(const at::Tensor& rows, const at::Tensor& weights) {
  return (rows * weights.unsqueeze(-1)).to(rows.scalar_type());
}

// Whether the backward reads the rows of x: for the gradient of gate_up, or of the weights.
bool reads_inputs(bool has_gradient, bool scales_input) {
  return has_gradient || scales_input;
}

// Returns {y, table, hidden, kept}: this rank's rows of the result; for the backward the experts and weights
// of all ranks' rows [rows, 2k], gate_up's results [routed, 2F], and between hosts the routed rows of x
// [routed, D]. Without `keep_inputs` the latter is [0].
Tensors experts(const at::Tensor& x_shard, const at::Tensor& ids, const at::Tensor& weights,
                const at::Tensor& gate_up, const at::Tensor& down,
                const std::optional<at::Tensor>& gate_up_bias, const std::optional<at::Tensor>& down_bias,
                c10::string_view group_name, int64_t experts, bool cut, c10::SymInt all_rows,
                c10::string_view tier, bool transposed, bool interleaved, bool scales_input, double alpha,
                double limit, double shift, bool keep_inputs) {
  const Operand x = Operand::of(x_shard, 0, "x");
  const Parameters of{gate_up, down, gate_up_bias.value_or(at::Tensor()), down_bias.value_or(at::Tensor()),
                      transposed};
  const layers::Gating gating{alpha, limit, shift, interleaved};
  Group& group = Group::get(std::string(group_name));
  const Held held = check(x, ids, weights, of, group, experts);
  const c10::DeviceGuard on(x_shard.device());
  const Route route = route_of(kOp, x, of.features(), group_name, tier, cut, all_rows.expect_int());
  AllRows rows_of_x(route, x, cut);
  const at::ScalarType precise = dtype_of_sums(x_shard);
  at::Tensor table = at::cat({ids.to(precise), weights.to(precise)}, 1);
  if (cut) table = gathered(group, table, route.rows);
  const ExpertRows routed(table, held.first, held.count, pads(gate_up, table, experts));
  const at::Tensor hidden = at::empty({routed.size(), 2 * of.features()}, x_shard.options());
  const bool keep = keep_inputs && cut && group.crosses_hosts(x_shard.device());
  at::Tensor kept = at::empty({keep ? routed.size() : 0, x.width}, x_shard.options());
  const at::Tensor of_outputs = scales_input ? at::ones_like(routed.weights()) : routed.weights();
  ExpertGemms up(gate_up, !transposed, routed, of.gate_up_bias), back(down, !transposed, routed);
  SumsOfExperts sums(route, x, routed, gate_up, [&](const Share& share, const at::Tensor& out) {
    const ExpertRows::Run& run = share.run;
    const at::Tensor rows = keep ? run.of(kept) : at::empty({run.count, x.width}, x_shard.options());
    rows_of_x.copy(routed, share, rows);
    up.write(share, run.of(hidden), scales_input ? weighted(rows, run.of(routed.weights())) : rows);
    const at::Tensor p = run.of(of_outputs);
    back.write(share, out, layers::call_weighted_gating(run.of(hidden), p, gating));
    if (!of.has_bias()) return;
    for_each_expert(routed, share, [&](int64_t expert, const ExpertRows::Run& own) {
      own.of(out).add_(own.of(p).unsqueeze(1) * of.down_bias.select(0, expert));
    });
  });
  MatmulScatter scatter(route, sums.parts(), /*all=*/!cut);
  rows_of_x.finish();
  const at::Tensor y = scatter.finish().view(x_shard.sizes());
  if (keep) routed.clear_padding(kept);
  if (!keep_inputs) kept = kept.view({0});  // tells the backward that it has none
  return {y, table, hidden, kept};
}

// Returns {dx, dweights [own rows, k], dgate_up, ddown} and, if there are biases, their gradients; of
// matrices and their biases those that are needed. They run while the sums of dx travel; undefined if a sink
// took their operands.
Tensors experts_backward(const at::Tensor& grad, const at::Tensor& x_shard, const at::Tensor& table,
                         const at::Tensor& hidden, const at::Tensor& kept, const at::Tensor& gate_up,
                         const at::Tensor& down, const std::optional<at::Tensor>& down_bias,
                         c10::string_view group_name, int64_t experts, bool cut, c10::string_view tier,
                         bool transposed, bool interleaved, bool scales_input, double alpha, double limit,
                         double shift, bool need_gate_up, bool need_down) {
  const bool reads_x = reads_inputs(need_gate_up, scales_input);
  const Operand x = reads_x ? Operand::of(x_shard, 0, "x") : Operand::form_of(x_shard, 0, "x");
  const Operand dy = Operand::of(grad.contiguous(), 0, "grad");
  const layers::Gating gating{alpha, limit, shift, interleaved};
  Group& group = Group::get(std::string(group_name));
  const Held held = held_by(group, experts);
  const c10::DeviceGuard on(x_shard.device());
  const int64_t features = hidden.size(1) / 2;
  const Route route = route_of("experts_backward", dy, features, group_name, tier, cut, table.size(0));
  AllRows rows_of_dy(route, dy, cut);
  std::optional<AllRows> rows_of_x;
  const bool was_kept = kept.dim() == 2 && cut && group.crosses_hosts(x_shard.device());
  if (reads_x && !was_kept) rows_of_x.emplace(route, x, cut);
  const ExpertRows routed(table, held.first, held.count, pads(gate_up, table, experts));
  // The gradient of a matrix reads all places. Without it, rows last as long as they are computed with.
  const auto empty = [&](int64_t rows, int64_t width) { return at::empty({rows, width}, x_shard.options()); };
  const auto for_all = [&](bool needed, int64_t width) {
    return needed ? empty(routed.size(), width) : at::Tensor();
  };
  const auto rows_in = [&](const at::Tensor& all, const ExpertRows::Run& run, int64_t width) {
    return all.defined() ? run.of(all) : empty(run.count, width);
  };
  const at::Tensor dy_rows = for_all(need_down, x.width), products = for_all(need_down, features);
  const at::Tensor dhidden = for_all(need_gate_up, 2 * features);
  const at::Tensor x_rows = was_kept ? kept : for_all(reads_x, x.width);
  const at::Tensor dp = at::zeros({table.size(0) * table.size(1) / 2}, table.options());
  const at::Tensor of_outputs = scales_input ? at::ones_like(routed.weights()) : routed.weights();
  ExpertGemms through_down(down, transposed, routed), through_up(gate_up, transposed, routed);
  SumsOfExperts sums(route, x, routed, gate_up, [&](const Share& share, const at::Tensor& out) {
    const ExpertRows::Run& run = share.run;
    const at::Tensor dy_run = rows_in(dy_rows, run, x.width);
    const at::Tensor dhidden_run = rows_in(dhidden, run, 2 * features);
    rows_of_dy.copy(routed, share, dy_run);
    if (rows_of_x) rows_of_x->copy(routed, share, run.of(x_rows));
    const at::Tensor dproduct = empty(run.count, features);
    through_down.write(share, dproduct, dy_run);
    const at::Tensor dots = at::empty({run.count}, table.options());
    layers::call_weighted_gating_backward(dproduct, run.of(hidden), run.of(of_outputs), gating, dhidden_run,
                                          rows_in(products, run, features), dots);
    through_up.write(share, out, dhidden_run);
    if (scales_input) {
      dots.copy_((run.of(x_rows).to(dots.scalar_type()) * out).sum(-1));
      out.copy_(weighted(out, run.of(routed.weights())));
    } else if (down_bias) {
      for_each_expert(routed, share, [&](int64_t expert, const ExpertRows::Run& own) {
        const at::Tensor bias = down_bias->select(0, expert).to(dots.scalar_type());
        own.of(dots).add_(at::mv(own.of(dy_run).to(dots.scalar_type()), bias));
      });
    }
    // On a device there is no padding.
    const ExpertRows::Run rows = share.experts == 1 ? routed.of(share.first, share.range) : run;
    dp.index_copy_(0, rows.of(routed.places()), dots.narrow(0, 0, rows.count));
  });
  MatmulScatter scatter(route, sums.parts(), /*all=*/!cut);
  rows_of_dy.finish();
  if (rows_of_x) rows_of_x->finish();
  for (const at::Tensor& values : {dy_rows, dhidden, products, was_kept ? at::Tensor() : x_rows}) {
    if (values.defined()) routed.clear_padding(values);
  }
  const auto gradient = [&](const at::Tensor& stack, const at::Tensor& out_rows, const at::Tensor& in_rows) {
    return stack_gradient(stack, transposed ? in_rows : out_rows, transposed ? out_rows : in_rows,
                          routed.ends());
  };
  Tensors of_parameters;
  if (need_gate_up) {
    const at::Tensor inputs = scales_input ? weighted(x_rows, routed.weights()) : x_rows;
    of_parameters.push_back(gradient(gate_up, dhidden, inputs));
  }
  if (need_down) of_parameters.push_back(gradient(down, dy_rows, products));
  if (down_bias && need_gate_up) {
    const at::Tensor dbias = gate_up.new_empty({held.count, 2 * features});
    for (int64_t expert = 0; expert < held.count; ++expert) {
      dbias.select(0, expert).copy_(routed.of(expert).of(dhidden).sum(0));
    }
    of_parameters.push_back(dbias);
  }
  if (down_bias && need_down) {
    const at::Tensor dbias = down_bias->new_empty(down_bias->sizes());
    for (int64_t expert = 0; expert < held.count; ++expert) {
      const ExpertRows::Run run = routed.of(expert);
      const at::Tensor dy_of = run.of(dy_rows).to(table.scalar_type());
      dbias.select(0, expert).copy_(at::mv(dy_of.t(), run.of(of_outputs)));
    }
    of_parameters.push_back(dbias);
  }
  const at::Tensor dx = scatter.finish().view(x_shard.sizes());
  // Every weight belongs to one expert, so only one rank's term is not zero.
  const at::Tensor terms = dp.view({table.size(0), table.size(1) / 2});
  const at::Tensor dweights =
      cut ? call_reduce_scatter(terms, group_name, /*dim=*/0) : call_all_reduce(terms, group_name);
  Tensors result{dx, dweights};
  result.insert(result.end(), of_parameters.begin(), of_parameters.end());
  return result;
}

// --- autograd

struct Experts : Function<Experts> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& ids,
                               const at::Tensor& weights, const at::Tensor& gate_up, const at::Tensor& down,
                               const std::optional<at::Tensor>& gate_up_bias,
                               const std::optional<at::Tensor>& down_bias, c10::string_view group,
                               int64_t count, bool cut, const c10::SymInt& rows, c10::string_view tier,
                               bool transposed, bool interleaved, bool scales_input, double alpha,
                               double limit, double shift, bool /*keep_inputs*/) {
    const bool has_gradient =
        gate_up.requires_grad() || (gate_up_bias.has_value() && gate_up_bias->requires_grad());
    const bool keep_inputs = reads_inputs(has_gradient, scales_input);
    variable_list outputs = [&] {
      at::AutoDispatchBelowADInplaceOrView guard;
      return Operator<experts>::call(x, ids, weights, gate_up, down, gate_up_bias, down_bias, group, count,
                                     cut, rows, tier, transposed, interleaved, scales_input, alpha, limit,
                                     shift, keep_inputs);
    }();
    const at::Tensor inputs = keep_inputs ? x : saved_input(x, {});
    ctx->save_for_backward({inputs, saved_output(outputs[1]), saved_output(outputs[2]),
                            saved_output(outputs[3]), gate_up, down, down_bias.value_or(at::Tensor())});
    ctx->saved_data["group"] = std::string(group);
    ctx->saved_data["experts"] = count;
    ctx->saved_data["cut"] = cut;
    ctx->saved_data["tier"] = std::string(tier);
    ctx->saved_data["transposed"] = transposed;
    ctx->saved_data["interleaved"] = interleaved;
    ctx->saved_data["scales_input"] = scales_input;
    ctx->saved_data["gating"] = std::vector<double>{alpha, limit, shift};
    ctx->mark_non_differentiable({outputs[1], outputs[2], outputs[3]});
    ctx->set_materialize_grads(false);  // zeros for these would be as large as all routed rows
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_second_derivatives(kOp);
    const Tensors saved = ctx->get_saved_variables();
    const std::vector<double> gating = ctx->saved_data["gating"].toDoubleVector();
    const std::optional<at::Tensor> bias = saved[6].defined() ? std::optional(saved[6]) : std::nullopt;
    // Inputs 3 and 4 are the matrices, 5 and 6 their biases.
    const auto needs = [&](size_t input) {
      return ctx->needs_input_grad(input) || (bias && ctx->needs_input_grad(input + 2));
    };
    const bool needed[] = {needs(3), needs(4)};
    const Tensors found = Operator<experts_backward>::call(
        grads[0], saved[0], saved[1], saved[2], saved[3], saved[4], saved[5], bias,
        ctx->saved_data["group"].toStringRef(), ctx->saved_data["experts"].toInt(),
        ctx->saved_data["cut"].toBool(), ctx->saved_data["tier"].toStringRef(),
        ctx->saved_data["transposed"].toBool(), ctx->saved_data["interleaved"].toBool(),
        ctx->saved_data["scales_input"].toBool(), gating[0], gating[1], gating[2], needed[0], needed[1]);
    variable_list result(19);
    result[0] = found[0];
    result[2] = found[1];
    size_t next = 2;
    for (size_t input = 3; input < (bias ? 7 : 5); ++input) {
      if (needed[(input - 3) % 2]) result[input] = found[next++];
    }
    return result;
  }
};

}  // namespace

void register_experts(torch::Library& m) {
  Operator<experts>::define_differentiable<Experts>(
      m,
      "experts(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, Tensor? gate_up_bias, "
      "Tensor? down_bias, str group, int experts, bool cut, SymInt rows, str tier, bool transposed, "
      "bool interleaved, bool scales_input, float alpha, float limit, float shift, "
      "bool keep_inputs=True) -> Tensor[]");
  Operator<experts_backward>::define(
      m,
      "experts_backward(Tensor grad, Tensor x, Tensor table, Tensor hidden, Tensor kept, Tensor gate_up, "
      "Tensor down, Tensor? down_bias, str group, int experts, bool cut, str tier, bool transposed, "
      "bool interleaved, bool scales_input, float alpha, float limit, float shift, bool need_gate_up, "
      "bool need_down) -> Tensor[]");
}

}  // namespace pyruntime
