// Causal grouped-query attention; the algorithm and its equations are in attention_kernels.h.
//
// q [B, H, S, D], k and v [B, Hkv, S, D] with Hkv dividing H: query heads h * H / Hkv ... share key head h,
// and a query sees the keys up to its own place. out [B, S, H * D], as the output projection reads it; lse
// [B, H, S], the log-sum-exp of a query's scaled scores, float32 (float64 for float64). dq, dk and dv are
// transposed views of contiguous [B, S, heads, D].
//
// Saved for the backward: q, k, v, out and lse. One thread computes all that belongs to one key head, so that
// no result depends on the number of threads.

#include <c10/core/CPUAllocator.h>

#include <array>
#include <limits>
#include <tuple>

#include "attention_kernels.h"
#include "common.h"
#include "layers.h"

namespace pyruntime::layers {
namespace {

// ---- checks ----

void check_heads(const char* op, const Tensor& q, const Tensor& k, const Tensor& v) {
  check_floating(q, op, "q");
  check_same_dtype(q, "q", k, "k", op);
  check_same_dtype(q, "q", v, "v", op);
  TORCH_CHECK_VALUE(q.dim() == 4 && k.dim() == 4 && k.sizes() == v.sizes() && q.size(0) == k.size(0) &&
                        q.size(2) == k.size(2) && q.size(3) == k.size(3) && q.size(3) > 0,
                    op, ": q, k and v have shapes ", q.sizes(), ", ", k.sizes(), " and ", v.sizes(),
                    "; they must be [B, H, S, D], [B, Hkv, S, D] and [B, Hkv, S, D] with D at least 1.");
  TORCH_CHECK_VALUE(k.size(1) > 0 && q.size(1) % k.size(1) == 0, op, ": q has ", q.size(1),
                    " heads and k and v have ", k.size(1),
                    "; the number of key/value heads must divide the number of query heads.");
}

void check_backward(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                    const Tensor& out, const Tensor& lse) {
  constexpr auto op = "causal_attention_backward";
  check_heads(op, q, k, v);
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

Tensor with_contiguous_rows(const Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) == 1 ? tensor : tensor.contiguous();
}

Tensor new_heads(const Tensor& like) {
  return at::empty({like.size(0), like.size(2), like.size(1), like.size(3)}, like.options()).transpose(1, 2);
}

// A [B, H, S, D] view of a [B, S, H * D] tensor.
Tensor as_heads(const Tensor& tokens, const Tensor& like) {
  return tokens.unflatten(-1, {like.size(1), like.size(3)}).transpose(1, 2);
}

template <typename T>
attention::Rows<T> rows_of(const Tensor& heads, int64_t batch, int64_t head) {
  const int64_t offset = batch * heads.stride(0) + head * heads.stride(1);
  using Stored = std::remove_const_t<T>;
  if constexpr (std::is_const_v<T>) {
    return {heads.const_data_ptr<Stored>() + offset, heads.stride(2)};
  } else {
    return {heads.mutable_data_ptr<Stored>() + offset, heads.stride(2)};
  }
}

// Scratch memory of this thread. It is kept from call to call, because fresh memory costs a page fault every
// 4 KiB, unless it is large.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) {
    constexpr int64_t kKept = int64_t{16} << 20;
    thread_local c10::DataPtr kept;
    thread_local int64_t kept_bytes = 0;
    if (bytes <= kKept && bytes > kept_bytes) {
      kept = c10::GetCPUAllocator()->allocate(bytes);
      kept_bytes = bytes;
    } else if (bytes > kKept) {
      own_ = c10::GetCPUAllocator()->allocate(bytes);
    }
    memory_ = static_cast<char*>(own_ ? own_.get() : kept.get());
  }

  char* memory() const { return memory_; }

 private:
  c10::DataPtr own_;
  char* memory_;
};

// Calls f(operands, T) with the operands that tensors of `dtype` are multiplied as and their element type.
template <typename F>
void with_operands(at::ScalarType dtype, F&& f) {
#ifdef PYRUNTIME_TILE_X86
  if (dtype == at::kBFloat16 && Bf16Pairs::available()) return f(Bf16Pairs(), c10::BFloat16());
#endif
  PYRUNTIME_DISPATCH_FLOAT(dtype, "causal_attention", [&] { f(Plain<acc_t<scalar_t>>(), scalar_t()); });
}

// Calls f(worker, batch, kv_head) for every key head, with a Worker that has its scratch memory.
template <typename Worker, typename F>
void for_each_key_head(const attention::Sizes& sizes, const Tensor& k, const F& f) {
  const int64_t kv_heads = k.size(1), bytes = Worker(sizes, nullptr).bytes();
  at::parallel_for(0, k.size(0) * kv_heads, 1, [&](int64_t begin, int64_t end) {
    const Scratch scratch(bytes);
    Worker worker(sizes, scratch.memory());
    for (int64_t task = begin; task < end; ++task) f(worker, task / kv_heads, task % kv_heads);
  });
}

std::tuple<Tensor, Tensor> causal_attention_cpu(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                                double scale) {
  check_heads("causal_attention", q_in, k_in, v_in);
  const Tensor q = with_contiguous_rows(q_in), k = with_contiguous_rows(k_in), v = with_contiguous_rows(v_in);
  const int64_t seq = q.size(2), group = q.size(1) / k.size(1);
  const Tensor out = at::empty({q.size(0), seq, q.size(1) * q.size(3)}, q.options());
  const Tensor lse = at::empty(q.sizes().slice(0, 3), q.options().dtype(statistics_dtype(q.scalar_type())));
  if (out.numel() == 0) return {out, lse};
  const Tensor out_heads = as_heads(out, q);
  with_operands(q.scalar_type(), [&](auto operands, auto element) {
    using T = decltype(element);
    using A = typename decltype(operands)::accumulate_t;
    using Worker = attention::Forward<decltype(operands), T>;
    A* lse_data = lse.mutable_data_ptr<A>();
    const attention::Sizes sizes{seq, q.size(3), scale};
    for_each_key_head<Worker>(sizes, k, [&](Worker& worker, int64_t batch, int64_t kv_head) {
      worker.load_keys(rows_of<const T>(k, batch, kv_head), rows_of<const T>(v, batch, kv_head));
      for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        worker.head(rows_of<const T>(q, batch, head), rows_of<T>(out_heads, batch, head),
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
  with_operands(q.scalar_type(), [&](auto operands, auto element) {
    using T = decltype(element);
    using A = typename decltype(operands)::accumulate_t;
    using Worker = attention::Backward<decltype(operands), T>;
    const A* lse_data = lse.const_data_ptr<A>();
    const attention::Sizes sizes{seq, q.size(3), scale};
    for_each_key_head<Worker>(sizes, k, [&](Worker& worker, int64_t batch, int64_t kv_head) {
      worker.load_keys(rows_of<const T>(k, batch, kv_head), rows_of<const T>(v, batch, kv_head));
      for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        worker.head(rows_of<const T>(q, batch, head), rows_of<const T>(grad_out, batch, head),
                    rows_of<const T>(out, batch, head), lse_data + (batch * q.size(1) + head) * seq,
                    rows_of<T>(dq, batch, head));
      }
      worker.store_keys(rows_of<T>(dk, batch, kv_head), rows_of<T>(dv, batch, kv_head));
    });
  });
  return {dq, dk, dv};
}

// ---- ops on every other device ----

// [B, H, S, D] as [B, Hkv, H / Hkv, S, D] in the dtype of the statistics.
Tensor grouped(const Tensor& heads, int64_t kv_heads) {
  return heads.to(statistics_dtype(heads.scalar_type())).unflatten(1, {kv_heads, heads.size(1) / kv_heads});
}

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
  check_heads("causal_attention", q_in, k_in, v_in);
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
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    static const auto op = find_op<AttentionSignature>("pyruntime::causal_attention");
    auto [out, lse] = op.call(q, k, v, scale);
    ctx->save_for_backward({q, k, v, out, lse});
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
