// Causal grouped-query attention. attention_kernels.h has the algorithm and its equations; here ranges begin
// at key 0 and end after the query's own position, and there is no earlier result.
//
// q [B, H, S, D], k and v [B, Hkv, S, D] with Hkv dividing H: query heads h * H / Hkv ... share key head h,
// and a query sees the keys up to its own position. out [B, S, H * D], as the output projection reads it. lse
// [B, H, S], the log-sum-exp of a query's scaled scores, float32 (float64 for float64). dq, dk and dv are
// transposed views of contiguous [B, S, heads, D].
//
// Saved for the backward: q, k, v, out and lse.

#include "attention.h"

#include <array>
#include <limits>
#include <numeric>
#include <tuple>
#include <vector>

#include "core/saved_output.h"

namespace pyruntime::layers {
namespace {

// ---- checks ----

void check_backward(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                    const Tensor& out, const Tensor& lse) {
  constexpr auto op = "causal_attention_backward";
  check_heads(op, q, k, v, /*as_many_keys_as_queries=*/true);
  check_same_dtype(q, "q", grad_out, "grad_out", op);
  check_same_dtype(q, "q", out, "out", op);
  const std::array<int64_t, 3> out_shape{q.size(0), q.size(2), q.size(1) * q.size(3)};
  TORCH_CHECK_VALUE(grad_out.sizes() == at::IntArrayRef(out_shape) && out.sizes() == grad_out.sizes(), op,
                    ": grad_out and out have shapes ", grad_out.sizes(), " and ", out.sizes(),
                    "; for q of shape ", q.sizes(), " both must be ", at::IntArrayRef(out_shape), ".");
  TORCH_CHECK_VALUE(
      lse.sizes() == q.sizes().slice(0, 3) && lse.scalar_type() == statistics_dtype(q.scalar_type()), op,
      ": lse has shape ", lse.sizes(), " and dtype ", lse.scalar_type(), "; it must be ",
      q.sizes().slice(0, 3), " of ", statistics_dtype(q.scalar_type()), ".");
}

// ---- ops on the CPU ----

// Returns a [B, H, S, D] view of a [B, S, H * D] tensor.
Tensor as_heads(const Tensor& tokens, const Tensor& like) {
  return tokens.unflatten(-1, {like.size(1), like.size(3)}).transpose(1, 2);
}

// Returns rowsum(grad_out * out) [B, H, S], with the dtype of lse.
Tensor deltas(const Tensor& grad_out, const Tensor& out, const Tensor& lse) {
  const Tensor delta = at::empty_like(lse);
  const int64_t heads = out.size(1), seq = out.size(2);
  PYRUNTIME_DISPATCH_FLOAT(out.scalar_type(), "causal_attention_backward", [&] {
    auto* data = delta.mutable_data_ptr<acc_t<scalar_t>>();
    at::parallel_for(0, out.size(0) * heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        simd_run<attention::RowDots>(rows_of<const scalar_t>(grad_out, i / heads, i % heads),
                                     rows_of<const scalar_t>(out, i / heads, i % heads), seq, out.size(3),
                                     data + i * seq);
      }
    });
  });
  return delta;
}

// begin = 0 and end = i + 1 for query i, the same in every batch.
class CausalRanges {
 public:
  explicit CausalRanges(int64_t seq) : begin_(seq, 0), end_(seq) { std::iota(end_.begin(), end_.end(), 1); }

  attention::Visible visible(int64_t /*batch*/) const {
    return {begin_.data(), end_.data(), static_cast<int64_t>(end_.size())};
  }

 private:
  std::vector<int32_t> begin_, end_;
};

std::tuple<Tensor, Tensor> causal_attention_cpu(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                                double scale) {
  check_heads("causal_attention", q_in, k_in, v_in, /*as_many_keys_as_queries=*/true);
  const Tensor q = with_contiguous_rows(q_in), k = with_contiguous_rows(k_in), v = with_contiguous_rows(v_in);
  const Tensor out = at::empty({q.size(0), q.size(2), q.size(1) * q.size(3)}, q.options());
  const Tensor lse = at::full(q.sizes().slice(0, 3), -std::numeric_limits<double>::infinity(),
                              q.options().dtype(statistics_dtype(q.scalar_type())));
  if (out.numel() != 0) {
    attend</*kInSums=*/false>(q, k, v, CausalRanges(q.size(2)), scale, as_heads(out, q), lse);
  }
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> causal_attention_backward_cpu(const Tensor& grad_out_in,
                                                                 const Tensor& q_in, const Tensor& k_in,
                                                                 const Tensor& v_in, const Tensor& out_in,
                                                                 const Tensor& lse_in, double scale) {
  check_backward(grad_out_in, q_in, k_in, v_in, out_in, lse_in);
  const Tensor q = with_contiguous_rows(q_in), k = with_contiguous_rows(k_in), v = with_contiguous_rows(v_in);
  const Tensor grad_out = as_heads(grad_out_in.contiguous(), q), out = as_heads(out_in.contiguous(), q);
  const Tensor dq = empty_heads(q), dk = empty_heads(k), dv = empty_heads(v);
  if (dk.numel() != 0) {
    const Tensor lse = lse_in.contiguous();
    attend_backward</*kInSums=*/false>(grad_out, q, k, v, CausalRanges(q.size(2)), deltas(grad_out, out, lse),
                                       lse, scale, dq, dk, dv);
  }
  return {dq, dk, dv};
}

// ---- autograd ----

struct CausalAttention : Function<CausalAttention> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                               double scale) {
    const auto [out, lse] = [&] {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      return Operator<causal_attention_cpu>::call(q, k, v, scale);
    }();
    ctx->save_for_backward({q, k, v, saved_output(out), lse});
    ctx->mark_non_differentiable({lse});
    ctx->saved_data["scale"] = scale;
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    auto [dq, dk, dv] = Operator<causal_attention_backward_cpu>::call(
        grads[0], saved[0], saved[1], saved[2], saved[3], saved[4], ctx->saved_data["scale"].toDouble());
    return {dq, dk, dv, Tensor()};
  }
};

TORCH_LIBRARY_FRAGMENT(pyruntime, m) {
  // Only on the CPU: models use torch's attention on other devices.
  Operator<causal_attention_cpu>::define_differentiable<CausalAttention>(
      m, "causal_attention(Tensor q, Tensor k, Tensor v, float scale) -> (Tensor out, Tensor lse)",
      c10::DispatchKey::CPU);
  Operator<causal_attention_backward_cpu>::define_without_gradient(
      m,
      "causal_attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
      "float scale) -> (Tensor dq, Tensor dk, Tensor dv)",
      c10::DispatchKey::CPU);
}

}  // namespace

}  // namespace pyruntime::layers
