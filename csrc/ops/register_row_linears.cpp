// Registers the row linears, where each rank has some columns of x and makes a part of every sum: the sums go
// to the owners of their rows, or to every rank.
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstddef>
#include <optional>
#include <string>

#include "ops/autograd.h"
#include "ops/primitives.h"
#include "ops/register.h"
#include "ops/weight_gradient.h"

namespace pyruntime {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// --- the operators that autograd calls

at::Tensor call_matmul_reduce_scatter(const at::Tensor& x, const at::Tensor& weight,
                                      const std::optional<at::Tensor>& bias, const std::string& group,
                                      int64_t dim, const std::string& tier) {
  static const auto op =
      operator_named<at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                                c10::string_view, int64_t, c10::string_view)>(
          "pyruntime::matmul_reduce_scatter");
  return op.call(x, weight, bias, group, dim, tier);
}

Tensors call_matmul_reduce_scatter_backward(const at::Tensor& grad, const at::Tensor& x,
                                            const at::Tensor& weight, const std::string& group, int64_t dim,
                                            bool need_dx, bool need_dw, bool need_db,
                                            const std::string& tier) {
  static const auto op =
      operator_named<Tensors(const at::Tensor&, const at::Tensor&, const at::Tensor&, c10::string_view,
                             int64_t, bool, bool, bool, c10::string_view)>(
          "pyruntime::matmul_reduce_scatter_backward");
  return op.call(grad, x, weight, group, dim, need_dx, need_dw, need_db, tier);
}

at::Tensor call_matmul_all_reduce(const at::Tensor& x, const at::Tensor& weight,
                                  const std::optional<at::Tensor>& bias, const std::string& group,
                                  const std::string& tier) {
  static const auto op =
      operator_named<at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                                c10::string_view, c10::string_view)>("pyruntime::matmul_all_reduce");
  return op.call(x, weight, bias, group, tier);
}

// --- autograd

class MatmulReduceScatter : public Function<MatmulReduceScatter> {
 public:
  static Variable forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias, const std::string& group, int64_t dim,
                          const std::string& tier) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({x, weight});
    ctx->saved_data["group"] = group;
    ctx->saved_data["tier"] = tier;
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["has_bias"] = bias.has_value() && bias->defined();
    return call_matmul_reduce_scatter(x, weight, bias, group, dim, tier);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Tensors saved = ctx->get_saved_variables();
    const bool need_dx = ctx->needs_input_grad(0);
    const bool need_dw = ctx->needs_input_grad(1);
    const bool need_db = ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2);
    const Tensors found = call_matmul_reduce_scatter_backward(
        grads[0], saved[0], saved[1], ctx->saved_data["group"].toStringRef(), ctx->saved_data["dim"].toInt(),
        need_dx, need_dw, need_db, ctx->saved_data["tier"].toStringRef());
    variable_list result(6);
    size_t next = 0;
    if (need_dx) result[0] = found[next++];
    if (need_dw) result[1] = found[next++];
    if (need_db) result[2] = found[next++];
    return result;
  }
};

at::Tensor matmul_reduce_scatter_autograd(const at::Tensor& x, const at::Tensor& weight,
                                          const std::optional<at::Tensor>& bias, c10::string_view group,
                                          int64_t dim, c10::string_view tier) {
  return MatmulReduceScatter::apply(x, weight, bias, std::string(group), dim, std::string(tier));
}

class MatmulAllReduce : public Function<MatmulAllReduce> {
 public:
  static Variable forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias, const std::string& group,
                          const std::string& tier) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({x, weight});
    ctx->saved_data["has_bias"] = bias.has_value() && bias->defined();
    return call_matmul_all_reduce(x, weight, bias, group, tier);
  }

  // dY is the same on every rank, so the gradients of this rank's columns of x and W need no communication.
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Tensors saved = ctx->get_saved_variables();
    const at::Tensor& x = saved[0];
    const at::Tensor& weight = saved[1];
    variable_list result(5);
    if (ctx->needs_input_grad(0)) result[0] = at::matmul(grads[0], weight);
    if (ctx->needs_input_grad(1)) {
      const at::Tensor dy = grads[0].reshape_symint({-1, grads[0].sym_size(-1)});
      const at::Tensor rows = x.reshape_symint({-1, x.sym_size(-1)});
      result[1] = has_weight_gradient_sink(weight) ? weight_gradient(weight, dy, rows) : at::mm(dy.t(), rows);
    }
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2)) result[2] = sum_over_rows(grads[0]);
    return result;
  }
};

at::Tensor matmul_all_reduce_autograd(const at::Tensor& x, const at::Tensor& weight,
                                      const std::optional<at::Tensor>& bias, c10::string_view group,
                                      c10::string_view tier) {
  return MatmulAllReduce::apply(x, weight, bias, std::string(group), std::string(tier));
}

// --- kernels: the C++ functions with the dispatcher's argument types

at::Tensor matmul_reduce_scatter_kernel(const at::Tensor& x, const at::Tensor& weight,
                                        const std::optional<at::Tensor>& bias, c10::string_view group,
                                        int64_t dim, c10::string_view tier) {
  return matmul_reduce_scatter(x, weight, bias, std::string(group), dim, std::string(tier));
}

Tensors matmul_reduce_scatter_backward_kernel(const at::Tensor& grad, const at::Tensor& x,
                                              const at::Tensor& weight, c10::string_view group, int64_t dim,
                                              bool need_dx, bool need_dw, bool need_db,
                                              c10::string_view tier) {
  return matmul_reduce_scatter_backward(grad, x, weight, std::string(group), dim, need_dx, need_dw, need_db,
                                        std::string(tier));
}

at::Tensor matmul_all_reduce_kernel(const at::Tensor& x, const at::Tensor& weight,
                                    const std::optional<at::Tensor>& bias, c10::string_view group,
                                    c10::string_view tier) {
  return matmul_all_reduce(x, weight, bias, std::string(group), std::string(tier));
}

}  // namespace

void register_row_linears(torch::Library& m) {
  m.def(
      "matmul_reduce_scatter(Tensor x, Tensor weight, Tensor? bias, str group, int dim, str tier) -> Tensor");
  m.impl("matmul_reduce_scatter", torch::dispatch(kKernel, TORCH_FN(matmul_reduce_scatter_kernel)));
  m.impl("matmul_reduce_scatter", torch::dispatch(kAutograd, TORCH_FN(matmul_reduce_scatter_autograd)));
  m.def(
      "matmul_reduce_scatter_backward(Tensor grad_shard, Tensor x, Tensor weight, str group, int dim, bool "
      "need_dx, bool need_dw, "
      "bool need_db, str tier) -> Tensor[]");
  m.impl("matmul_reduce_scatter_backward",
         torch::dispatch(kKernel, TORCH_FN(matmul_reduce_scatter_backward_kernel)));

  m.def("matmul_all_reduce(Tensor x, Tensor weight, Tensor? bias, str group, str tier) -> Tensor");
  m.impl("matmul_all_reduce", torch::dispatch(kKernel, TORCH_FN(matmul_all_reduce_kernel)));
  m.impl("matmul_all_reduce", torch::dispatch(kAutograd, TORCH_FN(matmul_all_reduce_autograd)));
}

}  // namespace pyruntime
