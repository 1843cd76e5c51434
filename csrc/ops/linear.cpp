// y = x W^T + b with our own gradients: nn.Linear, but the weight gradient goes to the weight's sink.
#include <ATen/ops/empty.h>

#include "ops/gemm/gemm.h"
#include "ops/operators.h"
#include "ops/weight_gradient.h"

namespace pyruntime {

namespace {

struct Linear : Function<Linear> {
  static Variable forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({saved_input(x, {weight}), weight});
    ctx->saved_data["has_bias"] = bias.has_value() && bias->defined();
    return linear_forward(x, weight, bias.value_or(at::Tensor()));
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_second_derivatives("linear");
    const Tensors saved = ctx->get_saved_variables();
    const at::Tensor& x = saved[0];
    const at::Tensor& weight = saved[1];
    const at::Tensor dy = grads[0].contiguous();
    variable_list result(3);
    if (ctx->needs_input_grad(0)) {
      result[0] = at::empty(x.sizes(), dy.options());
      const at::Tensor rows = dy.view({1, -1, dy.size(-1)});
      WeightGemm(weight, /*transposed=*/false, rows.size(1))
          .write(result[0].view({1, -1, x.size(-1)}), rows, {}, /*accumulate=*/false);
    }
    if (ctx->needs_input_grad(1)) {
      result[1] =
          weight_gradient(weight, dy.view({1, -1, dy.size(-1)}), x.contiguous().view({1, -1, x.size(-1)}));
    }
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2)) {
      result[2] = sum_over_rows(dy);
    }
    return result;
  }
};

at::Tensor linear_kernel(const at::Tensor& x, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias) {
  return linear_forward(x, weight, bias.value_or(at::Tensor()));
}

}  // namespace

at::Tensor call_linear(const at::Tensor& x, const at::Tensor& weight) {
  return Operator<linear_kernel>::call(x, weight, std::nullopt);
}

void register_linear(torch::Library& m) {
  Operator<linear_kernel>::define_differentiable<Linear>(
      m, "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
}

}  // namespace pyruntime
