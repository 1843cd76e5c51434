// bf16 and fp16 as 16 bits, with our own rounding of bf16. The dialects' types differ in names, headers and
// the NaN they produce, and ranks on different devices must round alike (to nearest even, NaN to 0x7fc0, as
// on the CPU path).
#pragma once

#if !defined(__CUDACC_RTC__)
#include <cstdint>
#endif

#include "cuda/compat.h"

namespace pyruntime::portable {

struct Bf16 {
  uint16_t bits;
};

struct Fp16 {
  uint16_t bits;
};

PYRUNTIME_DEVICE float to_float(Bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  device::copy_bits(&value, &bits, sizeof(value));
  return value;
}

PYRUNTIME_DEVICE float to_float(Fp16 x) {
  return device::half_to_float(x.bits);
}

PYRUNTIME_DEVICE float to_float(float x) {
  return x;
}

template <class T>
PYRUNTIME_DEVICE T round_to(float value);

template <>
PYRUNTIME_DEVICE Bf16 round_to<Bf16>(float value) {
  uint32_t bits;
  device::copy_bits(&bits, &value, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return {static_cast<uint16_t>(value != value ? 0x7fc0u : rounded)};
}

template <>
PYRUNTIME_DEVICE Fp16 round_to<Fp16>(float value) {
  return {device::float_to_half(value)};
}

template <>
PYRUNTIME_DEVICE float round_to<float>(float value) {
  return value;
}

// Returns a uniform number for each (seed, index), that of csrc/cpu/layers/simd.h: the finaliser of
// MurmurHash3 (Appleby), twice.
PYRUNTIME_DEVICE uint32_t random_bits(uint32_t seed, uint32_t index) {
  uint32_t x = index * 0x9e3779b9u + seed;
  for (int round = 0; round < 2; ++round) {
    x ^= x >> 16;
    x *= 0x85ebca6bu;
    x ^= x >> 13;
    x *= 0xc2b2ae35u;
    x ^= x >> 16;
  }
  return x;
}

// Rounds up or down with probabilities that make the mean exact, by the low 16 bits of `random`. Infinity and
// NaN are kept.
PYRUNTIME_DEVICE Bf16 round_at_random(float value, uint32_t random) {
  uint32_t bits;
  device::copy_bits(&bits, &value, sizeof(bits));
  const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
  const uint32_t rounded = (bits + (finite ? random & 0xffffu : 0u)) >> 16;
  return {static_cast<uint16_t>(value != value ? 0x7fc0u : rounded)};
}

// The elements of one 16-byte access.
template <class T>
struct alignas(16) Vector {
  static constexpr int kCount = 16 / sizeof(T);
  T values[kCount];
};

template <class T>
PYRUNTIME_DEVICE Vector<T> load_vector(const T* p) {
  const uint4 bits = *reinterpret_cast<const uint4*>(p);
  Vector<T> vector;
  device::copy_bits(&vector, &bits, sizeof(vector));
  return vector;
}

// For memory that another rank wrote.
template <class T>
PYRUNTIME_DEVICE Vector<T> load_vector_streaming(const T* p) {
  const uint4 bits = device::load_streaming(p);
  Vector<T> vector;
  device::copy_bits(&vector, &bits, sizeof(vector));
  return vector;
}

template <class T>
PYRUNTIME_DEVICE uint4 bits_of(const Vector<T>& vector) {
  uint4 bits;
  device::copy_bits(&bits, &vector, sizeof(bits));
  return bits;
}

template <class T>
PYRUNTIME_DEVICE void store_vector(T* p, const Vector<T>& vector) {
  *reinterpret_cast<uint4*>(p) = bits_of(vector);
}

PYRUNTIME_HOST_DEVICE bool is_aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

}  // namespace pyruntime::portable
