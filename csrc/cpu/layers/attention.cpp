// Causal grouped-query attention; the algorithm and its equations are in attention_kernels.h, to which it is
// the case of ranges that begin at key 0 and end after the query's own place, with no result before.
//
// q [B, H, S, D], k and v [B, Hkv, S, D] with Hkv dividing H: query heads h * H / Hkv ... share key head h,
// and a query sees the keys up to its own place. out [B, S, H * D], as the output projection reads it; lse
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
#include "layers.h"

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

Tensor new_heads(const Tensor& like) {
  return at::empty({like.size(0), like.size(2), like.size(1), like.size(3)}, like.options()).transpose(1, 2);
}

// A [B, H, S, D] view of a [B, S, H * D] tensor.
Tensor as_heads(const Tensor& tokens, const Tensor& like) {
  return tokens.unflatten(-1, {like.size(1), like.size(3)}).transpose(1, 2);
}

// begin = 0 and end = i + 1 for query i, the same in every batch.
class CausalRanges {
 public:
  explicit CausalRanges(int64_t seq) : begin_(seq, 0), end_(seq) { std::iota(end_.begin(), end_.end(), 1); }

  attention::Visible visible() const {
    return {begin_.data(), end_.data(), static_cast<int64_t>(end_.size())};
  }

 private:
  std::vector<int32_t> begin_, end_;
};

std::tuple<Tensor, Tensor> causal_attention_cpu(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                                double scale) {
  check_heads("causal_attention", q_in, k_in, v_in, /*as_many_keys_as_queries=*/true);
  const Tensor q = with_contiguous_rows(q_in), k = with_contiguous_rows(k_in), v = with_contiguous_rows(v_in);
  const int64_t seq = q.size(2), group = q.size(1) / k.size(1);
  const Tensor out = at::empty({q.size(0), seq, q.size(1) * q.size(3)}, q.options());
  const Tensor lse = at::full(q.sizes().slice(0, 3), -std::numeric_limits<double>::infinity(),
                              q.options().dtype(statistics_dtype(q.scalar_type())));
  if (out.numel() == 0) return {out, lse};
  const Tensor out_heads = as_heads(out, q);
  const CausalRanges ranges(seq);
  with_operands(q.scalar_type(), [&](auto operands, auto element) {
    using T = decltype(element);
    using A = typename decltype(operands)::accumulate_t;
    using Worker = attention::Forward<decltype(operands), T>;
    A* lse_data = lse.mutable_data_ptr<A>();
    const attention::Sizes sizes{seq, q.size(3), scale};
    for_each_key_head<Worker>(sizes, k, [&](Worker& worker, int64_t batch, int64_t kv_head) {
      worker.load_keys(rows_of<const T>(k, batch, kv_head), rows_of<const T>(v, batch, kv_head));
      for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        worker.head(rows_of<const T>(q, batch, head), ranges.visible(), rows_of<T>(out_heads, batch, head),
                    lse_data + (batch * q.size(1) + head) * seq);
      }
    });
  });
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> causal_attention_backward_cpu(const Tensor& grad_out_in,
                                                                 const Tensor& q_in, const Tensor& k_in,
                                                                 const Tensor& v_in, const Tensor& out_in,
                                                                 const Tensor& lse_in, double scale) {
  check_backward(grad_out_in, q_in, k_in, v_in, out_in, lse_in);
  const Tensor q = with_contiguous_rows(q_in), k = with_contiguous_rows(k_in), v = with_contiguous_rows(v_in);
  const Tensor grad_out = as_heads(grad_out_in.contiguous(), q), out = as_heads(out_in.contiguous(), q);
  const Tensor lse = lse_in.contiguous();
  const int64_t seq = q.size(2), group = q.size(1) / k.size(1);
  const Tensor dq = new_heads(q), dk = new_heads(k), dv = new_heads(v);
  if (dk.numel() == 0) return {dq, dk, dv};
  const CausalRanges ranges(seq);
  with_operands(q.scalar_type(), [&](auto operands, auto element) {
    using T = decltype(element);
    using A = typename decltype(operands)::accumulate_t;
    using Worker = attention::Backward<decltype(operands), T, attention::StoreRows>;
    const A* lse_data = lse.const_data_ptr<A>();
    const attention::Sizes sizes{seq, q.size(3), scale};
    for_each_key_head<Worker>(sizes, k, [&](Worker& worker, int64_t batch, int64_t kv_head) {
      worker.load_keys(rows_of<const T>(k, batch, kv_head), rows_of<const T>(v, batch, kv_head));
      for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        const auto grad_rows = rows_of<const T>(grad_out, batch, head);
        const auto out_rows = rows_of<const T>(out, batch, head);
        std::array<A, attention::kQueries> delta;
        const auto delta_of = [&](int64_t query, int64_t rows) {
          simd_run<attention::RowDots>(grad_rows.from(query), out_rows.from(query), rows, q.size(3),
                                       delta.data());
          return delta.data();
        };
        worker.head(rows_of<const T>(q, batch, head), ranges.visible(), grad_rows,
                    lse_data + (batch * q.size(1) + head) * seq, delta_of, rows_of<T>(dq, batch, head));
      }
      worker.store_keys(rows_of<T>(dk, batch, kv_head), rows_of<T>(dv, batch, kv_head));
    });
  });
  return {dq, dk, dv};
}

// ---- ops on every other device ----

// Scaled scores [B, Hkv, H / Hkv, S, S], -inf where a key comes after its query.
Tensor masked_scores(const Tensor& q, const Tensor& k, double scale) {
  const Tensor future = at::ones({q.size(-2), q.size(-2)}, q.options().dtype(at::kBool)).triu(1);
  return q.matmul(k.transpose(-2, -1))
      .mul(scale)
      .masked_fill(future, -std::numeric_limits<double>::infinity());
}

Tensor to_layout_of_heads(const Tensor& heads, at::ScalarType dtype) {
  return heads.transpose(1, 2).to(dtype).contiguous().transpose(1, 2);
}

std::tuple<Tensor, Tensor> causal_attention_composite(const Tensor& q_in, const Tensor& k_in,
                                                      const Tensor& v_in, double scale) {
  check_heads("causal_attention", q_in, k_in, v_in, /*as_many_keys_as_queries=*/true);
  const int64_t kv_heads = k_in.size(1);
  const Tensor q = grouped(q_in, kv_heads), k = grouped(k_in, kv_heads), v = grouped(v_in, kv_heads);
  const Tensor scores = masked_scores(q, k, scale);
  const Tensor lse = scores.logsumexp({-1});
  const Tensor out = scores.sub(lse.unsqueeze(-1)).exp().matmul(v).flatten(1, 2);
  return {out.transpose(1, 2).flatten(2).to(q_in.scalar_type()).contiguous(), lse.flatten(1, 2).contiguous()};
}

std::tuple<Tensor, Tensor, Tensor> causal_attention_backward_composite(const Tensor& grad_out_in,
                                                                       const Tensor& q_in, const Tensor& k_in,
                                                                       const Tensor& v_in,
                                                                       const Tensor& out_in,
                                                                       const Tensor& lse_in, double scale) {
  check_backward(grad_out_in, q_in, k_in, v_in, out_in, lse_in);
  const int64_t kv_heads = k_in.size(1);
  const Tensor q = grouped(q_in, kv_heads), k = grouped(k_in, kv_heads), v = grouped(v_in, kv_heads);
  const Tensor grad_out = grouped(as_heads(grad_out_in, q_in), kv_heads);
  const Tensor out = grouped(as_heads(out_in, q_in), kv_heads);
  const Tensor lse = lse_in.unflatten(1, {kv_heads, q.size(2)}).unsqueeze(-1);
  const Tensor p = masked_scores(q, k, scale).sub(lse).exp();
  const Tensor delta = grad_out.mul(out).sum({-1}, /*keepdim=*/true);
  const Tensor ds = grad_out.matmul(v.transpose(-2, -1)).sub(delta).mul(p).mul(scale);
  const auto dtype = q_in.scalar_type();
  return {to_layout_of_heads(ds.matmul(k).flatten(1, 2), dtype),
          to_layout_of_heads(ds.transpose(-2, -1).matmul(q).sum({2}), dtype),
          to_layout_of_heads(p.transpose(-2, -1).matmul(grad_out).sum({2}), dtype)};
}

// ---- autograd ----

using AttentionSignature = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, double);
using AttentionBackwardSignature = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&,
                                                                      const Tensor&, const Tensor&,
                                                                      const Tensor&, const Tensor&, double);

struct CausalAttention : torch::autograd::Function<CausalAttention> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                               double scale) {
    static const auto op = find_op<AttentionSignature>("pyruntime::causal_attention");
    const auto [out, lse] = [&] {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      return op.call(q, k, v, scale);
    }();
    ctx->save_for_backward({q, k, v, saved_output(out), lse});
    ctx->mark_non_differentiable({lse});
    ctx->saved_data["scale"] = scale;
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_op<AttentionBackwardSignature>("pyruntime::causal_attention_backward");
    const auto saved = ctx->get_saved_variables();
    auto [dq, dk, dv] = op.call(grads[0], saved[0], saved[1], saved[2], saved[3], saved[4],
                                ctx->saved_data["scale"].toDouble());
    return {dq, dk, dv, Tensor()};
  }
};

std::tuple<Tensor, Tensor> causal_attention_autograd(const Tensor& q, const Tensor& k, const Tensor& v,
                                                     double scale) {
  const variable_list out = CausalAttention::apply(q, k, v, scale);
  return {out[0], out[1]};
}

}  // namespace

void register_attention(torch::Library& m) {
  m.def("causal_attention(Tensor q, Tensor k, Tensor v, float scale) -> (Tensor out, Tensor lse)");
  m.def(
      "causal_attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
      "float scale) -> (Tensor dq, Tensor dk, Tensor dv)");
  implement(m, "causal_attention", causal_attention_cpu, causal_attention_composite);
  implement(m, "causal_attention_backward", causal_attention_backward_cpu,
            causal_attention_backward_composite);
  implement_autograd(m, "causal_attention", causal_attention_autograd);
  refuse_autograd(m, "causal_attention_backward");
}

}  // namespace pyruntime::layers
