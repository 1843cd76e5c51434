// The operator of experts in steps (ops/experts/expert_steps.h), between which another slice's work runs.
//
//     begin     backward: finish       scatter   backward: multiply
//     multiply  backward: scatter      finish    backward: begin
//
// Autograd runs the backward steps in the reverse order, as in sliced_linears.cpp, which says what ties
// them. Every slice adds its product to the gradient of a matrix, which is complete with the last of them.
#include <torch/csrc/autograd/graph_task.h>
#include <torch/custom_class.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "ops/experts/expert_steps.h"
#include "ops/operators.h"
#include "ops/slices/steps.h"

namespace pyruntime {

namespace {

// A rank's experts in one forward pass over slices.
struct SlicedExperts : torch::CustomClassHolder {
  SlicedExperts(std::string group, int64_t experts, bool cut, std::string tier, bool transposed,
                bool interleaved, bool scales_input, double alpha, double limit, double shift)
      : options{std::move(group),
                experts,
                cut,
                std::move(tier),
                transposed,
                scales_input,
                {alpha, limit, shift, interleaved},
                /*under_other_work=*/true} {}

  ExpertOptions options;
  ExpertParameters parameters;
  bool need_gate_up = false, need_down = false;  // a gradient of the matrices or of their biases
  ExpertParameters gradients;                    // of the slices so far, in this pass
  int pass = -1;                                 // autograd's number of the pass

  // The gradients of the pass that runs. A failed pass may have left some.
  ExpertParameters& of_this_pass() {
    const int now = torch::autograd::get_current_graph_task_id();
    if (std::exchange(pass, now) != now) gradients = {};
    return gradients;
  }
};

// One slice's pass through the experts.
struct ExpertsFlight : torch::CustomClassHolder {
  c10::intrusive_ptr<SlicedExperts> experts;
  std::optional<ExpertsForward> forward;
  std::optional<ExpertsBackward> backward;
  std::shared_ptr<const ExpertRows> routed;
  std::shared_ptr<DealtRoutes> dealt;
  int64_t rows = 0, k = 0, features = 0;  // rows of all ranks, with so many experts each
  bool keeps_inputs = false;              // whether the backward reads x
};

using Experts = c10::intrusive_ptr<SlicedExperts>;
using Flight = c10::intrusive_ptr<ExpertsFlight>;

// --- kernels

at::Tensor share_experts(const at::Tensor& gate_up, const at::Tensor& down,
                         const std::optional<at::Tensor>& gate_up_bias,
                         const std::optional<at::Tensor>& down_bias, const Experts& experts) {
  experts->parameters = {gate_up, down, gate_up_bias.value_or(at::Tensor()),
                         down_bias.value_or(at::Tensor())};
  return mark_like(gate_up);
}

at::Tensor begin_experts(const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights, int64_t rows,
                         const Experts& experts, const Flight& flight) {
  flight->experts = experts;
  flight->forward.emplace(experts->options, experts->parameters, x, ids, weights, rows);
  return mark_like(x);
}

at::Tensor multiply_experts(const at::Tensor& begun, const at::Tensor& /*shared*/, const Flight& flight) {
  flight->forward->multiply(flight->keeps_inputs);
  return mark_like(begun);
}

at::Tensor scatter_experts(const at::Tensor& multiplied, const Flight& flight) {
  flight->forward->scatter();
  return mark_like(multiplied);
}

at::Tensor finish_experts(const at::Tensor& /*scattered*/, const at::Tensor& /*x: what autograd may save*/,
                          const Flight& flight) {
  const at::Tensor y = flight->forward->finish();
  flight->forward.reset();
  return y;
}

// --- autograd

struct ShareExperts : Function<ShareExperts> {
  static Variable forward(AutogradContext* ctx, const at::Tensor& gate_up, const at::Tensor& down,
                          const std::optional<at::Tensor>& gate_up_bias,
                          const std::optional<at::Tensor>& down_bias, const Experts& experts) {
    const auto needs = [](const at::Tensor& matrices, const std::optional<at::Tensor>& bias) {
      return matrices.requires_grad() || (bias && bias->requires_grad());
    };
    experts->need_gate_up = needs(gate_up, gate_up_bias);
    experts->need_down = needs(down, down_bias);
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->saved_data["experts"] = experts;
    return Operator<share_experts>::call(gate_up, down, gate_up_bias, down_bias, experts);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& /*marks*/) {
    refuse_second_derivatives("sliced experts");
    const Experts experts = held<Experts>(ctx, "experts");
    const ExpertParameters found = std::exchange(experts->of_this_pass(), {});
    return {found.gate_up, found.down, found.gate_up_bias, found.down_bias, at::Tensor()};
  }
};

struct BeginExperts : Function<BeginExperts> {
  static Variable forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& ids,
                          const at::Tensor& weights, int64_t rows, const Experts& experts,
                          const Flight& flight) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->saved_data["flight"] = flight;
    return Operator<begin_experts>::call(x, ids, weights, rows, experts, flight);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& /*marks*/) {
    const Flight flight = held<Flight>(ctx, "flight");
    variable_list result(6);
    std::tie(result[0], result[2]) = flight->backward->finish();
    flight->backward.reset();
    return result;
  }
};

struct MultiplyExperts : Function<MultiplyExperts> {
  static Variable forward(AutogradContext* ctx, const at::Tensor& begun, const at::Tensor& shared,
                          const Flight& flight) {
    const SlicedExperts& experts = *flight->experts;
    flight->keeps_inputs = reads_inputs(experts.need_gate_up, experts.options);
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->saved_data["flight"] = flight;
    return Operator<multiply_experts>::call(begun, shared, flight);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Flight flight = held<Flight>(ctx, "flight");
    flight->backward->scatter(flight->experts->of_this_pass());
    return {mark_like(grads[0]), mark_like(grads[0]), at::Tensor()};
  }
};

struct ScatterExperts : Function<ScatterExperts> {
  static Variable forward(AutogradContext* ctx, const at::Tensor& multiplied, const Flight& flight) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const at::Tensor mark = Operator<scatter_experts>::call(multiplied, flight);
    ExpertsForward& forward = *flight->forward;
    const ExpertParameters& of = flight->experts->parameters;
    flight->routed = forward.routed();
    flight->dealt = forward.dealt();
    flight->rows = forward.table().size(0);
    flight->k = forward.table().size(1) / 2;
    flight->features = forward.hidden().size(1) / 2;
    ctx->save_for_backward({forward.hidden(), forward.kept(), of.gate_up, of.down, of.down_bias});
    forward.forget();
    ctx->saved_data["flight"] = flight;
    return mark;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Flight flight = held<Flight>(ctx, "flight");
    const SlicedExperts& experts = *flight->experts;
    const Tensors saved = ctx->get_saved_variables();  // only once: checkpointing frees them then
    flight->backward->multiply({saved[2], saved[3], {}, saved[4]}, saved[0], saved[1], experts.need_gate_up,
                               experts.need_down);
    return {mark_like(grads[0]), at::Tensor()};
  }
};

struct FinishExperts : Function<FinishExperts> {
  static Variable forward(AutogradContext* ctx, const at::Tensor& scattered, const at::Tensor& x,
                          const Flight& flight) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({flight->keeps_inputs ? x : saved_input(x, {})});
    ctx->saved_data["flight"] = flight;
    return Operator<finish_experts>::call(scattered, x, flight);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_second_derivatives("sliced experts");
    const Flight flight = held<Flight>(ctx, "flight");
    const Experts& experts = flight->experts;
    flight->backward.reset();  // of a pass that failed
    flight->backward.emplace(experts->options, grads[0], ctx->get_saved_variables()[0], flight->routed,
                             flight->dealt, flight->rows, flight->k, flight->features, flight->keeps_inputs,
                             /*has_kept=*/flight->keeps_inputs);
    return {mark_like(grads[0]), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

void register_sliced_experts(torch::Library& m) {
  m.class_<SlicedExperts>("SlicedExperts")
      .def(torch::init<std::string, int64_t, bool, std::string, bool, bool, bool, double, double, double>());
  m.class_<ExpertsFlight>("ExpertsFlight").def(torch::init<>());
  const std::string experts = "__torch__.torch.classes.pyruntime.SlicedExperts experts";
  const std::string flight = "__torch__.torch.classes.pyruntime.ExpertsFlight flight";
  Operator<share_experts>::define_differentiable<ShareExperts>(
      m, "share_experts(Tensor gate_up, Tensor down, Tensor? gate_up_bias, Tensor? down_bias, " + experts +
             ") -> Tensor");
  Operator<begin_experts>::define_differentiable<BeginExperts>(
      m, "begin_experts(Tensor x, Tensor ids, Tensor weights, int rows, " + experts + ", " + flight +
             ") -> Tensor");
  Operator<multiply_experts>::define_differentiable<MultiplyExperts>(
      m, "multiply_experts(Tensor begun, Tensor shared, " + flight + ") -> Tensor");
  Operator<scatter_experts>::define_differentiable<ScatterExperts>(
      m, "scatter_experts(Tensor multiplied, " + flight + ") -> Tensor");
  Operator<finish_experts>::define_differentiable<FinishExperts>(
      m, "finish_experts(Tensor scattered, Tensor x, " + flight + ") -> Tensor");
}

}  // namespace pyruntime
