// AdamW (Loshchilov and Hutter 2019, algorithm 2) on a list of tensors, in one pass over each, with the
// equations of csrc/cpu/layers/adamw.cpp:
//
//   g = grad * grad_scale      m = b1 m + (1 - b1) g      v = b2 v + (1 - b2) g^2
//   p = p (1 - lr * decay) - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
//
// State, master and arithmetic are fp32; the parameter is the rounded master. A bf16 parameter without master
// is rounded at random, by the CPU path's random numbers. adamw_ahead writes what a step would make of the
// parameters; the sums are explicit fused multiply-adds, so that each kernel computes the same bits.
#include <algorithm>

#include "cuda/portable/checks.h"
#include "cuda/portable/numbers.cuh"

using namespace pyruntime;
using namespace pyruntime::portable;

namespace {

constexpr int kThreads = 256;
constexpr int kElementsPerThread = 4;  // 16-byte accesses of fp32
constexpr int64_t kElementsPerBlock = kThreads * kElementsPerThread * 4;
// A kernel's parameters are at most 4 KB.
template <class Tensor>
constexpr int kTensorsPerLaunch = sizeof(Tensor) > 64 ? 40 : 48;

template <class Tensor>
struct Batch {
  static constexpr int kMost = kTensorsPerLaunch<Tensor>;
  Tensor tensors[kMost];
  int32_t first_block[kMost + 1];  // first block of work of each tensor
  int32_t count;
  PyruntimeAdamwOptions options;
};

struct Steps : Batch<PyruntimeAdamwTensor> {
  const PyruntimeAdamwOptions* device_options;
  const float* grad_scale;
};

struct StepsAhead : Batch<PyruntimeAdamwAhead> {
  PyruntimeAdamwOptions earlier;
  float grad_scale;
};
static_assert(sizeof(Steps) <= 4000 && sizeof(StepsAhead) <= 4000);

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

// Stores 8 or 16 bytes as one access; nvcc splits an assignment into one for each element.
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

// Returns the new value of one element and updates its moments.
PYRUNTIME_DEVICE float updated(const Constants& c, float keep, float value, float grad, float& exp_avg,
                               float& exp_avg_sq) {
  const float g = grad * c.grad_scale;
  exp_avg = fmaf(c.beta1, exp_avg, c.one_minus_beta1 * g);
  exp_avg_sq = fmaf(c.beta2, exp_avg_sq, c.one_minus_beta2 * (g * g));
  return fmaf(value, keep, -(c.step_size * exp_avg / fmaf(sqrtf(exp_avg_sq), c.root_correction, c.eps)));
}

PYRUNTIME_DEVICE float keep_of(const Constants& c, const PyruntimeAdamwTensor& tensor) {
  return static_cast<float>(1 - c.lr * tensor.weight_decay);
}

// Updates kCount elements of a tensor with master from i on.
template <class P, class G, int kCount>
PYRUNTIME_DEVICE void update(const PyruntimeAdamwTensor& tensor, const Constants& c, float keep, int64_t i) {
  const auto grad = *reinterpret_cast<const Pack<G, kCount>*>(static_cast<const G*>(tensor.grad) + i);
  auto master = pack<float, kCount>(tensor.master + i);
  auto exp_avg = pack<float, kCount>(tensor.exp_avg + i);
  auto exp_avg_sq = pack<float, kCount>(tensor.exp_avg_sq + i);
  Pack<P, kCount> rounded;
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    master.values[e] =
        updated(c, keep, master.values[e], to_float(grad.values[e]), exp_avg.values[e], exp_avg_sq.values[e]);
    rounded.values[e] = round_to<P>(master.values[e]);
  }
  store_pack(tensor.exp_avg + i, exp_avg);
  store_pack(tensor.exp_avg_sq + i, exp_avg_sq);
  store_pack(tensor.master + i, master);
  if (tensor.param != nullptr) store_pack(static_cast<P*>(tensor.param) + i, rounded);
}

// The same without master, rounded at random. `to`: where the new values go.
template <class G, int kCount, bool kKeepsMoments>
PYRUNTIME_DEVICE void update_at_random(const PyruntimeAdamwTensor& tensor, const Constants& c, float keep,
                                       int64_t i, void* to) {
  const auto grad = *reinterpret_cast<const Pack<G, kCount>*>(static_cast<const G*>(tensor.grad) + i);
  auto param = pack<Bf16, kCount>(static_cast<Bf16*>(tensor.param) + i);
  auto exp_avg = pack<float, kCount>(tensor.exp_avg + i);
  auto exp_avg_sq = pack<float, kCount>(tensor.exp_avg_sq + i);
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    const float value = updated(c, keep, to_float(param.values[e]), to_float(grad.values[e]),
                                exp_avg.values[e], exp_avg_sq.values[e]);
    const auto index = tensor.first + static_cast<uint32_t>(i + e);
    param.values[e] = round_at_random(value, random_bits(tensor.seed, index));
  }
  if constexpr (!kKeepsMoments) {
    store_pack(tensor.exp_avg + i, exp_avg);
    store_pack(tensor.exp_avg_sq + i, exp_avg_sq);
  }
  store_pack(static_cast<Bf16*>(to) + i, param);
}

// Writes what the step would make of kCount elements, after the step before if its gradient is there.
template <class P, class G, int kCount>
PYRUNTIME_DEVICE void update_ahead(const PyruntimeAdamwAhead& of, const Constants& c, float keep,
                                   const Constants& earlier, float earlier_keep, int64_t i) {
  const PyruntimeAdamwTensor& tensor = of.tensor;
  const auto grad = *reinterpret_cast<const Pack<G, kCount>*>(static_cast<const G*>(tensor.grad) + i);
  auto master = pack<float, kCount>(tensor.master + i);
  auto exp_avg = pack<float, kCount>(tensor.exp_avg + i);
  auto exp_avg_sq = pack<float, kCount>(tensor.exp_avg_sq + i);
  if (of.earlier_grad != nullptr) {
    const auto before = *reinterpret_cast<const Pack<G, kCount>*>(static_cast<const G*>(of.earlier_grad) + i);
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      master.values[e] = updated(earlier, earlier_keep, master.values[e], to_float(before.values[e]),
                                 exp_avg.values[e], exp_avg_sq.values[e]);
    }
    store_pack(tensor.exp_avg + i, exp_avg);
    store_pack(tensor.exp_avg_sq + i, exp_avg_sq);
    store_pack(tensor.master + i, master);
  }
  Pack<P, kCount> ahead;
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    ahead.values[e] = round_to<P>(updated(c, keep, master.values[e], to_float(grad.values[e]),
                                          exp_avg.values[e], exp_avg_sq.values[e]));
  }
  store_pack(static_cast<P*>(of.ahead) + i, ahead);
}

PYRUNTIME_DEVICE bool takes_packs(const PyruntimeAdamwTensor& tensor) {
  return is_aligned(tensor.master) && is_aligned(tensor.grad) && is_aligned(tensor.exp_avg) &&
         is_aligned(tensor.exp_avg_sq) && is_aligned(tensor.param);
}

PYRUNTIME_DEVICE bool takes_packs(const PyruntimeAdamwAhead& of) {
  return takes_packs(of.tensor) && is_aligned(of.ahead) && is_aligned(of.earlier_grad);
}

PYRUNTIME_HOST_DEVICE int64_t count_of(const PyruntimeAdamwTensor& tensor) {
  return tensor.count;
}

PYRUNTIME_HOST_DEVICE int64_t count_of(const PyruntimeAdamwAhead& of) {
  return of.tensor.count;
}

template <int kCount>
struct Elements {
  static constexpr int value = kCount;
};

// Calls of(tensor)(i, Elements<n>{}) for n elements from i on, of all tensors.
template <class Tensor, class Of>
PYRUNTIME_DEVICE void for_elements(const Batch<Tensor>& batch, const Of& of) {
  int t = 0;
  for (int block = blockIdx.x; block < batch.first_block[batch.count]; block += gridDim.x) {
    while (block >= batch.first_block[t + 1]) ++t;
    const Tensor& tensor = batch.tensors[t];
    const auto work = of(tensor);
    const int64_t count = count_of(tensor);
    const int64_t begin = (block - batch.first_block[t]) * kElementsPerBlock;
    const int64_t end = begin + kElementsPerBlock < count ? begin + kElementsPerBlock : count;
    const int64_t packed =
        takes_packs(tensor) ? begin + (end - begin) / kElementsPerThread * kElementsPerThread : begin;
    for (int64_t i = begin + threadIdx.x * kElementsPerThread; i < packed;
         i += kThreads * kElementsPerThread) {
      work(i, Elements<kElementsPerThread>{});
    }
    for (int64_t i = packed + threadIdx.x; i < end; i += kThreads) work(i, Elements<1>{});
  }
}

// The constants of a step, by what the kernel's parameter says; grad_scale is NaN if nothing is to be
// updated.
PYRUNTIME_DEVICE Constants constants_of(const Steps& batch) {
  return constants_of(batch.device_options != nullptr ? *batch.device_options : batch.options,
                      batch.grad_scale != nullptr ? *batch.grad_scale : 1.0f);
}

template <class P, class G>
PYRUNTIME_KERNEL(kThreads, 2)
adamw_step(PYRUNTIME_PARAMETER Steps parameter) {
  const Steps& batch = device::first_parameter(parameter);
  const Constants c = constants_of(batch);
  if (c.grad_scale != c.grad_scale) return;  // the gradients are unusable, and the host need not know yet
  for_elements(batch, [&](const PyruntimeAdamwTensor& tensor) {
    const float keep = keep_of(c, tensor);
    return
        [&, keep](int64_t i, auto elements) { update<P, G, decltype(elements)::value>(tensor, c, keep, i); };
  });
}

template <class G>
PYRUNTIME_KERNEL(kThreads, 2)
adamw_at_random(PYRUNTIME_PARAMETER Steps parameter) {
  const Steps& batch = device::first_parameter(parameter);
  const Constants c = constants_of(batch);
  if (c.grad_scale != c.grad_scale) return;
  for_elements(batch, [&](const PyruntimeAdamwTensor& tensor) {
    const float keep = keep_of(c, tensor);
    return [&, keep](int64_t i, auto elements) {
      update_at_random<G, decltype(elements)::value, false>(tensor, c, keep, i, tensor.param);
    };
  });
}

template <class P, class G>
PYRUNTIME_KERNEL(kThreads, 2)
adamw_ahead(PYRUNTIME_PARAMETER StepsAhead parameter) {
  const StepsAhead& batch = device::first_parameter(parameter);
  const Constants c = constants_of(batch.options, batch.grad_scale);
  const Constants earlier = constants_of(batch.earlier, batch.grad_scale);
  for_elements(batch, [&](const PyruntimeAdamwAhead& of) {
    const float keep = keep_of(c, of.tensor), earlier_keep = keep_of(earlier, of.tensor);
    return [&, keep, earlier_keep](int64_t i, auto elements) {
      update_ahead<P, G, decltype(elements)::value>(of, c, keep, earlier, earlier_keep, i);
    };
  });
}

template <class G>
PYRUNTIME_KERNEL(kThreads, 2)
adamw_ahead_at_random(PYRUNTIME_PARAMETER StepsAhead parameter) {
  const StepsAhead& batch = device::first_parameter(parameter);
  const Constants c = constants_of(batch.options, batch.grad_scale);
  for_elements(batch, [&](const PyruntimeAdamwAhead& of) {
    const float keep = keep_of(c, of.tensor);
    return [&, keep](int64_t i, auto elements) {
      update_at_random<G, decltype(elements)::value, true>(of.tensor, c, keep, i, of.ahead);
    };
  });
}

void check_options(const PyruntimeAdamwOptions& o) {
  require(std::isfinite(o.lr) && o.lr >= 0, "lr=", o.lr, "; it must be finite and not negative.");
  require(o.beta1 >= 0 && o.beta1 < 1 && o.beta2 >= 0 && o.beta2 < 1, "beta1=", o.beta1, ", beta2=", o.beta2,
          "; both must be in [0, 1).");
  require(std::isfinite(o.eps) && o.eps >= 0, "eps=", o.eps, "; it must be finite and not negative.");
  require(o.step >= 1, "step=", o.step, "; the first step is 1.");
}

void check_tensor(int index, const PyruntimeAdamwTensor& tensor, bool has_master) {
  require(tensor.count >= 0 && tensor.count < int64_t{1} << 40, "tensor ", index, " has ", tensor.count,
          " elements; it may have 0 to 2^40.");
  if (tensor.count == 0) return;
  require(tensor.grad != nullptr && tensor.exp_avg != nullptr && tensor.exp_avg_sq != nullptr, "tensor ",
          index, " has a null pointer among grad, exp_avg and exp_avg_sq.");
  require((tensor.master != nullptr) == has_master, "tensor ", index, " has ", has_master ? "no" : "a",
          " master, unlike the first one.");
  require(has_master || tensor.param != nullptr, "tensor ", index, " has neither a master nor a param.");
}

void check_tensor(int index, const PyruntimeAdamwAhead& of, bool has_master) {
  check_tensor(index, of.tensor, has_master);
  require(of.tensor.count == 0 || of.ahead != nullptr, "tensor ", index,
          " has no memory for its values ahead.");
  require(of.earlier_grad == nullptr || has_master, "tensor ", index,
          " has an earlier gradient and no master; update it when its step counts.");
}

bool has_master(const PyruntimeAdamwTensor& tensor) {
  return tensor.master != nullptr;
}

bool has_master(const PyruntimeAdamwAhead& of) {
  return has_master(of.tensor);
}

// Checks all tensors, before anything is written. Returns whether they have masters; all do, or none.
template <class Tensor>
bool check_tensors(const Tensor* tensors, int32_t count, int32_t param_dtype) {
  require(count >= 0 && (tensors != nullptr || count == 0), "a list of ", count,
          " tensors at a null pointer.");
  const auto* end = tensors + count;
  const auto* first = std::find_if(tensors, end, [](const Tensor& each) { return count_of(each) != 0; });
  const bool with_masters = first == end || has_master(*first);
  for (int t = 0; t < count; ++t) check_tensor(t, tensors[t], with_masters);
  require(with_masters || param_dtype == PYRUNTIME_BF16,
          "the tensors have no masters, and only bf16 is rounded at random.");
  return with_masters;
}

// Calls launch() with `batch` full of tensors, until all are taken.
template <class Tensor, class Launch>
void in_batches(Batch<Tensor>& batch, const Tensor* tensors, int32_t count, const Launch& launch) {
  const auto flush = [&] {
    if (batch.first_block[batch.count] > 0) launch();
    batch.count = 0;
  };
  for (int t = 0; t < count; ++t) {
    const int64_t blocks = (count_of(tensors[t]) + kElementsPerBlock - 1) / kElementsPerBlock;
    if (batch.count == batch.kMost || batch.first_block[batch.count] + blocks >= int64_t{1} << 31) flush();
    batch.tensors[batch.count] = tensors[t];
    batch.first_block[batch.count + 1] = batch.first_block[batch.count] + static_cast<int32_t>(blocks);
    ++batch.count;
  }
  flush();
}

template <class Tensor>
int blocks_of(const Batch<Tensor>& batch) {
  return blocks_for(batch.first_block[batch.count], 0, 4);
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
    const bool with_masters = check_tensors(tensors, count_of_tensors, param_dtype);
    Steps batch{};
    if (options != nullptr) batch.options = *options;
    batch.device_options = device_options;
    batch.grad_scale = grad_scale;
    in_batches(batch, tensors, count_of_tensors, [&] {
      with_half(param_dtype, [&](auto param) {
        with_element(grad_dtype, [&](auto grad) {
          const auto kernel =
              with_masters ? adamw_step<decltype(param), decltype(grad)> : adamw_at_random<decltype(grad)>;
          PYRUNTIME_LAUNCH(kernel, blocks_of(batch), kThreads, 0, stream, batch);
        });
      });
    });
  });
}

int pyruntime_adamw_ahead(const PyruntimeAdamwAhead* tensors, int32_t count_of_tensors, int32_t param_dtype,
                          int32_t grad_dtype, const PyruntimeAdamwOptions* options,
                          const PyruntimeAdamwOptions* earlier, float grad_scale, void* stream) {
  return guarded("adamw_ahead", [&] {
    check_dtype(param_dtype, /*with_fp32=*/true);
    check_dtype(grad_dtype, /*with_fp32=*/true);
    require(options != nullptr, "there are no options.");
    check_options(*options);
    const bool with_masters = check_tensors(tensors, count_of_tensors, param_dtype);
    if (earlier != nullptr) check_options(*earlier);
    for (int t = 0; t < count_of_tensors; ++t) {
      require(earlier != nullptr || tensors[t].earlier_grad == nullptr, "tensor ", t,
              " has an earlier gradient, and there are no options of the step before.");
    }
    StepsAhead batch{};
    batch.options = *options;
    batch.earlier = earlier != nullptr ? *earlier : *options;
    batch.grad_scale = grad_scale;
    in_batches(batch, tensors, count_of_tensors, [&] {
      with_element(param_dtype, [&](auto param) {
        with_element(grad_dtype, [&](auto grad) {
          const auto kernel = with_masters ? adamw_ahead<decltype(param), decltype(grad)>
                                           : adamw_ahead_at_random<decltype(grad)>;
          PYRUNTIME_LAUNCH(kernel, blocks_of(batch), kThreads, 0, stream, batch);
        });
      });
    });
  });
}
