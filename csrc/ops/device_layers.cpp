// SwiGLU, rotary embedding and cross-entropy by the device kernels (csrc/cuda/portable): what their ops are
// on CUDA. float64, which the kernels do not have, and every dtype where the kernels are not built, goes to
// the composites of ATen's operations.
//
// The kernels go by where a tensor lies: tests call what is registered for CUDA with tensors of the CPU, for
// which the host dialect of the kernels is loaded.
#include <ATen/Functions.h>

#include <array>
#include <tuple>
#include <vector>

#include "cpu/layers/common.h"
#include "cpu/layers/composites.h"
#include "ops/device_call.h"
#include "ops/register.h"
#include "transport/device_library.h"

namespace pyruntime {

namespace {

using at::Tensor;

// Of the rows of a matrix; of a single row torch may say anything.
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

// ---- SwiGLU ----

// [..., columns] as rows that the kernels take by their pitch; copied where they do not lie so.
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

std::vector<int64_t> half_of_last(const Tensor& gate_up) {
  std::vector<int64_t> shape = gate_up.sizes().vec();
  shape.back() /= 2;
  return shape;
}

Tensor swiglu_on_device(const Tensor& gate_up_in) {
  const DeviceLibrary* library = kernels_for(gate_up_in);
  if (library == nullptr) return layers::swiglu_composite(gate_up_in);
  layers::check_gate_up("swiglu", gate_up_in);
  const DeviceCall call(gate_up_in.device());
  const Tensor y = at::empty(half_of_last(gate_up_in), gate_up_in.options());
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
  constexpr auto op = "swiglu_backward";
  layers::check_gate_up(op, gate_up_in);
  layers::check_same_dtype(grad_in, "grad", gate_up_in, "gate_up", op);
  check_on(op, gate_up_in, {grad_in});
  TORCH_CHECK_VALUE(grad_in.sizes() == at::IntArrayRef(half_of_last(gate_up_in)), op, ": grad has shape ",
                    grad_in.sizes(), " and gate_up ", gate_up_in.sizes(),
                    "; the last dimension of grad must be half as large, and the others the same.");
  const DeviceCall call(gate_up_in.device());
  const Tensor dgate_up = at::empty(gate_up_in.sizes(), gate_up_in.options());
  if (dgate_up.numel() == 0) return dgate_up;
  const Tensor gate_up = as_rows(gate_up_in), grad = as_rows(grad_in);
  PyruntimeSwiglu operands = operands_of(gate_up);
  auto* dgate = static_cast<char*>(dgate_up.mutable_data_ptr());
  operands.y = const_cast<void*>(grad.const_data_ptr());  // which the backward only reads
  operands.y_pitch = pitch_of(grad);
  operands.dgate = dgate;
  operands.dup = dgate + operands.features * dgate_up.element_size();
  operands.dgate_dup_pitch = 2 * operands.features;
  library->check(library->swiglu_backward(&operands, call.stream));
  return dgate_up;
}

// ---- rotary embedding ----

using Heads = std::array<Tensor, 3>;  // of q, k and v: [B, heads, S, hd]

PyruntimeHeads place_of(const Tensor& heads, const void* data) {
  return {const_cast<void*>(data), heads.stride(0), heads.stride(2), heads.stride(1)};
}

Tensor with_contiguous_rows(const Tensor& x) {
  return x.stride(-1) == 1 || x.size(-1) <= 1 ? x : x.contiguous();
}

Heads heads_of(const Tensor& qkv, int64_t batch, int64_t positions, int64_t heads, int64_t kv_heads) {
  const auto [q, k, v] = layers::heads_in_place(qkv, batch, positions, heads, kv_heads);
  return {q, k, v};
}

void rotate(const DeviceLibrary& library, const Heads& from, const Heads& to, const Tensor& cos_in,
            const Tensor& sin_in, bool inverse) {
  const Tensor cos = cos_in.contiguous(), sin = sin_in.contiguous();
  const DeviceCall call(from[0].device());
  PyruntimeRope rope{};
  rope.dtype = dtype_code(from[0].scalar_type());
  rope.inverse = inverse ? 1 : 0;
  rope.batch = from[0].size(0);
  rope.positions = from[0].size(2);
  rope.head_dim = from[0].size(3);
  // What is written first: where it shares memory that is copied on writing, it gets its own here, and what
  // is read, which may be the same tensor, follows it.
  for (size_t part = 0; part < 3; ++part) rope.to[part] = place_of(to[part], to[part].mutable_data_ptr());
  for (size_t part = 0; part < 3; ++part) {
    rope.heads[part] = from[part].size(1);
    rope.from[part] = place_of(from[part], from[part].const_data_ptr());
  }
  rope.cos = cos.const_data_ptr<float>();
  rope.sin = sin.const_data_ptr<float>();
  library.check(library.rope(&rope, call.stream));
}

std::tuple<Tensor, Tensor, Tensor> apply_rope_qkv_on_device(const Tensor& qkv_in, const Tensor& cos,
                                                            const Tensor& sin, int64_t batch,
                                                            int64_t positions, int64_t heads,
                                                            int64_t kv_heads, bool overwrite_qkv) {
  const DeviceLibrary* library = kernels_for(qkv_in);
  if (library == nullptr) {
    return layers::apply_rope_qkv_composite(qkv_in, cos, sin, batch, positions, heads, kv_heads,
                                            overwrite_qkv);
  }
  constexpr auto op = "apply_rope_qkv";
  layers::check_rope(op, qkv_in, cos, sin, batch, positions, heads, kv_heads);
  check_on(op, qkv_in, {cos, sin});
  const Tensor qkv = with_contiguous_rows(qkv_in);
  const int64_t head_dim = qkv.size(1) / (heads + 2 * kv_heads);
  const auto new_part = [&](int64_t count) {
    return at::empty({batch, positions, count, head_dim}, qkv.options()).transpose(1, 2);
  };
  const Heads to{new_part(heads), new_part(kv_heads), new_part(kv_heads)};
  rotate(*library, heads_of(qkv, batch, positions, heads, kv_heads), to, cos, sin, /*inverse=*/false);
  return {to[0], to[1], to[2]};
}

void rotate_qkv_on_device(const Tensor& qkv, const Tensor& cos, const Tensor& sin, int64_t batch,
                          int64_t positions, int64_t heads, int64_t kv_heads) {
  const DeviceLibrary* library = kernels_for(qkv);
  if (library == nullptr)
    return layers::rotate_qkv_composite(qkv, cos, sin, batch, positions, heads, kv_heads);
  constexpr auto op = "rotate_qkv_";
  layers::check_rope(op, qkv, cos, sin, batch, positions, heads, kv_heads);
  layers::check_rows_in_place(qkv);
  check_on(op, qkv, {cos, sin});
  const Heads parts = heads_of(qkv, batch, positions, heads, kv_heads);
  rotate(*library, parts, parts, cos, sin, /*inverse=*/false);
  layers::mark_written(qkv);
}

Tensor apply_rope_qkv_backward_on_device(const Tensor& dq, const Tensor& dk, const Tensor& dv,
                                         const Tensor& cos, const Tensor& sin) {
  const DeviceLibrary* library = kernels_for(dq);
  if (library == nullptr) return layers::apply_rope_qkv_backward_composite(dq, dk, dv, cos, sin);
  layers::check_rope_backward(dq, dk, dv, cos, sin);
  check_on("apply_rope_qkv_backward", dq, {dk, dv, cos, sin});
  const int64_t batch = dq.size(0), positions = dq.size(2), heads = dq.size(1), kv_heads = dk.size(1);
  const Tensor dqkv = at::empty({batch * positions, (heads + 2 * kv_heads) * dq.size(3)}, dq.options());
  const Heads from{with_contiguous_rows(dq), with_contiguous_rows(dk), with_contiguous_rows(dv)};
  rotate(*library, from, heads_of(dqkv, batch, positions, heads, kv_heads), cos, sin, /*inverse=*/true);
  return dqkv;
}

// ---- cross-entropy ----

// Of which the rows are contiguous; labels must live as long as what is returned.
PyruntimeLogits logits_of(const Tensor& logits, const Tensor& labels, int64_t vocab_start) {
  return {dtype_code(logits.scalar_type()),
          logits.size(0),
          logits.size(1),
          pitch_of(logits),
          logits.const_data_ptr(),
          labels.const_data_ptr<int64_t>(),
          vocab_start};
}

Tensor cross_entropy_stats_on_device(const Tensor& logits_in, const Tensor& labels_in, int64_t vocab_start) {
  const DeviceLibrary* library = kernels_for(logits_in);
  if (library == nullptr) return layers::cross_entropy_stats_composite(logits_in, labels_in, vocab_start);
  constexpr auto op = "cross_entropy_stats";
  layers::check_logits(op, logits_in, labels_in);
  check_on(op, logits_in, {labels_in});
  const DeviceCall call(logits_in.device());
  const Tensor stats = at::empty({logits_in.size(0), 3}, logits_in.options().dtype(at::kFloat));
  const Tensor logits = logits_in.numel() == 0 ? logits_in.contiguous() : as_rows(logits_in);
  const Tensor labels = labels_in.contiguous();
  const PyruntimeLogits operand = logits_of(logits, labels, vocab_start);
  library->check(library->cross_entropy_stats(&operand, stats.mutable_data_ptr<float>(), call.stream));
  return stats;
}

// Into dlogits, whose rows are contiguous; it may be the logits.
void gradient(const DeviceLibrary& library, const Tensor& logits, const Tensor& labels_in,
              const Tensor& lse_in, const Tensor& grad_in, int64_t vocab_start, const Tensor& dlogits) {
  if (logits.numel() == 0) return;
  const DeviceCall call(logits.device());
  const Tensor labels = labels_in.contiguous(), lse = lse_in.contiguous(), grad = grad_in.contiguous();
  const PyruntimeLogits operand = logits_of(logits, labels, vocab_start);
  library.check(library.cross_entropy_gradient(&operand, lse.const_data_ptr<float>(),
                                               grad.const_data_ptr<float>(), dlogits.mutable_data_ptr(),
                                               pitch_of(dlogits), call.stream));
}

Tensor cross_entropy_backward_on_device(const Tensor& logits, const Tensor& labels, const Tensor& lse,
                                        const Tensor& grad, int64_t vocab_start) {
  const DeviceLibrary* library = kernels_for(logits);
  if (library == nullptr)
    return layers::cross_entropy_backward_composite(logits, labels, lse, grad, vocab_start);
  constexpr auto op = "cross_entropy_backward";
  layers::check_logits_backward(op, logits, labels, lse, grad);
  check_on(op, logits, {labels, lse, grad});
  const Tensor dlogits = at::empty(logits.sizes(), logits.options());
  gradient(*library, logits.numel() == 0 ? logits : as_rows(logits), labels, lse, grad, vocab_start, dlogits);
  return dlogits;
}

void cross_entropy_backward_inplace_on_device(const Tensor& logits, const Tensor& labels, const Tensor& lse,
                                              const Tensor& grad, int64_t vocab_start) {
  const DeviceLibrary* library = kernels_for(logits);
  if (library == nullptr)
    return layers::cross_entropy_backward_inplace_composite(logits, labels, lse, grad, vocab_start);
  constexpr auto op = "cross_entropy_backward_";
  layers::check_logits_backward(op, logits, labels, lse, grad);
  check_on(op, logits, {labels, lse, grad});
  TORCH_CHECK_VALUE(logits.is_contiguous(), op, ": logits has strides ", logits.strides(),
                    "; it is written in place and must be contiguous.");
  gradient(*library, logits, labels, lse, grad, vocab_start, logits);
  layers::mark_written(logits);
}

}  // namespace

void register_device_layers(torch::Library& m) {
  const auto on_cuda = [&](const char* name, auto&& kernel) {
    m.impl(name, torch::dispatch(c10::DispatchKey::CUDA, kernel));
  };
  on_cuda("swiglu", swiglu_on_device);
  on_cuda("swiglu_backward", swiglu_backward_on_device);
  on_cuda("apply_rope_qkv", apply_rope_qkv_on_device);
  on_cuda("rotate_qkv_", rotate_qkv_on_device);
  on_cuda("apply_rope_qkv_backward", apply_rope_qkv_backward_on_device);
  on_cuda("cross_entropy_stats", cross_entropy_stats_on_device);
  on_cuda("cross_entropy_backward", cross_entropy_backward_on_device);
  on_cuda("cross_entropy_backward_", cross_entropy_backward_inplace_on_device);
}

}  // namespace pyruntime
