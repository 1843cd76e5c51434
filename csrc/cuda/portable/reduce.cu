#include "checks.h"
#include "numbers.cuh"

using namespace pyruntime;
using namespace pyruntime::portable;

namespace {

constexpr int kThreads = 256;

// Parts that lie anywhere.
struct ListedParts {
  const void* of[PYRUNTIME_MOST_RANKS];
  int count;

  PYRUNTIME_DEVICE const void* at(int p) const { return of[p]; }
};

// Any number of parts: part p lies `p * distance` behind `first`, but for part `other`.
struct SpacedParts {
  uintptr_t first;
  int64_t distance;
  const void* of_other;
  int other;
  int count;

  PYRUNTIME_DEVICE const void* at(int p) const {
    return p == other ? of_other : reinterpret_cast<const void*>(first + p * distance);
  }
};

template <class T, class Parts>
PYRUNTIME_DEVICE T reduced(const Parts& parts, int64_t i, const T* bias, int64_t width) {
  float sum = 0.0f;
  for (int p = 0; p < parts.count; ++p) sum += to_float(static_cast<const T*>(parts.at(p))[i]);
  if (bias != nullptr) sum += to_float(bias[i % width]);
  return round_to<T>(sum);
}

// Sums the first `vectors` vectors whole, then the remaining elements one by one.
template <class T, class Parts>
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
      const Vector<T> one = load_vector_streaming(static_cast<const T*>(parts.at(p)) + v * kCount);
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

template <class T, class Parts>
void launch(void* out, const Parts& parts, bool aligned, int64_t count, const void* bias, int64_t width,
            int32_t most_blocks, void* stream) {
  const int64_t vectors = aligned ? count / Vector<T>::kCount : 0;
  const auto kernel = reduce_parts<T, Parts>;
  const int64_t work = aligned ? vectors / kThreads + 1 : count / kThreads + 1;
  PYRUNTIME_LAUNCH(kernel, blocks_for(work, most_blocks, 8), kThreads, 0, stream, parts, static_cast<T*>(out),
                   count, vectors, static_cast<const T*>(bias), width);
}

// Whether part p lies `p * found.distance` behind `found.first` for all p but one, which it notes.
bool is_spaced(const void* const* parts, SpacedParts& found) {
  found.other = -1;
  found.of_other = nullptr;
  for (int p = 0; p < found.count; ++p) {
    if (reinterpret_cast<uintptr_t>(parts[p]) == found.first + p * found.distance) continue;
    if (found.other >= 0) return false;
    found.other = p;
    found.of_other = parts[p];
  }
  return true;
}

// If at most one part lies elsewhere, it is not among the first two or not among the last two.
SpacedParts spaced(const void* const* parts, int count) {
  SpacedParts found{};
  found.count = count;
  for (const int p : {0, count - 2}) {
    const auto one = reinterpret_cast<uintptr_t>(parts[p]), next = reinterpret_cast<uintptr_t>(parts[p + 1]);
    found.distance = static_cast<int64_t>(next - one);
    found.first = one - p * found.distance;
    if (is_spaced(parts, found)) return found;
  }
  require(false, count, " parts, which may be ", +PYRUNTIME_MOST_RANKS,
          " or must lie at equal distances, but for one.");
  return found;
}

}  // namespace

int pyruntime_reduce(void* out, const void* const* parts, int32_t count_of_parts, int64_t count,
                     int32_t dtype, const void* bias, int64_t width, int32_t most_blocks, void* stream) {
  return guarded("reduce", [&] {
    check_dtype(dtype, /*with_fp32=*/true);
    require(count_of_parts >= 1, count_of_parts, " parts; there must be one at least.");
    require(count >= 0, "count=", count, "; it must not be negative.");
    require(most_blocks >= 0, "most_blocks=", most_blocks, "; it must not be negative.");
    require(bias == nullptr || width >= 1, "width=", width, "; a bias has at least one element.");
    if (count == 0) return;
    require(out != nullptr && parts != nullptr, "the result or the list of parts is a null pointer.");
    bool aligned = is_aligned(out);
    for (int p = 0; p < count_of_parts; ++p) {
      require(parts[p] != nullptr, "part ", p, " is a null pointer.");
      aligned = aligned && is_aligned(parts[p]);
    }
    const auto launched = [&](const auto& where) {
      with_element(dtype, [&](auto element) {
        launch<decltype(element)>(out, where, aligned, count, bias, width, most_blocks, stream);
      });
    };
    if (count_of_parts > PYRUNTIME_MOST_RANKS) return launched(spaced(parts, count_of_parts));
    ListedParts list{};
    for (int p = 0; p < count_of_parts; ++p) list.of[list.count++] = parts[p];
    launched(list);
  });
}
