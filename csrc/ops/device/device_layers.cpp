// RMSNorm, SwiGLU, experts' gating, rotary embedding and cross-entropy on CUDA, by the device kernels
// (csrc/cuda/portable). The kernels have no float64: it goes to composites of ATen's operations, and so does
// every dtype if the kernels are not built.
//
// A tensor's device chooses the kernels: tests call the functions registered for CUDA with CPU tensors, for
// which the kernels' host dialect is loaded.
#include <ATen/Functions.h>

#include "cpu/layers/common.h"
#include "cpu/layers/shared_ops.h"
#include "ops/device/device_call.h"
#include "ops/operators.h"
#include "transport/device/library.h"

namespace pyruntime {

namespace {

using at::Tensor;
using layers::Heads;

// The distance between a matrix's rows; for a single row torch's stride may be anything.
int64_t pitch_of(const Tensor& rows) {
  return rows.size(0) > 1 ? rows.stride(0) : rows.size(1);
}

// nullptr: there is no kernel for this tensor.
const DeviceLibrary* kernels_for(const Tensor& tensor) {
  std::string why_not;
  return tensor.scalar_type() == at::kDouble ? nullptr : DeviceLibrary::find(tensor.device().type(), why_not);
}

void check_on(const char* op, const Tensor& first, std::initializer_list<Tensor> others) {
  for (const Tensor& other : others) {
    TORCH_CHECK_VALUE(other.device() == first.device(), op, ": one tensor is on ", first.device(),
                      " and another on ", other.device(), "; all must be on one device.");
  }
}

// ---- RMSNorm ----

// The caller keeps the tensors; an undefined residual has none.
PyruntimeRmsNorm norm_of(const Tensor& x, const Tensor& weight, const Tensor& also) {
  PyruntimeRmsNorm norm{};
  norm.dtype = dtype_code(x.scalar_type());
  norm.columns = x.size(-1);
  norm.rows = x.numel() / norm.columns;
  norm.x = x.const_data_ptr();
  norm.also = also.defined() ? also.const_data_ptr() : nullptr;
  norm.weight = weight.const_data_ptr();
  return norm;
}

// residual may be undefined; then the second result is too.
std::tuple<Tensor, Tensor, Tensor> norm_on_device(const DeviceLibrary& library, const Tensor& x_in,
                                                  const Tensor& residual_in, const Tensor& weight_in,
                                                  double eps) {
  const DeviceCall call(x_in.device());
  const Tensor x = x_in.contiguous(), weight = weight_in.contiguous();
  const Tensor residual = residual_in.defined() ? residual_in.contiguous() : Tensor();
  Tensor y = at::empty(x.sizes(), x.options());
  Tensor summed = residual.defined() ? at::empty(x.sizes(), x.options()) : Tensor();
  Tensor rstd = at::empty(x.sizes().slice(0, x.dim() - 1), x.options().dtype(at::kFloat));
  PyruntimeRmsNorm norm = norm_of(x, weight, residual);
  norm.y = y.mutable_data_ptr();
  norm.summed = summed.defined() ? summed.mutable_data_ptr() : nullptr;
  norm.rstd = rstd.mutable_data_ptr<float>();
  norm.eps = static_cast<float>(eps);
  library.check(library.rms_norm(&norm, call.stream));
  return {y, summed, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_on_device(const Tensor& x, const Tensor& weight, double eps) {
  const DeviceLibrary* library = kernels_for(x);
  if (library == nullptr) return layers::rms_norm_composite(x, weight, eps);
  layers::check_norm("rms_norm", x, weight);
  check_on("rms_norm", x, {weight});
  auto [y, summed, rstd] = norm_on_device(*library, x, Tensor(), weight, eps);
  return {y, rstd};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_on_device(const Tensor& x, const Tensor& residual,
                                                          const Tensor& weight, double eps) {
  const DeviceLibrary* library = kernels_for(x);
  if (library == nullptr) return layers::add_rms_norm_composite(x, residual, weight, eps);
  layers::check_norm("add_rms_norm", x, weight);
  layers::check_residual(x, residual);
  check_on("add_rms_norm", x, {residual, weight});
  return norm_on_device(*library, x, residual, weight, eps);
}

std::tuple<Tensor, Tensor> rms_norm_backward_on_device(const Tensor& grad_in, const Tensor& x_in,
                                                       const Tensor& weight_in, const Tensor& rstd_in,
                                                       const std::optional<Tensor>& grad_sum) {
  const DeviceLibrary* library = kernels_for(x_in);
  if (library == nullptr)
    return layers::rms_norm_backward_composite(grad_in, x_in, weight_in, rstd_in, grad_sum);
  layers::check_norm("rms_norm_backward", x_in, weight_in);
  check_on("rms_norm_backward", x_in, {grad_in, weight_in, rstd_in});
  const DeviceCall call(x_in.device());
  const Tensor x = x_in.contiguous(), weight = weight_in.contiguous(), grad = grad_in.contiguous();
  const Tensor rstd = rstd_in.contiguous(), also = grad_sum ? grad_sum->contiguous() : Tensor();
  PyruntimeRmsNorm norm = norm_of(x, weight, also);
  Tensor dx = at::empty(x.sizes(), x.options());
  Tensor dweight = at::empty({norm.columns}, x.options());
  const int64_t count = library->rms_norm_parts(norm.dtype, norm.rows, norm.columns);
  Tensor parts = at::empty({count, norm.columns}, rstd.options());
  norm.y = const_cast<void*>(grad.const_data_ptr());  // the backward only reads it and rstd
  norm.rstd = const_cast<float*>(rstd.const_data_ptr<float>());
  norm.dx = dx.mutable_data_ptr();
  norm.dweight = dweight.mutable_data_ptr();
  norm.parts = parts.mutable_data_ptr<float>();
  library->check(library->rms_norm_backward(&norm, call.stream));
  return {dx, dweight};
}

// ---- SwiGLU ----

// [..., columns] as rows that the kernels take by their pitch; copied if they do not have one.
Tensor as_rows(const Tensor& x) {
  if (x.dim() == 2 && x.stride(1) == 1 && x.stride(0) >= x.size(1)) return x;
  return x.contiguous().view({-1, x.size(-1)});
}

PyruntimeSwiglu operands_of(const Tensor& gate_up) {
  const int64_t features = gate_up.size(1) / 2;
  const auto* gate = static_cast<const char*>(gate_up.const_data_ptr());
  PyruntimeSwiglu operands{};
  operands.dtype = dtype_code(gate_up.scalar_type());
  operands.rows = gate_up.size(0);
  operands.features = features;
  operands.gate = gate;
  operands.up = gate + features * gate_up.element_size();
  operands.gate_up_pitch = pitch_of(gate_up);
  return operands;
}

Tensor swiglu_on_device(const Tensor& gate_up_in) {
  const DeviceLibrary* library = kernels_for(gate_up_in);
  if (library == nullptr) return layers::swiglu_composite(gate_up_in);
  layers::check_gate_up("swiglu", gate_up_in);
  const DeviceCall call(gate_up_in.device());
  const Tensor y = at::empty(layers::half_of_last(gate_up_in), gate_up_in.options());
  if (y.numel() == 0) return y;
  const Tensor gate_up = as_rows(gate_up_in);
  PyruntimeSwiglu operands = operands_of(gate_up);
  operands.y = y.mutable_data_ptr();
  operands.y_pitch = operands.features;
  library->check(library->swiglu(&operands, call.stream));
  return y;
}

Tensor swiglu_backward_on_device(const Tensor& grad_in, const Tensor& gate_up_in) {
  const DeviceLibrary* library = kernels_for(gate_up_in);
  if (library == nullptr) return layers::swiglu_backward_composite(grad_in, gate_up_in);
  layers::check_swiglu_backward(grad_in, gate_up_in);
  check_on("swiglu_backward", gate_up_in, {grad_in});
  const DeviceCall call(gate_up_in.device());
  const Tensor dgate_up = at::empty(gate_up_in.sizes(), gate_up_in.options());
  if (dgate_up.numel() == 0) return dgate_up;
  const Tensor gate_up = as_rows(gate_up_in), grad = as_rows(grad_in);
  PyruntimeSwiglu operands = operands_of(gate_up);
  auto* dgate = static_cast<char*>(dgate_up.mutable_data_ptr());
  operands.y = const_cast<void*>(grad.const_data_ptr());  // the backward only reads it
  operands.y_pitch = pitch_of(grad);
  operands.dgate = dgate;
  operands.dup = dgate + operands.features * dgate_up.element_size();
  operands.dgate_dup_pitch = 2 * operands.features;
  library->check(library->swiglu_backward(&operands, call.stream));
  return dgate_up;
}

// ---- gating of experts ----

PyruntimeGating operands_of(const layers::GatedRows& rows, const layers::Gating& gating) {
  PyruntimeGating operands{};
  operands.dtype = dtype_code(rows.y.scalar_type());
  operands.interleaved = gating.interleaved ? 1 : 0;
  operands.rows = rows.y.size(0);
  operands.features = rows.y.size(1);
  operands.gate_up = rows.gate_up.const_data_ptr();
  operands.weights = rows.p.const_data_ptr<float>();
  operands.y = rows.y.mutable_data_ptr();
  operands.alpha = static_cast<float>(gating.alpha);
  operands.limit = static_cast<float>(gating.limit);
  operands.shift = static_cast<float>(gating.shift);
  return operands;
}

void gate_on_device(const layers::GatedRows& rows, const layers::Gating& gating) {
  const DeviceLibrary* library = kernels_for(rows.y);
  if (library == nullptr) return layers::weighted_gating_composite(rows, gating);
  check_on("weighted_gating", rows.gate_up, {rows.p});
  const DeviceCall call(rows.y.device());
  const PyruntimeGating operands = operands_of(rows, gating);
  library->check(library->weighted_gating(&operands, call.stream));
}

void gate_backward_on_device(const layers::GatedRows& rows, const layers::Gating& gating) {
  const DeviceLibrary* library = kernels_for(rows.y);
  if (library == nullptr) return layers::weighted_gating_backward_composite(rows, gating);
  check_on("weighted_gating_backward_", rows.gate_up, {rows.p, rows.y, rows.grad, rows.dgate_up, rows.dp});
  const DeviceCall call(rows.y.device());
  PyruntimeGating operands = operands_of(rows, gating);
  operands.grad = rows.grad.const_data_ptr();
  operands.dgate_up = rows.dgate_up.mutable_data_ptr();
  operands.dweights = rows.dp.mutable_data_ptr<float>();
  library->check(library->weighted_gating_backward(&operands, call.stream));
}

// ---- rotary embedding ----

PyruntimeHeads place_of(const Tensor& heads, const void* data) {
  return {const_cast<void*>(data), heads.stride(0), heads.stride(2), heads.stride(1)};
}

void rotate_on_device(const char* op, const Heads& from, const Heads& to, const Tensor& cos_in,
                      const Tensor& sin_in, bool inverse) {
  const DeviceLibrary* library = kernels_for(from[0]);
  if (library == nullptr) return layers::rotate_composite(op, from, to, cos_in, sin_in, inverse);
  check_on(op, from[0], {from[1], from[2], cos_in, sin_in});
  const Tensor cos = cos_in.contiguous(), sin = sin_in.contiguous();
  const DeviceCall call(from[0].device());
  PyruntimeRope rope{};
  rope.dtype = dtype_code(from[0].scalar_type());
  rope.inverse = inverse ? 1 : 0;
  rope.batch = from[0].size(0);
  rope.positions = from[0].size(2);
  rope.head_dim = from[0].size(3);
  // The output pointers come first: if the tensor shares memory that is copied on write, it gets its own
  // here. Then come the inputs, which may be the same tensor.
  for (size_t part = 0; part < 3; ++part) rope.to[part] = place_of(to[part], to[part].mutable_data_ptr());
  for (size_t part = 0; part < 3; ++part) {
    rope.heads[part] = from[part].size(1);
    rope.from[part] = place_of(from[part], from[part].const_data_ptr());
  }
  rope.cos = cos.const_data_ptr<float>();
  rope.sin = sin.const_data_ptr<float>();
  library->check(library->rope(&rope, call.stream));
}

// ---- cross-entropy ----

// The rows must be contiguous; labels must live as long as the result.
PyruntimeLogits logits_of(const Tensor& logits, const Tensor& labels, int64_t vocab_start) {
  return {dtype_code(logits.scalar_type()),
          logits.size(0),
          logits.size(1),
          pitch_of(logits),
          logits.const_data_ptr(),
          labels.const_data_ptr<int64_t>(),
          vocab_start};
}

void write_stats_on_device(const Tensor& logits_in, const Tensor& labels_in, int64_t vocab_start,
                           const Tensor& stats) {
  const DeviceLibrary* library = kernels_for(logits_in);
  if (library == nullptr) return layers::write_stats_composite(logits_in, labels_in, vocab_start, stats);
  check_on("cross_entropy_stats", logits_in, {labels_in});
  const DeviceCall call(logits_in.device());
  const Tensor logits = logits_in.numel() == 0 ? logits_in.contiguous() : as_rows(logits_in);
  const Tensor labels = labels_in.contiguous();
  const PyruntimeLogits operand = logits_of(logits, labels, vocab_start);
  library->check(library->cross_entropy_stats(&operand, stats.mutable_data_ptr<float>(), call.stream));
}

void write_logits_grad_on_device(const char* op, const Tensor& logits_in, const Tensor& labels_in,
                                 const Tensor& lse_in, const Tensor& grad_in, int64_t vocab_start,
                                 const Tensor& dlogits) {
  const DeviceLibrary* library = kernels_for(logits_in);
  if (library == nullptr) {
    return layers::write_logits_grad_composite(op, logits_in, labels_in, lse_in, grad_in, vocab_start,
                                               dlogits);
  }
  check_on(op, logits_in, {labels_in, lse_in, grad_in});
  layers::check_contiguous(op, dlogits);
  if (logits_in.numel() == 0) return;
  const DeviceCall call(logits_in.device());
  const Tensor logits = as_rows(logits_in), labels = labels_in.contiguous();
  const Tensor lse = lse_in.contiguous(), grad = grad_in.contiguous();
  const PyruntimeLogits operand = logits_of(logits, labels, vocab_start);
  library->check(library->cross_entropy_gradient(&operand, lse.const_data_ptr<float>(),
                                                 grad.const_data_ptr<float>(), dlogits.mutable_data_ptr(),
                                                 pitch_of(dlogits), call.stream));
}

}  // namespace

void register_device_layers(torch::Library& m) {
  const auto on_device = [&](const char* name, auto&& kernel) {
    for (const c10::DispatchKey key : kDeviceKeys) m.impl(name, torch::dispatch(key, kernel));
  };
  on_device("rms_norm", rms_norm_on_device);
  on_device("add_rms_norm", add_rms_norm_on_device);
  on_device("rms_norm_backward", rms_norm_backward_on_device);
  on_device("swiglu", swiglu_on_device);
  on_device("swiglu_backward", swiglu_backward_on_device);
  on_device("weighted_gating", layers::weighted_gating<gate_on_device>);
  on_device("weighted_gating_backward_", layers::weighted_gating_backward<gate_backward_on_device>);
  on_device("apply_rope_qkv", layers::apply_rope_qkv<rotate_on_device>);
  on_device("rotate_qkv_", layers::rotate_qkv<rotate_on_device>);
  on_device("apply_rope_qkv_backward", layers::apply_rope_qkv_backward<rotate_on_device>);
  on_device("cross_entropy_stats", layers::cross_entropy_stats<write_stats_on_device>);
  on_device("cross_entropy_backward", layers::cross_entropy_backward<write_logits_grad_on_device>);
  on_device("cross_entropy_backward_", layers::cross_entropy_backward_in_place<write_logits_grad_on_device>);
}

}  // namespace pyruntime
