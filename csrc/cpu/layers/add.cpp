// sum += other where one is bfloat16 and the other float32: adds up the gradients of several micro-batches.
// The bits equal those of torch's addition, which converts such pairs element by element.

#include "cpu/layers/add.h"

#include "common.h"
#include "simd.h"

namespace pyruntime::layers {
namespace {

struct AddElements {
  template <typename T, typename U>
  static PYRUNTIME_INLINE void run(T* sum, const U* other, int64_t count) {
    PYRUNTIME_SIMD
    for (int64_t i = 0; i < count; ++i) store(sum[i], load(sum[i]) + load(other[i]));
  }
};

template <typename T, typename U>
void add_elements(const Tensor& sum, const Tensor& other) {
  T* to = sum.mutable_data_ptr<T>();
  const U* from = other.const_data_ptr<U>();
  at::parallel_for(0, sum.numel(), kElementsPerTask, [&](int64_t begin, int64_t end) {
    simd_run<AddElements>(to + begin, from + begin, end - begin);
  });
}

void add_composite(const Tensor& sum, const Tensor& other) {
  TORCH_CHECK_VALUE(sum.sizes() == other.sizes(), "add_: sum has shape ", sum.sizes(), " and other ",
                    other.sizes(), "; they must be the same.");
  sum.add_(other);
}

void add_cpu(const Tensor& sum, const Tensor& other) {
  const at::ScalarType to = sum.scalar_type(), from = other.scalar_type();
  const bool flat = sum.is_contiguous() && other.is_contiguous() && sum.sizes() == other.sizes();
  if (flat && to == at::kFloat && from == at::kBFloat16) {
    add_elements<float, at::BFloat16>(sum, other);
  } else if (flat && to == at::kBFloat16 && from == at::kFloat) {
    add_elements<at::BFloat16, float>(sum, other);
  } else {
    return add_composite(sum, other);
  }
  mark_written(sum);
}

TORCH_LIBRARY_FRAGMENT(pyruntime, m) {
  Operator<add_composite, add_cpu>::define_without_gradient(m, "add_(Tensor(a!) sum, Tensor other) -> ()");
}

}  // namespace

void call_add(const Tensor& sum, const Tensor& other) {
  Operator<add_composite, add_cpu>::call(sum, other);
}

}  // namespace pyruntime::layers
