// bf16 and fp16 as 16 bits, with our own rounding of bf16: the dialects' types differ in names, in headers
// and in what a NaN becomes, and ranks on different devices must round alike (to nearest even, NaN to 0x7fc0,
// as the CPU path does).
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

// What one 16-byte access moves.
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

// Of what another rank wrote.
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
