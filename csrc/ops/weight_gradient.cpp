#include "ops/weight_gradient.h"

#include <map>
#include <mutex>
#include <utility>

#include "ops/gemm.h"

namespace pyruntime {

namespace {

struct Entry {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  WeightGradientSink sink;
};

using Key = std::pair<const c10::StorageImpl*, int64_t>;

struct Sinks {
  std::mutex mutex;
  std::map<Key, Entry> by_weight;
};

Sinks& sinks() {
  static auto* instance = new Sinks();  // never destroyed: a sink may hold what outlives static destructors
  return *instance;
}

Key key_of(const at::Tensor& weight) {
  return {weight.storage().unsafeGetStorageImpl(), weight.storage_offset()};
}

// Empty where there is none.
WeightGradientSink sink_of(const at::Tensor& weight) {
  // What torch.compile traces with has no memory to be known by.
  if (!weight.has_storage() || weight.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return {};
  Sinks& all = sinks();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.by_weight.find(key_of(weight));
  if (found == all.by_weight.end()) return {};
  // Another tensor may lie where a weight once was.
  return found->second.storage.expired() ? WeightGradientSink() : found->second.sink;
}

at::Tensor as_matrix(const at::Tensor& t) {
  return t.dim() == 2 ? t : t.reshape({-1, t.size(-1)});
}

}  // namespace

void set_weight_gradient_sink(const at::Tensor& weight, WeightGradientSink sink) {
  Sinks& all = sinks();
  WeightGradientSink before;  // destroyed without the lock
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::erase_if(all.by_weight, [](const auto& entry) { return entry.second.storage.expired(); });
  const auto found = all.by_weight.find(key_of(weight));
  if (found != all.by_weight.end()) {
    before = std::move(found->second.sink);
    all.by_weight.erase(found);
  }
  if (sink) {
    all.by_weight.emplace(key_of(weight), Entry{weight.storage().getWeakStorageImpl(), std::move(sink)});
  }
}

bool has_weight_gradient_sink(const at::Tensor& weight) {
  return static_cast<bool>(sink_of(weight));
}

at::Tensor weight_gradient(const at::Tensor& weight, const at::Tensor& dy, const at::Tensor& x) {
  const WeightGradientSink sink = sink_of(weight);
  if (!sink) return linear_wgrad(dy, x);
  sink(as_matrix(dy), as_matrix(x));
  return {};
}

}  // namespace pyruntime
