// AdamW (Loshchilov and Hutter 2019, algorithm 2) over a list of tensors, one pass over each: the equations
// of csrc/cpu/layers/adamw.cpp.
//
//   g = grad * grad_scale      m = b1 m + (1 - b1) g      v = b2 v + (1 - b2) g^2
//   p = p (1 - lr * decay) - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
//
// State, master and arithmetic are fp32; the parameter is the rounded master.
#include "cuda/portable/checks.h"
#include "cuda/portable/numbers.cuh"

using namespace pyruntime;
using namespace pyruntime::portable;

namespace {

constexpr int kThreads = 256;
constexpr int kElementsPerThread = 4;  // 16-byte accesses of fp32
constexpr int64_t kElementsPerBlock = kThreads * kElementsPerThread * 4;
constexpr int kTensorsPerLaunch = 48;  // a kernel's parameters are at most 4 KB

struct Batch {
  PyruntimeAdamwTensor tensors[kTensorsPerLaunch];
  int32_t first_block[kTensorsPerLaunch + 1];  // of work
  int32_t count;
  PyruntimeAdamwOptions options;
  const PyruntimeAdamwOptions* device_options;
  const float* grad_scale;
};
static_assert(sizeof(Batch) <= 4000);

struct Constants {
  float beta1, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, root_correction, grad_scale;
  double lr;
};

// In fp64, as on the CPU: 1 - b2^t loses most of its digits in fp32.
PYRUNTIME_DEVICE Constants constants_of(const PyruntimeAdamwOptions& o, float grad_scale) {
  const double correction1 = 1 - pow(o.beta1, static_cast<double>(o.step));
  const double correction2 = 1 - pow(o.beta2, static_cast<double>(o.step));
  return {static_cast<float>(o.beta1),
          static_cast<float>(1 - o.beta1),
          static_cast<float>(o.beta2),
          static_cast<float>(1 - o.beta2),
          static_cast<float>(o.eps),
          static_cast<float>(o.lr / correction1),
          static_cast<float>(1 / sqrt(correction2)),
          grad_scale,
          o.lr};
}

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T values[kCount];
};

template <class T, int kCount>
PYRUNTIME_DEVICE Pack<T, kCount>& pack(T* p) {
  return *reinterpret_cast<Pack<T, kCount>*>(p);
}

// As one access where it is of 8 or 16 bytes; nvcc splits an assignment into one for each element.
template <class T, int kCount>
PYRUNTIME_DEVICE void store_pack(T* p, const Pack<T, kCount>& values) {
  if constexpr (sizeof(values) == 16) {
    uint4 bits;
    device::copy_bits(&bits, &values, sizeof(bits));
    device::store_global(p, bits);
  } else if constexpr (sizeof(values) == 8) {
    uint64_t bits;
    device::copy_bits(&bits, &values, sizeof(bits));
    *reinterpret_cast<uint64_t*>(p) = bits;
  } else {
    pack<T, kCount>(p) = values;
  }
}

// kCount elements from i on.
template <class P, class G, int kCount>
PYRUNTIME_DEVICE void update(const PyruntimeAdamwTensor& tensor, const Constants& c, float keep, int64_t i) {
  const auto grad = *reinterpret_cast<const Pack<G, kCount>*>(static_cast<const G*>(tensor.grad) + i);
  auto master = pack<float, kCount>(tensor.master + i);
  auto exp_avg = pack<float, kCount>(tensor.exp_avg + i);
  auto exp_avg_sq = pack<float, kCount>(tensor.exp_avg_sq + i);
  Pack<P, kCount> rounded;
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    const float g = to_float(grad.values[e]) * c.grad_scale;
    const float m = c.beta1 * exp_avg.values[e] + c.one_minus_beta1 * g;
    const float v = c.beta2 * exp_avg_sq.values[e] + c.one_minus_beta2 * (g * g);
    exp_avg.values[e] = m;
    exp_avg_sq.values[e] = v;
    master.values[e] = master.values[e] * keep - c.step_size * m / (sqrtf(v) * c.root_correction + c.eps);
    rounded.values[e] = round_to<P>(master.values[e]);
  }
  store_pack(tensor.exp_avg + i, exp_avg);
  store_pack(tensor.exp_avg_sq + i, exp_avg_sq);
  store_pack(tensor.master + i, master);
  if (tensor.param != nullptr) store_pack(static_cast<P*>(tensor.param) + i, rounded);
}

PYRUNTIME_DEVICE bool takes_packs(const PyruntimeAdamwTensor& tensor) {
  return is_aligned(tensor.master) && is_aligned(tensor.grad) && is_aligned(tensor.exp_avg) &&
         is_aligned(tensor.exp_avg_sq) && is_aligned(tensor.param);
}

template <class P, class G>
PYRUNTIME_KERNEL(kThreads, 2)
adamw_step(PYRUNTIME_PARAMETER Batch parameter) {
  const Batch& batch = device::first_parameter(parameter);
  const PyruntimeAdamwOptions options =
      batch.device_options != nullptr ? *batch.device_options : batch.options;
  const float grad_scale = batch.grad_scale != nullptr ? *batch.grad_scale : 1.0f;
  if (grad_scale != grad_scale) return;  // NaN: the gradients are of no use, which the host need not know yet
  const Constants c = constants_of(options, grad_scale);
  int t = 0;
  for (int block = blockIdx.x; block < batch.first_block[batch.count]; block += gridDim.x) {
    while (block >= batch.first_block[t + 1]) ++t;
    const PyruntimeAdamwTensor& tensor = batch.tensors[t];
    const auto keep = static_cast<float>(1 - c.lr * tensor.weight_decay);
    const int64_t begin = (block - batch.first_block[t]) * kElementsPerBlock;
    const int64_t end = begin + kElementsPerBlock < tensor.count ? begin + kElementsPerBlock : tensor.count;
    const int64_t packed =
        takes_packs(tensor) ? begin + (end - begin) / kElementsPerThread * kElementsPerThread : begin;
    for (int64_t i = begin + threadIdx.x * kElementsPerThread; i < packed;
         i += kThreads * kElementsPerThread) {
      update<P, G, kElementsPerThread>(tensor, c, keep, i);
    }
    for (int64_t i = packed + threadIdx.x; i < end; i += kThreads) update<P, G, 1>(tensor, c, keep, i);
  }
}

template <class P, class G>
void launch(const Batch& batch, void* stream) {
  const auto kernel = adamw_step<P, G>;
  PYRUNTIME_LAUNCH(kernel, blocks_for(batch.first_block[batch.count], 0, 4), kThreads, 0, stream, batch);
}

void check_options(const PyruntimeAdamwOptions& o) {
  require(std::isfinite(o.lr) && o.lr >= 0, "lr=", o.lr, "; it must be finite and not negative.");
  require(o.beta1 >= 0 && o.beta1 < 1 && o.beta2 >= 0 && o.beta2 < 1, "beta1=", o.beta1, ", beta2=", o.beta2,
          "; both must be in [0, 1).");
  require(std::isfinite(o.eps) && o.eps >= 0, "eps=", o.eps, "; it must be finite and not negative.");
  require(o.step >= 1, "step=", o.step, "; the first step is 1.");
}

void check_tensor(int index, const PyruntimeAdamwTensor& tensor) {
  require(tensor.count >= 0 && tensor.count < int64_t{1} << 40, "tensor ", index, " has ", tensor.count,
          " elements; it may have 0 to 2^40.");
  require(tensor.count == 0 || (tensor.master != nullptr && tensor.grad != nullptr &&
                                tensor.exp_avg != nullptr && tensor.exp_avg_sq != nullptr),
          "tensor ", index, " has a null pointer among master, grad, exp_avg and exp_avg_sq.");
}

}  // namespace

int pyruntime_adamw(const PyruntimeAdamwTensor* tensors, int32_t count_of_tensors, int32_t param_dtype,
                    int32_t grad_dtype, const PyruntimeAdamwOptions* options,
                    const PyruntimeAdamwOptions* device_options, const float* grad_scale, void* stream) {
  return guarded("adamw", [&] {
    check_dtype(param_dtype, /*with_fp32=*/false);
    check_dtype(grad_dtype, /*with_fp32=*/true);
    require(options != nullptr || device_options != nullptr, "there are no options.");
    if (options != nullptr) check_options(*options);
    require(count_of_tensors >= 0 && (tensors != nullptr || count_of_tensors == 0), "a list of ",
            count_of_tensors, " tensors at a null pointer.");
    for (int t = 0; t < count_of_tensors; ++t)
      check_tensor(t, tensors[t]);  // all, before anything is written
    Batch batch{};
    if (options != nullptr) batch.options = *options;
    batch.device_options = device_options;
    batch.grad_scale = grad_scale;
    const auto flush = [&] {
      if (batch.count == 0) return;
      with_half(param_dtype, [&](auto param) {
        with_element(grad_dtype, [&](auto grad) { launch<decltype(param), decltype(grad)>(batch, stream); });
      });
      batch.count = 0;
    };
    for (int t = 0; t < count_of_tensors; ++t) {
      const int64_t blocks = (tensors[t].count + kElementsPerBlock - 1) / kElementsPerBlock;
      const bool full =
          batch.count == kTensorsPerLaunch || batch.first_block[batch.count] + blocks >= int64_t{1} << 31;
      if (full) flush();
      batch.tensors[batch.count] = tensors[t];
      batch.first_block[batch.count + 1] = batch.first_block[batch.count] + static_cast<int32_t>(blocks);
      ++batch.count;
    }
    flush();
  });
}
