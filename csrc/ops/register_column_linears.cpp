// Registers the column linears, where each rank makes some columns of Y: of an x that is gathered, and of one
// that every rank holds whole.
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/saved_output.h"
#include "ops/autograd.h"
#include "ops/checks.h"
#include "ops/primitives.h"
#include "ops/register.h"
#include "transport/group.h"

namespace pyruntime {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

using OptionalTensorList = c10::List<std::optional<at::Tensor>>;

OptionalTensors to_vector(const OptionalTensorList& list) {
  OptionalTensors result;
  for (size_t i = 0; i < list.size(); ++i) result.push_back(list.get(i));
  return result;
}

// --- the operators that autograd calls

Tensors call_all_gather_matmul(const at::Tensor& x, at::TensorList weights, const OptionalTensorList& biases,
                               const std::string& group, int64_t dim, const c10::SymInt& rows,
                               bool return_gathered, const std::string& tier) {
  static const auto op =
      operator_named<Tensors(const at::Tensor&, at::TensorList, const OptionalTensorList&, c10::string_view,
                             int64_t, c10::SymInt, bool, std::optional<bool>, c10::string_view)>(
          "pyruntime::all_gather_matmul");
  return op.call(x, weights, biases, group, dim, rows, return_gathered, false, tier);
}

Tensors call_all_gather_matmul_backward(at::TensorList grads, const at::Tensor& x, bool gathered,
                                        at::TensorList weights, const std::string& group, int64_t dim,
                                        bool need_dx, bool need_dw, const std::string& tier) {
  static const auto op =
      operator_named<Tensors(at::TensorList, const at::Tensor&, bool, at::TensorList, c10::string_view,
                             int64_t, bool, bool, c10::string_view)>("pyruntime::all_gather_matmul_backward");
  return op.call(grads, x, gathered, weights, group, dim, need_dx, need_dw, tier);
}

Tensors call_replicated_matmul_backward(at::TensorList grads, const at::Tensor& x, at::TensorList weights,
                                        const std::string& group, bool need_dx, bool need_dw,
                                        const std::string& tier) {
  static const auto op =
      operator_named<Tensors(at::TensorList, const at::Tensor&, at::TensorList, c10::string_view, bool, bool,
                             c10::string_view)>("pyruntime::replicated_matmul_backward");
  return op.call(grads, x, weights, group, need_dx, need_dw, tier);
}

// --- autograd

// The tensors of a column linear in one list, as autograd wants them: x, the weights, then the biases that
// are there.
struct ColumnInputs {
  Tensors tensors;
  std::vector<int64_t> has_bias;

  ColumnInputs(const char* op, const at::Tensor& x, at::TensorList weights,
               const OptionalTensorList& biases) {
    optional_tensors(to_vector(biases), weights.size(), op);  // refuses another number of biases
    tensors.push_back(x);
    tensors.insert(tensors.end(), weights.begin(), weights.end());
    for (size_t i = 0; i < weights.size(); ++i) {
      const std::optional<at::Tensor> bias = i < biases.size() ? biases.get(i) : std::nullopt;
      has_bias.push_back(bias.has_value() && bias->defined());
      if (has_bias.back() != 0) tensors.push_back(*bias);
    }
  }
};

// What every column backward needs to know beside tensors.
struct ColumnSpec {
  std::string group;
  std::string tier;
  int64_t dim;
  c10::SymInt rows;
  bool return_gathered;
  bool keep_gathered;
  std::vector<int64_t> has_bias;
};

Tensors weights_of(const Tensors& saved, size_t count) {
  return {saved.begin() + 1, saved.begin() + 1 + static_cast<std::ptrdiff_t>(count)};
}

OptionalTensorList biases_of(at::TensorList inputs, const std::vector<int64_t>& has_bias) {
  OptionalTensorList biases;
  size_t next = 1 + has_bias.size();
  for (const int64_t present : has_bias)
    biases.push_back(present != 0 ? std::optional<at::Tensor>(inputs[next++]) : std::nullopt);
  return biases;
}

bool any_needs_grad(AutogradContext* ctx, size_t begin, size_t count) {
  for (size_t i = begin; i < begin + count; ++i) {
    if (ctx->needs_input_grad(i)) return true;
  }
  return false;
}

// Gradients of [x, weights, biases] from those of x and the weights.
variable_list column_grads(AutogradContext* ctx, const Tensors& found, bool need_dx, bool need_dw,
                           const variable_list& grads, const std::vector<int64_t>& has_bias) {
  const size_t count = has_bias.size();
  variable_list result(1 + count);
  size_t next = 0;
  if (need_dx) result[0] = found[next++];
  if (need_dw) {
    for (size_t i = 0; i < count; ++i) result[1 + i] = found[next++];
  }
  for (size_t i = 0; i < count; ++i) {
    if (has_bias[i] != 0)
      result.push_back(ctx->needs_input_grad(result.size()) ? sum_over_rows(grads[i]) : at::Tensor());
  }
  return result;
}

class AllGatherMatmul : public Function<AllGatherMatmul> {
 public:
  static variable_list forward(AutogradContext* ctx, at::TensorList inputs, const ColumnSpec& spec) {
    const size_t count = spec.has_bias.size();
    const at::TensorList weights = inputs.slice(1, count);
    const bool keep = spec.keep_gathered || spec.return_gathered;
    variable_list outputs = [&] {
      at::AutoDispatchBelowADInplaceOrView guard;
      return call_all_gather_matmul(inputs[0], weights, biases_of(inputs, spec.has_bias), spec.group,
                                    spec.dim, spec.rows, keep, spec.tier);
    }();
    variable_list saved{spec.keep_gathered ? saved_output(outputs.back()) : inputs[0]};
    if (spec.keep_gathered && !spec.return_gathered) outputs.pop_back();
    saved.insert(saved.end(), weights.begin(), weights.end());
    ctx->save_for_backward(saved);
    ctx->saved_data["group"] = spec.group;
    ctx->saved_data["tier"] = spec.tier;
    ctx->saved_data["dim"] = spec.dim;
    ctx->saved_data["gathered"] = spec.keep_gathered;
    ctx->saved_data["has_bias"] = spec.has_bias;
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Tensors saved = ctx->get_saved_variables();
    const std::vector<int64_t> has_bias = ctx->saved_data["has_bias"].toIntVector();
    const std::string group = ctx->saved_data["group"].toStringRef();
    const int64_t dim = ctx->saved_data["dim"].toInt();
    const size_t count = has_bias.size();
    const Tensors weights = weights_of(saved, count);
    const bool need_dx = ctx->needs_input_grad(0);
    const bool need_dw = any_needs_grad(ctx, 1, count);
    Tensors found;
    if (need_dx || need_dw) {
      found = call_all_gather_matmul_backward(at::TensorList(grads).slice(0, count), saved[0],
                                              ctx->saved_data["gathered"].toBool(), weights, group, dim,
                                              need_dx, need_dw, ctx->saved_data["tier"].toStringRef());
    }
    // The gathered x, where it was returned, was used by every rank: its gradients add up over them.
    if (need_dx && grads.size() > count) found[0] = found[0] + call_reduce_scatter(grads[count], group, dim);
    variable_list result = column_grads(ctx, found, need_dx, need_dw, grads, has_bias);
    result.emplace_back();  // the spec
    return result;
  }
};

Tensors all_gather_matmul_autograd(const at::Tensor& x, at::TensorList weights,
                                   const OptionalTensorList& biases, c10::string_view group, int64_t dim,
                                   c10::SymInt rows, bool return_gathered, std::optional<bool> keep_gathered,
                                   c10::string_view tier) {
  const ColumnInputs inputs("all_gather_matmul", x, weights, biases);
  // On one host gathering again costs next to nothing; over a network it costs a transfer.
  const bool keep =
      keep_gathered.has_value() ? *keep_gathered : Group::get(std::string(group)).crosses_hosts(x.device());
  return AllGatherMatmul::apply(at::TensorList(inputs.tensors),
                                ColumnSpec{std::string(group), std::string(tier), dim, std::move(rows),
                                           return_gathered, keep, inputs.has_bias});
}

class ReplicatedMatmul : public Function<ReplicatedMatmul> {
 public:
  static variable_list forward(AutogradContext* ctx, at::TensorList inputs, const ColumnSpec& spec) {
    at::AutoDispatchBelowADInplaceOrView guard;
    static const auto op =
        operator_named<Tensors(const at::Tensor&, at::TensorList, const OptionalTensorList&, c10::string_view,
                               c10::string_view)>("pyruntime::replicated_matmul");
    const size_t count = spec.has_bias.size();
    const at::TensorList weights = inputs.slice(1, count);
    variable_list outputs =
        op.call(inputs[0], weights, biases_of(inputs, spec.has_bias), spec.group, spec.tier);
    variable_list saved{inputs[0]};
    saved.insert(saved.end(), weights.begin(), weights.end());
    ctx->save_for_backward(saved);
    ctx->saved_data["group"] = spec.group;
    ctx->saved_data["tier"] = spec.tier;
    ctx->saved_data["has_bias"] = spec.has_bias;
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Tensors saved = ctx->get_saved_variables();
    const std::vector<int64_t> has_bias = ctx->saved_data["has_bias"].toIntVector();
    const size_t count = has_bias.size();
    const bool need_dx = ctx->needs_input_grad(0);
    const bool need_dw = any_needs_grad(ctx, 1, count);
    Tensors found;
    if (need_dx || need_dw) {
      found = call_replicated_matmul_backward(grads, saved[0], weights_of(saved, count),
                                              ctx->saved_data["group"].toStringRef(), need_dx, need_dw,
                                              ctx->saved_data["tier"].toStringRef());
    }
    variable_list result = column_grads(ctx, found, need_dx, need_dw, grads, has_bias);
    result.emplace_back();  // the spec
    return result;
  }
};

Tensors replicated_matmul_autograd(const at::Tensor& x, at::TensorList weights,
                                   const OptionalTensorList& biases, c10::string_view group,
                                   c10::string_view tier) {
  const ColumnInputs inputs("replicated_matmul", x, weights, biases);
  return ReplicatedMatmul::apply(
      at::TensorList(inputs.tensors),
      ColumnSpec{std::string(group), std::string(tier), 0, 0, false, false, inputs.has_bias});
}

// --- kernels: the C++ functions with the dispatcher's argument types

Tensors all_gather_matmul_kernel(const at::Tensor& x, at::TensorList weights,
                                 const OptionalTensorList& biases, c10::string_view group, int64_t dim,
                                 c10::SymInt rows, bool return_gathered,
                                 std::optional<bool> /*keep_gathered: what autograd saves*/,
                                 c10::string_view tier) {
  return all_gather_matmul(x, weights.vec(), to_vector(biases), std::string(group), dim, rows.expect_int(),
                           return_gathered, std::string(tier));
}

Tensors all_gather_matmul_backward_kernel(at::TensorList grads, const at::Tensor& x, bool gathered,
                                          at::TensorList weights, c10::string_view group, int64_t dim,
                                          bool need_dx, bool need_dw, c10::string_view tier) {
  return all_gather_matmul_backward(grads.vec(), x, gathered, weights.vec(), std::string(group), dim, need_dx,
                                    need_dw, std::string(tier));
}

Tensors replicated_matmul_kernel(const at::Tensor& x, at::TensorList weights,
                                 const OptionalTensorList& biases, c10::string_view /*group*/,
                                 c10::string_view /*tier: only the backward travels*/) {
  return replicated_matmul(x, weights.vec(), to_vector(biases));
}

Tensors replicated_matmul_backward_kernel(at::TensorList grads, const at::Tensor& x, at::TensorList weights,
                                          c10::string_view group, bool need_dx, bool need_dw,
                                          c10::string_view tier) {
  return replicated_matmul_backward(grads.vec(), x, weights.vec(), std::string(group), need_dx, need_dw,
                                    std::string(tier));
}

}  // namespace

void register_column_linears(torch::Library& m) {
  m.def(
      "all_gather_matmul(Tensor x_shard, Tensor[] weights, Tensor?[] biases, str group, int dim, SymInt "
      "rows, bool return_gathered, "
      "bool? keep_gathered, str tier) -> Tensor[]");
  m.impl("all_gather_matmul", torch::dispatch(kKernel, TORCH_FN(all_gather_matmul_kernel)));
  m.impl("all_gather_matmul", torch::dispatch(kAutograd, TORCH_FN(all_gather_matmul_autograd)));
  m.def(
      "all_gather_matmul_backward(Tensor[] grads, Tensor x, bool gathered, Tensor[] weights, str group, int "
      "dim, bool need_dx, "
      "bool need_dw, str tier) -> Tensor[]");
  m.impl("all_gather_matmul_backward", torch::dispatch(kKernel, TORCH_FN(all_gather_matmul_backward_kernel)));

  m.def("replicated_matmul(Tensor x, Tensor[] weights, Tensor?[] biases, str group, str tier) -> Tensor[]");
  m.impl("replicated_matmul", torch::dispatch(kKernel, TORCH_FN(replicated_matmul_kernel)));
  m.impl("replicated_matmul", torch::dispatch(kAutograd, TORCH_FN(replicated_matmul_autograd)));
  m.def(
      "replicated_matmul_backward(Tensor[] grads, Tensor x, Tensor[] weights, str group, bool need_dx, bool "
      "need_dw, str tier) -> "
      "Tensor[]");
  m.impl("replicated_matmul_backward", torch::dispatch(kKernel, TORCH_FN(replicated_matmul_backward_kernel)));
}

}  // namespace pyruntime
