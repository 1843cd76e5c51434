// The experts of a mixture, of which each rank has some whole, by the two engines: rows are gathered and the
// experts take those that were sent to them, chunk by chunk; what they make of a chunk leaves as soon as it
// is summed over this rank's experts, and its owner sums over the ranks. On devices, if a rank needs few of
// all rows, each goes only to the ranks that need it (dealt_routes.h). The sums are the same.
//
// Expert e of row t: y += down_e (p gating(gate, up)) + p c_e, with [gate | up] = gate_up_e x + b_e. The
// weight p is within, so that its gradient is known where the expert is, and no expert's result need be kept.
// With `scales_input` it multiplies x there, and nothing else.
#include <c10/core/DeviceGuard.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/saved_output.h"
#include "ops/experts/expert_steps.h"
#include "ops/operators.h"

namespace pyruntime {

namespace {

constexpr const char* kOp = "experts";

// --- kernels

ExpertOptions options_of(c10::string_view group, int64_t experts, bool cut, c10::string_view tier,
                         bool transposed, bool scales_input, const layers::Gating& gating) {
  return {std::string(group), experts, cut, std::string(tier), transposed, scales_input, gating};
}

// Returns {y, table, hidden, kept}: this rank's rows of the result; for the backward the experts and weights
// of all ranks' rows [rows, 2k], gate_up's results [routed, 2F], and between hosts the routed rows of x
// [routed, D]. Without `keep_inputs` the latter is [0].
Tensors experts(const at::Tensor& x_shard, const at::Tensor& ids, const at::Tensor& weights,
                const at::Tensor& gate_up, const at::Tensor& down,
                const std::optional<at::Tensor>& gate_up_bias, const std::optional<at::Tensor>& down_bias,
                c10::string_view group, int64_t experts, bool cut, c10::SymInt rows, c10::string_view tier,
                bool transposed, bool interleaved, bool scales_input, double alpha, double limit,
                double shift, bool keep_inputs) {
  const ExpertParameters parameters{gate_up, down, gate_up_bias.value_or(at::Tensor()),
                                    down_bias.value_or(at::Tensor())};
  const ExpertOptions options =
      options_of(group, experts, cut, tier, transposed, scales_input, {alpha, limit, shift, interleaved});
  ExpertsForward forward(options, parameters, x_shard, ids, weights, rows.expect_int());
  forward.multiply(keep_inputs);
  forward.scatter();
  return {forward.finish(), forward.table(), forward.hidden(), forward.kept()};
}

// Returns {dx, dweights [own rows, k], dgate_up, ddown} and, if there are biases, their gradients; of
// matrices and their biases those that are needed. They run while the sums of dx travel; undefined if a sink
// took their operands.
Tensors experts_backward(const at::Tensor& grad, const at::Tensor& x_shard, const at::Tensor& table,
                         const at::Tensor& hidden, const at::Tensor& kept, const at::Tensor& gate_up,
                         const at::Tensor& down, const std::optional<at::Tensor>& down_bias,
                         c10::string_view group, int64_t experts, bool cut, c10::string_view tier,
                         bool transposed, bool interleaved, bool scales_input, double alpha, double limit,
                         double shift, bool need_gate_up, bool need_down) {
  const ExpertOptions options =
      options_of(group, experts, cut, tier, transposed, scales_input, {alpha, limit, shift, interleaved});
  const c10::DeviceGuard on(grad.device());
  const std::shared_ptr<DealtRoutes> dealt = dealt_by(table, options);
  ExpertsBackward backward(options, grad, x_shard, routed_by(table, options, gate_up), dealt, table.size(0),
                           table.size(1) / 2, hidden.size(1) / 2, reads_inputs(need_gate_up, options),
                           /*has_kept=*/kept.dim() == 2);
  ExpertParameters found;
  const ExpertParameters parameters{gate_up, down, {}, down_bias.value_or(at::Tensor())};
  backward.multiply(parameters, hidden, kept, need_gate_up, need_down);
  backward.scatter(found);
  auto [dx, dweights] = backward.finish();
  Tensors result{dx, dweights};
  if (need_gate_up) result.push_back(found.gate_up);
  if (need_down) result.push_back(found.down);
  if (down_bias && need_gate_up) result.push_back(found.gate_up_bias);
  if (down_bias && need_down) result.push_back(found.down_bias);
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
    const bool keep_inputs = has_gradient || scales_input;
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
