// Attention over one block of keys, the step of ring attention (Liu, Zaharia and Abbeel 2023,
// arXiv:2310.01889). attention_kernels.h has the algorithm and its equations.
//
// q [B, H, Sq, D], k and v [B, Hkv, Sk, D] with Hkv dividing H; query i of batch b sees keys begin[b, i] <= j
// < end[b, i]. out and lse are the result over the keys seen so far, into which the block is merged. The
// block's part is added to dq, dk and dv. All of these are float32 (float64 for float64), so that nothing is
// rounded between blocks.

#include <ATen/MemoryOverlap.h>

#include <array>
#include <limits>
#include <vector>

#include "attention.h"

namespace pyruntime::layers {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// ---- checks ----

void check_ranges(const char* op, const Tensor& q, const Tensor& begin, const Tensor& end) {
  const std::array<int64_t, 2> shape{q.size(0), q.size(2)};
  TORCH_CHECK_TYPE(begin.scalar_type() == at::kInt && end.scalar_type() == at::kInt, op,
                   ": begin and end have dtypes ", begin.scalar_type(), " and ", end.scalar_type(),
                   "; both must be Int (int32).");
  TORCH_CHECK_VALUE(begin.sizes() == at::IntArrayRef(shape) && end.sizes() == begin.sizes(), op,
                    ": begin and end have shapes ", begin.sizes(), " and ", end.sizes(), "; for q of shape ",
                    q.sizes(), " both must be [B, Sq] = ", at::IntArrayRef(shape), ".");
}

void check_is(const char* op, const char* name, const Tensor& tensor, at::IntArrayRef shape,
              at::ScalarType dtype) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, op, ": ", name, " has dtype ", tensor.scalar_type(),
                   "; it must be ", dtype, ".");
  TORCH_CHECK_VALUE(tensor.sizes() == shape, op, ": ", name, " has shape ", tensor.sizes(), "; it must be ",
                    shape, ".");
}

// Checks a tensor that is written in place: dtype of the statistics, shape of `like`.
void check_sums(const char* op, const char* name, const Tensor& tensor, const Tensor& like) {
  check_is(op, name, tensor, like.sizes(), statistics_dtype(like.scalar_type()));
  TORCH_CHECK_VALUE((tensor.stride(-1) == 1 || tensor.size(-1) == 1) &&
                        at::has_internal_overlap(tensor) != at::MemOverlap::Yes,
                    op, ": ", name, " has strides ", tensor.strides(),
                    "; it is written in place, so the last must be 1 and none may be 0.");
}

void check_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& begin, const Tensor& end,
                   const Tensor& out, const Tensor& lse) {
  constexpr auto op = "attention_block_";
  check_heads(op, q, k, v, /*as_many_keys_as_queries=*/false);
  check_ranges(op, q, begin, end);
  check_sums(op, "out", out, q);
  check_is(op, "lse", lse, q.sizes().slice(0, 3), statistics_dtype(q.scalar_type()));
  TORCH_CHECK_VALUE(lse.is_contiguous(), op, ": lse has strides ", lse.strides(),
                    "; it is written in place and must be contiguous.");
}

void check_backward(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                    const Tensor& begin, const Tensor& end, const Tensor& delta, const Tensor& lse,
                    const Tensor& dq, const Tensor& dk, const Tensor& dv) {
  constexpr auto op = "attention_block_backward_";
  check_heads(op, q, k, v, /*as_many_keys_as_queries=*/false);
  check_ranges(op, q, begin, end);
  check_is(op, "grad_out", grad_out, q.sizes(), q.scalar_type());
  check_is(op, "delta", delta, q.sizes().slice(0, 3), statistics_dtype(q.scalar_type()));
  check_is(op, "lse", lse, q.sizes().slice(0, 3), statistics_dtype(q.scalar_type()));
  check_sums(op, "dq", dq, q);
  check_sums(op, "dk", dk, k);
  check_sums(op, "dv", dv, v);
}

// ---- ops on the CPU ----

// The ranges, clamped and counted from the first key that any query sees; `count` keys are seen. Keys outside
// are not even packed for the GEMMs.
class BlockRanges {
 public:
  BlockRanges(const Tensor& begin_in, const Tensor& end_in, int64_t keys) : queries_(begin_in.size(1)) {
    const Tensor begin = begin_in.contiguous(), end = end_in.contiguous();
    const auto *b = begin.const_data_ptr<int32_t>(), *e = end.const_data_ptr<int32_t>();
    int64_t hull_begin = keys, hull_end = 0;
    for (int64_t i = 0; i < begin.numel(); ++i) {
      const int64_t from = attention::clamp(b[i], 0, keys), to = attention::clamp(e[i], from, keys);
      begin_.push_back(static_cast<int32_t>(from));
      end_.push_back(static_cast<int32_t>(to));
      if (from == to) continue;
      hull_begin = std::min(hull_begin, from), hull_end = std::max(hull_end, to);
    }
    first_ = hull_begin, count_ = std::max<int64_t>(hull_end - hull_begin, 0);
    for (size_t i = 0; i < begin_.size(); ++i) {
      const bool sees = begin_[i] < end_[i];
      begin_[i] = sees ? static_cast<int32_t>(begin_[i] - first_) : 0;
      end_[i] = sees ? static_cast<int32_t>(end_[i] - first_) : 0;
    }
  }

  int64_t count() const { return count_; }

  // Returns the seen part of keys, values or their gradients.
  Tensor of(const Tensor& heads) const { return heads.narrow(2, first_, count_); }

  attention::Visible visible(int64_t batch) const {
    return {begin_.data() + batch * queries_, end_.data() + batch * queries_, queries_};
  }

 private:
  int64_t queries_, first_, count_;
  std::vector<int32_t> begin_, end_;
};

void attention_block_cpu(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const Tensor& begin,
                         const Tensor& end, double scale, const Tensor& out, const Tensor& lse) {
  check_forward(q_in, k_in, v_in, begin, end, out, lse);
  mark_written(out);
  mark_written(lse);
  const BlockRanges ranges(begin, end, k_in.size(2));
  if (q_in.numel() == 0 || ranges.count() == 0) return;
  const Tensor q = with_contiguous_rows(q_in);
  const Tensor k = with_contiguous_rows(ranges.of(k_in)), v = with_contiguous_rows(ranges.of(v_in));
  attend</*kInSums=*/true>(q, k, v, ranges, scale, out, lse);
}

void attention_block_backward_cpu(const Tensor& grad_out_in, const Tensor& q_in, const Tensor& k_in,
                                  const Tensor& v_in, const Tensor& begin, const Tensor& end,
                                  const Tensor& delta_in, const Tensor& lse_in, double scale,
                                  const Tensor& dq, const Tensor& dk_in, const Tensor& dv_in) {
  check_backward(grad_out_in, q_in, k_in, v_in, begin, end, delta_in, lse_in, dq, dk_in, dv_in);
  for (const Tensor& sums : {dq, dk_in, dv_in}) mark_written(sums);
  const BlockRanges ranges(begin, end, k_in.size(2));
  if (q_in.numel() == 0 || ranges.count() == 0) return;
  const Tensor q = with_contiguous_rows(q_in), grad_out = with_contiguous_rows(grad_out_in);
  const Tensor k = with_contiguous_rows(ranges.of(k_in)), v = with_contiguous_rows(ranges.of(v_in));
  const Tensor delta = delta_in.contiguous(), lse = lse_in.contiguous();
  const Tensor dk = ranges.of(dk_in), dv = ranges.of(dv_in);
  attend_backward</*kInSums=*/true>(grad_out, q, k, v, ranges, delta, lse, scale, dq, dk, dv);
}

// ---- ops on every other device ----

// Returns scaled scores [B, Hkv, H / Hkv, Sq, Sk], -inf where a key is not seen.
Tensor masked_scores(const Tensor& q, const Tensor& k, const Tensor& begin, const Tensor& end, double scale) {
  const Tensor key = at::arange(k.size(-2), begin.options());
  const Tensor hidden = key.lt(begin.unsqueeze(-1)).logical_or_(key.ge(end.unsqueeze(-1)));
  return q.matmul(k.transpose(-2, -1)).mul(scale).masked_fill(hidden.unsqueeze(1).unsqueeze(1), -kInfinity);
}

void attention_block_composite(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                               const Tensor& begin, const Tensor& end, double scale, const Tensor& out,
                               const Tensor& lse) {
  check_forward(q_in, k_in, v_in, begin, end, out, lse);
  if (q_in.numel() == 0 || k_in.numel() == 0) return;
  const int64_t kv_heads = k_in.size(1);
  const Tensor q = grouped(q_in, kv_heads), k = grouped(k_in, kv_heads), v = grouped(v_in, kv_heads);
  const Tensor scores = masked_scores(q, k, begin, end, scale);
  const Tensor merged = at::logaddexp(lse, scores.logsumexp({-1}).flatten(1, 2));
  // If nothing has been seen, any finite shift makes every weight exp(-inf) = 0.
  const Tensor shift = merged.masked_fill(merged.eq(-kInfinity), 0);
  const Tensor keep = lse.sub(shift).exp().unsqueeze(-1);
  const Tensor before = out.masked_fill(lse.eq(-kInfinity).unsqueeze(-1), 0).mul(keep);
  const Tensor weights = scores.sub(shift.unflatten(1, {kv_heads, q.size(2)}).unsqueeze(-1)).exp();
  out.copy_(before.add(weights.matmul(v).flatten(1, 2)));
  lse.copy_(merged);
}

void attention_block_backward_composite(const Tensor& grad_out_in, const Tensor& q_in, const Tensor& k_in,
                                        const Tensor& v_in, const Tensor& begin, const Tensor& end,
                                        const Tensor& delta_in, const Tensor& lse_in, double scale,
                                        const Tensor& dq, const Tensor& dk, const Tensor& dv) {
  check_backward(grad_out_in, q_in, k_in, v_in, begin, end, delta_in, lse_in, dq, dk, dv);
  if (q_in.numel() == 0 || k_in.numel() == 0) return;
  const int64_t kv_heads = k_in.size(1);
  const Tensor q = grouped(q_in, kv_heads), k = grouped(k_in, kv_heads), v = grouped(v_in, kv_heads);
  const Tensor grad_out = grouped(grad_out_in, kv_heads);
  const Tensor delta = delta_in.unflatten(1, {kv_heads, q.size(2)}).unsqueeze(-1);
  // exp(score - inf) = 0 where nothing was seen in any block.
  const Tensor lse =
      lse_in.masked_fill(lse_in.eq(-kInfinity), kInfinity).unflatten(1, {kv_heads, q.size(2)}).unsqueeze(-1);
  const Tensor p = masked_scores(q, k, begin, end, scale).sub(lse).exp();
  const Tensor ds = grad_out.matmul(v.transpose(-2, -1)).sub(delta).mul(p).mul(scale);
  dq.add_(ds.matmul(k).flatten(1, 2));
  dk.add_(ds.transpose(-2, -1).matmul(q).sum({2}));
  dv.add_(p.transpose(-2, -1).matmul(grad_out).sum({2}));
}

TORCH_LIBRARY_FRAGMENT(pyruntime, m) {
  Operator<attention_block_composite, attention_block_cpu>::define_without_gradient(
      m,
      "attention_block_(Tensor q, Tensor k, Tensor v, Tensor begin, Tensor end, float scale, "
      "Tensor(a!) out, Tensor(b!) lse) -> ()");
  Operator<attention_block_backward_composite, attention_block_backward_cpu>::define_without_gradient(
      m,
      "attention_block_backward_(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor begin, Tensor end, "
      "Tensor delta, Tensor lse, float scale, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv) -> ()");
}

}  // namespace

}  // namespace pyruntime::layers
