// Loads and stores a few elements of a row as floats for the layer kernels, with 16-byte accesses if aligned.
#pragma once

#include "cuda/portable/numbers.cuh"

namespace pyruntime::portable {

// kCount is 1, or a multiple of the elements of a 16-byte access; then p must be aligned.
template <int kCount, class T>
PYRUNTIME_DEVICE void load_floats(const T* p, float (&values)[kCount]) {
  constexpr int kWide = Vector<T>::kCount;
  if constexpr (kCount % kWide == 0) {
#pragma unroll
    for (int part = 0; part < kCount; part += kWide) {
      const Vector<T> vector = load_vector(p + part);
#pragma unroll
      for (int e = 0; e < kWide; ++e) values[part + e] = to_float(vector.values[e]);
    }
  } else {
    static_assert(kCount == 1);
    values[0] = to_float(p[0]);
  }
}

// The same for stores; each value is rounded once.
template <int kCount, class T>
PYRUNTIME_DEVICE void store_floats(T* p, const float (&values)[kCount]) {
  constexpr int kWide = Vector<T>::kCount;
  if constexpr (kCount % kWide == 0) {
#pragma unroll
    for (int part = 0; part < kCount; part += kWide) {
      Vector<T> vector;
#pragma unroll
      for (int e = 0; e < kWide; ++e) vector.values[e] = round_to<T>(values[part + e]);
      device::store_global(p + part, bits_of(vector));
    }
  } else {
    static_assert(kCount == 1);
    p[0] = round_to<T>(values[0]);
  }
}

struct Split {
  int64_t quotient, remainder;
};

// Avoids 64-bit divisions, which are long loops on a GPU and hardly ever needed.
PYRUNTIME_DEVICE Split split(int64_t index, int64_t by) {
  if (((index | by) >> 32) == 0) {
    const auto i = static_cast<uint32_t>(index), n = static_cast<uint32_t>(by);
    return {i / n, i % n};
  }
  return {index / by, index % by};
}

// Whether rows of T, `pitch` elements apart, all begin at multiples of 16 bytes.
template <class T>
bool rows_are_aligned(const void* first, int64_t pitch) {
  return is_aligned(first) && pitch % Vector<T>::kCount == 0;
}

}  // namespace pyruntime::portable
