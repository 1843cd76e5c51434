// The ops that have device kernels (csrc/ops/device/device_layers.cpp): checks of their arguments, their
// results, and composites of ATen's operations for devices without kernels.
//
// Checks raise ValueError or TypeError with `op`, the argument found and what is needed.
#pragma once

#include <array>
#include <optional>
#include <tuple>

#include "common.h"
#include "weighted_gating.h"

namespace pyruntime::layers {

// ---- RMSNorm ----

void check_norm(const char* op, const Tensor& x, const Tensor& weight);
void check_residual(const Tensor& x, const Tensor& residual);
std::tuple<Tensor, Tensor> rms_norm_composite(const Tensor& x, const Tensor& weight, double eps);
std::tuple<Tensor, Tensor, Tensor> add_rms_norm_composite(const Tensor& x, const Tensor& residual,
                                                          const Tensor& weight, double eps);
std::tuple<Tensor, Tensor> rms_norm_backward_composite(const Tensor& grad, const Tensor& x,
                                                       const Tensor& weight, const Tensor& rstd,
                                                       const std::optional<Tensor>& grad_sum);

// ---- SwiGLU ----

void check_gate_up(const char* op, const Tensor& gate_up);
void check_swiglu_backward(const Tensor& grad, const Tensor& gate_up);
// Returns [..., F] for [..., 2F].
std::vector<int64_t> half_of_last(const Tensor& gate_up);
Tensor swiglu_composite(const Tensor& gate_up);
Tensor swiglu_backward_composite(const Tensor& grad, const Tensor& gate_up);

// ---- gating of experts ----

// The operands of the gating of some rows; grad, dgate_up and dp are undefined in the forward pass.
struct GatedRows {
  Tensor gate_up, p, y, grad, dgate_up, dp;
};

void check_gated_rows(const char* op, const GatedRows& rows);

// Writes y, and in the backward pass dgate_up and dp.
using Gate = void(const GatedRows& rows, const Gating& gating);
Gate weighted_gating_composite, weighted_gating_backward_composite;

template <Gate gate>
Tensor weighted_gating(const Tensor& gate_up, const Tensor& p, double alpha, double limit, double shift,
                       bool interleaved) {
  constexpr auto op = "weighted_gating";
  check_gate_up(op, gate_up);
  const Tensor y = at::empty(half_of_last(gate_up), gate_up.options());
  const GatedRows rows{gate_up, p, y, {}, {}, {}};
  check_gated_rows(op, rows);
  gate(rows, {alpha, limit, shift, interleaved});
  return y;
}

template <Gate gate>
void weighted_gating_backward(const Tensor& grad, const Tensor& gate_up, const Tensor& p, double alpha,
                              double limit, double shift, bool interleaved, const Tensor& dgate_up,
                              const Tensor& y, const Tensor& dp) {
  constexpr auto op = "weighted_gating_backward_";
  check_gate_up(op, gate_up);
  const GatedRows rows{gate_up, p, y, grad, dgate_up, dp};
  check_gated_rows(op, rows);
  gate(rows, {alpha, limit, shift, interleaved});
  for (const Tensor& written : {dgate_up, y, dp}) mark_written(written);
}

// ---- rotary embedding ----

using Heads = std::array<Tensor, 3>;  // q, k, v: [B, heads, S, hd] with contiguous rows

// Writes to `to` the rotated heads of q and k (rotated back if `inverse`) and those of v unchanged; `to` may
// be `from`.
using Rotate = void(const char* op, const Heads& from, const Heads& to, const Tensor& cos, const Tensor& sin,
                    bool inverse);
Rotate rotate_composite;

void check_rope(const char* op, const Tensor& qkv, const Tensor& cos, const Tensor& sin,
                const c10::SymInt& batch, const c10::SymInt& positions, const c10::SymInt& heads,
                const c10::SymInt& kv_heads);
void check_rope_backward(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& cos,
                         const Tensor& sin);
// Returns the heads as views of qkv, whose rows are contiguous.
Heads heads_in_place(const Tensor& qkv, const c10::SymInt& batch, const c10::SymInt& positions,
                     const c10::SymInt& heads, const c10::SymInt& kv_heads);

template <Rotate rotate>
std::tuple<Tensor, Tensor, Tensor> apply_rope_qkv(const Tensor& qkv, const Tensor& cos, const Tensor& sin,
                                                  c10::SymInt batch, c10::SymInt positions, c10::SymInt heads,
                                                  c10::SymInt kv_heads, bool /*overwrite_qkv*/) {
  constexpr auto op = "apply_rope_qkv";
  check_rope(op, qkv, cos, sin, batch, positions, heads, kv_heads);
  const Heads from = heads_in_place(with_contiguous_rows(qkv), batch, positions, heads, kv_heads);
  const Heads to{empty_heads(from[0]), empty_heads(from[1]), empty_heads(from[2])};
  rotate(op, from, to, cos, sin, /*inverse=*/false);
  return {to[0], to[1], to[2]};
}

template <Rotate rotate>
void rotate_qkv(const Tensor& qkv, const Tensor& cos, const Tensor& sin, c10::SymInt batch,
                c10::SymInt positions, c10::SymInt heads, c10::SymInt kv_heads) {
  constexpr auto op = "rotate_qkv_";
  check_rope(op, qkv, cos, sin, batch, positions, heads, kv_heads);
  TORCH_CHECK_VALUE(qkv.stride(1) == 1, op, ": qkv has strides ", qkv.strides(),
                    "; it is written in place and its rows must be contiguous.");
  const Heads parts = heads_in_place(qkv, batch, positions, heads, kv_heads);
  rotate(op, parts, parts, cos, sin, /*inverse=*/false);
  mark_written(qkv);
}

template <Rotate rotate>
Tensor apply_rope_qkv_backward(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& cos,
                               const Tensor& sin) {
  check_rope_backward(dq, dk, dv, cos, sin);
  const int64_t batch = dq.size(0), positions = dq.size(2), heads = dq.size(1), kv_heads = dk.size(1);
  const Tensor dqkv = at::empty({batch * positions, (heads + 2 * kv_heads) * dq.size(3)}, dq.options());
  const Heads from{with_contiguous_rows(dq), with_contiguous_rows(dk), with_contiguous_rows(dv)};
  rotate("apply_rope_qkv_backward", from, heads_in_place(dqkv, batch, positions, heads, kv_heads), cos, sin,
         /*inverse=*/true);
  return dqkv;
}

// ---- cross-entropy ----

// Writes stats [rows, 3] and dlogits, which may be the logits. Both may be uninitialized before.
using WriteStats = void(const Tensor& logits, const Tensor& labels, int64_t vocab_start, const Tensor& stats);
using WriteLogitsGrad = void(const char* op, const Tensor& logits, const Tensor& labels, const Tensor& lse,
                             const Tensor& grad, int64_t vocab_start, const Tensor& dlogits);
WriteStats write_stats_composite;
WriteLogitsGrad write_logits_grad_composite;

void check_logits(const char* op, const Tensor& logits, const Tensor& labels);
void check_logits_backward(const char* op, const Tensor& logits, const Tensor& labels, const Tensor& lse,
                           const Tensor& grad);
// For kernels that can overwrite the logits only if these are contiguous.
void check_contiguous(const char* op, const Tensor& dlogits);

template <WriteStats write_stats>
Tensor cross_entropy_stats(const Tensor& logits, const Tensor& labels, c10::SymInt vocab_start) {
  check_logits("cross_entropy_stats", logits, labels);
  const auto dtype = statistics_dtype(logits.scalar_type());
  const Tensor stats = at::empty({logits.size(0), 3}, logits.options().dtype(dtype));
  write_stats(logits, labels, vocab_start.expect_int(), stats);
  return stats;
}

template <WriteLogitsGrad write_logits_grad>
Tensor cross_entropy_backward(const Tensor& logits, const Tensor& labels, const Tensor& lse,
                              const Tensor& grad, c10::SymInt vocab_start) {
  constexpr auto op = "cross_entropy_backward";
  check_logits_backward(op, logits, labels, lse, grad);
  const Tensor dlogits = at::empty(logits.sizes(), logits.options());
  write_logits_grad(op, logits, labels, lse, grad, vocab_start.expect_int(), dlogits);
  return dlogits;
}

template <WriteLogitsGrad write_logits_grad>
void cross_entropy_backward_in_place(const Tensor& logits, const Tensor& labels, const Tensor& lse,
                                     const Tensor& grad, c10::SymInt vocab_start) {
  constexpr auto op = "cross_entropy_backward_";
  check_logits_backward(op, logits, labels, lse, grad);
  write_logits_grad(op, logits, labels, lse, grad, vocab_start.expect_int(), logits);
  mark_written(logits);
}

}  // namespace pyruntime::layers
