#pragma once

// Checks that the attention ops share, and the loops that pass tensors [B, H, S, D] to the workers of
// attention_kernels.h. One thread computes everything that belongs to one key head.

#include <c10/core/CPUAllocator.h>

#include "attention_kernels.h"
#include "common.h"

namespace pyruntime::layers {

// Checks that q, k and v agree in dtype, batches and head size, and that key heads divide query heads.
inline void check_heads(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                        bool as_many_keys_as_queries) {
  check_floating(q, op, "q");
  check_same_dtype(q, "q", k, "k", op);
  check_same_dtype(q, "q", v, "v", op);
  const char *queries = as_many_keys_as_queries ? "S" : "Sq", *keys = as_many_keys_as_queries ? "S" : "Sk";
  TORCH_CHECK_VALUE(q.dim() == 4 && k.dim() == 4 && k.sizes() == v.sizes() && q.size(0) == k.size(0) &&
                        (q.size(2) == k.size(2) || !as_many_keys_as_queries) && q.size(3) == k.size(3) &&
                        q.size(3) > 0,
                    op, ": q, k and v have shapes ", q.sizes(), ", ", k.sizes(), " and ", v.sizes(),
                    "; they must be [B, H, ", queries, ", D], [B, Hkv, ", keys, ", D] and [B, Hkv, ", keys,
                    ", D] with D at least 1.");
  TORCH_CHECK_VALUE(k.size(1) > 0 && q.size(1) % k.size(1) == 0, op, ": q has ", q.size(1),
                    " heads and k and v have ", k.size(1),
                    "; the number of key/value heads must divide the number of query heads.");
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

// Scratch memory of this thread. Unless it is large it is kept between calls, because fresh memory costs a
// page fault every 4 KiB.
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

// Calls f(operands, T): the operand type that multiplies tensors of `dtype`, and their element type.
template <typename F>
void with_operands(at::ScalarType dtype, F&& f) {
#ifdef PYRUNTIME_TILE_X86
  if (dtype == at::kBFloat16 && Bf16Pairs::available()) return f(Bf16Pairs(), c10::BFloat16());
#endif
  PYRUNTIME_DISPATCH_FLOAT(dtype, "attention", [&] { f(Plain<acc_t<scalar_t>>(), scalar_t()); });
}

// Calls f(worker, batch, kv_head) for every key head, with a Worker on scratch memory.
template <typename Worker, typename F>
void for_each_key_head(const attention::Sizes& sizes, const Tensor& k, const F& f) {
  const int64_t kv_heads = k.size(1), bytes = Worker(sizes, nullptr).bytes();
  at::parallel_for(0, k.size(0) * kv_heads, 1, [&](int64_t begin, int64_t end) {
    const Scratch scratch(bytes);
    Worker worker(sizes, scratch.memory());
    for (int64_t task = begin; task < end; ++task) f(worker, task / kv_heads, task % kv_heads);
  });
}

// Merges attention of q over k and v, which have contiguous rows, into out and lse. ranges.visible(batch)
// returns the keys that queries see. out has the dtype of the sums if kInSums, else that of q.
template <bool kInSums, typename Ranges>
void attend(const Tensor& q, const Tensor& k, const Tensor& v, const Ranges& ranges, double scale,
            const Tensor& out, const Tensor& lse) {
  const int64_t heads = q.size(1), queries = q.size(2), group = heads / k.size(1);
  with_operands(q.scalar_type(), [&](auto operands, auto element) {
    using T = decltype(element);
    using A = typename decltype(operands)::accumulate_t;
    using Result = std::conditional_t<kInSums, A, T>;
    using Worker = attention::Forward<decltype(operands), T>;
    A* lse_data = lse.mutable_data_ptr<A>();
    const attention::Sizes sizes{k.size(2), q.size(3), scale};
    for_each_key_head<Worker>(sizes, k, [&](Worker& worker, int64_t batch, int64_t kv_head) {
      worker.load_keys(rows_of<const T>(k, batch, kv_head), rows_of<const T>(v, batch, kv_head));
      for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        worker.head(rows_of<const T>(q, batch, head), ranges.visible(batch),
                    rows_of<Result>(out, batch, head), lse_data + (batch * heads + head) * queries);
      }
    });
  });
}

// Adds its gradients to dq, dk and dv in the dtype of the sums if kInSums, else writes them in the dtype of
// q. delta and lse are contiguous.
template <bool kInSums, typename Ranges>
void attend_backward(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                     const Ranges& ranges, const Tensor& delta, const Tensor& lse, double scale,
                     const Tensor& dq, const Tensor& dk, const Tensor& dv) {
  const int64_t heads = q.size(1), queries = q.size(2), group = heads / k.size(1);
  with_operands(q.scalar_type(), [&](auto operands, auto element) {
    using T = decltype(element);
    using A = typename decltype(operands)::accumulate_t;
    using Result = std::conditional_t<kInSums, A, T>;
    using Worker = attention::Backward<decltype(operands), T, attention::WriteRows<kInSums>>;
    const A *lse_data = lse.const_data_ptr<A>(), *delta_data = delta.const_data_ptr<A>();
    const attention::Sizes sizes{k.size(2), q.size(3), scale};
    for_each_key_head<Worker>(sizes, k, [&](Worker& worker, int64_t batch, int64_t kv_head) {
      worker.load_keys(rows_of<const T>(k, batch, kv_head), rows_of<const T>(v, batch, kv_head));
      for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        const int64_t first = (batch * heads + head) * queries;
        worker.head(rows_of<const T>(q, batch, head), ranges.visible(batch),
                    rows_of<const T>(grad_out, batch, head), lse_data + first, delta_data + first,
                    rows_of<Result>(dq, batch, head));
      }
      worker.store_keys(rows_of<Result>(dk, batch, kv_head), rows_of<Result>(dv, batch, kv_head));
    });
  });
}

// Returns [B, H, S, D] as [B, Hkv, H / Hkv, S, D] in the dtype of the statistics, for the composites.
inline Tensor grouped(const Tensor& heads, int64_t kv_heads) {
  return heads.to(statistics_dtype(heads.scalar_type())).unflatten(1, {kv_heads, heads.size(1) / kv_heads});
}

}  // namespace pyruntime::layers
