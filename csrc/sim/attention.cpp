// Attention in virtual time, as one kernel that keeps no scores, which is what GPUs run. Otherwise the
// simulated devices compute it by its definition.
#include <ATen/ATen.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <torch/library.h>

#include "sim/streams.h"

namespace sim {
namespace {

int64_t choose(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
               double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(Clock::is_on() ? sdp::SDPBackend::overrideable : sdp::SDPBackend::math);
}

Work attention(const at::Tensor& q, const at::Tensor& k, bool is_causal, bool backward) {
  TORCH_CHECK_NOT_IMPLEMENTED(Clock::is_on(),
                              "The simulated devices have this attention in virtual time only.");
  return {"attention",
          {q.size(0), q.size(1), k.size(1), q.size(2), k.size(2), q.size(3), q.element_size(), is_causal,
           backward}};
}

at::Tensor heads_like(const at::Tensor& x) {  // [B, H, S, D] over memory of [B, S, H, D]
  return at::empty({x.size(0), x.size(2), x.size(1), x.size(3)}, x.options()).transpose(1, 2);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor,
           at::Tensor>
forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask,
        double, bool is_causal, bool, std::optional<double>) {
  at::Tensor out = heads_like(q);
  at::Tensor lse = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat));
  const at::Tensor none;
  enqueue(q.device().index(), "attention", [] {}, attention(q, k, is_causal || mask, /*backward=*/false));
  return {out, lse, none, none, q.size(2), k.size(2), none, none, none};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> backward(
    const at::Tensor&, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask,
    std::array<bool, 4>, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
    c10::SymInt, c10::SymInt, double, bool is_causal, const at::Tensor&, const at::Tensor&,
    std::optional<double>) {
  enqueue(
      q.device().index(), "attention backward", [] {},
      attention(q, k, is_causal || mask.defined(), /*backward=*/true));
  return {heads_like(q), heads_like(k), heads_like(v), at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor,
           at::Tensor>
flash_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double dropout, bool is_causal,
              bool, std::optional<double> scale) {
  return forward(q, k, v, {}, dropout, is_causal, false, scale);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_backward(
    const at::Tensor&, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor&,
    const at::Tensor&, const at::Tensor&, const at::Tensor&, c10::SymInt, c10::SymInt, double, bool is_causal,
    const at::Tensor&, const at::Tensor&, std::optional<double>) {
  enqueue(q.device().index(), "attention backward", [] {}, attention(q, k, is_causal, /*backward=*/true));
  return {heads_like(q), heads_like(k), heads_like(v)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_scaled_dot_product_fused_attention_overrideable", TORCH_FN(forward));
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", TORCH_FN(backward));
  // CausalBias of torch.nn.attention calls these where queries follow earlier keys.
  m.impl("_scaled_dot_product_flash_attention", TORCH_FN(flash_forward));
  m.impl("_scaled_dot_product_flash_attention_backward", TORCH_FN(flash_backward));
}

}  // namespace
}  // namespace sim

namespace at::native {

REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::choose)

}  // namespace at::native
