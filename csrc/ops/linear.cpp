// y = x W^T + b with our gradients: what nn.Linear computes, its weight gradient going where the weight's
// sink wants it.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/csrc/autograd/custom_function.h>

#include "ops/gemm.h"
#include "ops/primitives.h"
#include "ops/register.h"
#include "ops/weight_gradient.h"

namespace pyruntime {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

std::vector<int64_t> all_but_last(const at::Tensor& t) {
  std::vector<int64_t> dims;
  for (int64_t d = 0; d < t.dim() - 1; ++d) dims.push_back(d);
  return dims;
}

class Linear : public torch::autograd::Function<Linear> {
 public:
  static Variable forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({x, weight});
    ctx->saved_data["has_bias"] = bias.has_value() && bias->defined();
    return at::linear(x, weight, bias);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Tensors saved = ctx->get_saved_variables();
    const at::Tensor& x = saved[0];
    const at::Tensor& weight = saved[1];
    const at::Tensor dy = grads[0].contiguous();
    variable_list result(3);
    if (ctx->needs_input_grad(0)) {
      result[0] = at::empty(x.sizes(), dy.options());
      linear_dgrad(result[0].view({1, -1, x.size(-1)}), dy.view({1, -1, dy.size(-1)}), weight,
                   /*accumulate=*/false);
    }
    if (ctx->needs_input_grad(1)) {
      result[1] =
          weight_gradient(weight, dy.view({1, -1, dy.size(-1)}), x.contiguous().view({1, -1, x.size(-1)}));
    }
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2)) {
      result[2] = dy.sum(all_but_last(dy));
    }
    return result;
  }
};

at::Tensor linear_autograd(const at::Tensor& x, const at::Tensor& weight,
                           const std::optional<at::Tensor>& bias) {
  return Linear::apply(x, weight, bias);
}

at::Tensor linear_kernel(const at::Tensor& x, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias) {
  return at::linear(x, weight, bias);
}

}  // namespace

void register_linear(torch::Library& m) {
  m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.impl("linear", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(linear_kernel)));
  m.impl("linear", torch::dispatch(c10::DispatchKey::Autograd, TORCH_FN(linear_autograd)));
}

}  // namespace pyruntime
