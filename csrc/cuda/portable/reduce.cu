#include "checks.h"
#include "numbers.cuh"

using namespace pyruntime;
using namespace pyruntime::portable;

namespace {

constexpr int kThreads = 256;

struct Parts {
  const void* of[PYRUNTIME_MOST_RANKS];
  int count;
};

template <class T>
PYRUNTIME_DEVICE T reduced(const Parts& parts, int64_t i, const T* bias, int64_t width) {
  float sum = 0.0f;
  for (int p = 0; p < parts.count; ++p) sum += to_float(static_cast<const T*>(parts.of[p])[i]);
  if (bias != nullptr) sum += to_float(bias[i % width]);
  return round_to<T>(sum);
}

// Sums the first `vectors` vectors whole, then the remaining elements one by one.
template <class T>
PYRUNTIME_KERNEL(kThreads, 2)
reduce_parts(PYRUNTIME_PARAMETER Parts parameter, T* out, int64_t count, int64_t vectors, const T* bias,
             int64_t width) {
  const Parts& parts = device::first_parameter(parameter);
  constexpr int kCount = Vector<T>::kCount;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (int64_t v = thread; v < vectors; v += stride) {
    float sums[kCount] = {};
#pragma unroll 4  // loads of several ranks under way at once; they are added in rank order
    for (int p = 0; p < parts.count; ++p) {
      const Vector<T> one = load_vector_streaming(static_cast<const T*>(parts.of[p]) + v * kCount);
#pragma unroll
      for (int e = 0; e < kCount; ++e) sums[e] += to_float(one.values[e]);
    }
    Vector<T> rounded;
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      if (bias != nullptr) sums[e] += to_float(bias[(v * kCount + e) % width]);
      rounded.values[e] = round_to<T>(sums[e]);
    }
    store_vector(out + v * kCount, rounded);
  }
  for (int64_t i = vectors * kCount + thread; i < count; i += stride) out[i] = reduced(parts, i, bias, width);
}

template <class T>
void launch(void* out, const Parts& parts, int64_t count, const void* bias, int64_t width, void* stream) {
  bool aligned = is_aligned(out);
  for (int p = 0; p < parts.count; ++p) aligned = aligned && is_aligned(parts.of[p]);
  const int64_t vectors = aligned ? count / Vector<T>::kCount : 0;
  const auto kernel = reduce_parts<T>;
  const int64_t work = aligned ? vectors / kThreads + 1 : count / kThreads + 1;
  PYRUNTIME_LAUNCH(kernel, blocks_for(work, 0, 8), kThreads, 0, stream, parts, static_cast<T*>(out), count,
                   vectors, static_cast<const T*>(bias), width);
}

}  // namespace

int pyruntime_reduce(void* out, const void* const* parts, int32_t count_of_parts, int64_t count,
                     int32_t dtype, const void* bias, int64_t width, void* stream) {
  return guarded("reduce", [&] {
    check_dtype(dtype, /*with_fp32=*/true);
    require(count_of_parts >= 1 && count_of_parts <= PYRUNTIME_MOST_RANKS, count_of_parts,
            " parts; there may be 1 to ", PYRUNTIME_MOST_RANKS, ".");
    require(count >= 0, "count=", count, "; it must not be negative.");
    require(bias == nullptr || width >= 1, "width=", width, "; a bias has at least one element.");
    if (count == 0) return;
    require(out != nullptr && parts != nullptr, "the result or the list of parts is a null pointer.");
    Parts list{};
    for (int p = 0; p < count_of_parts; ++p) {
      require(parts[p] != nullptr, "part ", p, " is a null pointer.");
      list.of[list.count++] = parts[p];
    }
    with_element(dtype,
                 [&](auto element) { launch<decltype(element)>(out, list, count, bias, width, stream); });
  });
}
