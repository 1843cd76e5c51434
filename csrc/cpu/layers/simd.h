#pragma once

// Compiles flat loops in portable C++ once for each x86-64 level, and chooses the level at run time.
//
// A kernel is a struct with a static, always-inlined `run`. simd_run<Kernel>(args...) calls it inside a
// function with the target attribute of this CPU's best level, so the compiler vectorises the inlined loops
// for that level. (Dispatch is explicit because target_clones does not work on templates, and under ASan its
// ifunc resolvers run before the sanitizer is ready.)
//
// `-O3 -fopenmp` vectorises the loops; sqrt also needs `-fno-math-errno`.

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#define PYRUNTIME_INLINE inline __attribute__((always_inline))

// Declares the iterations of the next loop independent: pointers written there alias nothing else.
#define PYRUNTIME_PRAGMA(text) _Pragma(#text)
#define PYRUNTIME_SIMD PYRUNTIME_PRAGMA(omp simd)
#define PYRUNTIME_SIMD_REDUCE(operation, variable) PYRUNTIME_PRAGMA(omp simd reduction(operation : variable))

namespace pyruntime::layers {

// ---- choosing the instruction set ----

#if defined(__x86_64__) && defined(__GNUC__)

enum class SimdLevel { baseline, avx2, avx512 };

inline SimdLevel simd_level() {
  static const SimdLevel level = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      return SimdLevel::avx512;
    }
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? SimdLevel::avx2
                                                                           : SimdLevel::baseline;
  }();
  return level;
}

template <typename Kernel, typename... Args>
__attribute__((noinline, target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512"))) void
simd_run_avx512(Args... args) {
  Kernel::run(args...);
}

template <typename Kernel, typename... Args>
__attribute__((noinline, target("avx2,fma"))) void simd_run_avx2(Args... args) {
  Kernel::run(args...);
}

template <typename Kernel, typename... Args>
void simd_run(Args... args) {
  switch (simd_level()) {
    case SimdLevel::avx512:
      return simd_run_avx512<Kernel>(args...);
    case SimdLevel::avx2:
      return simd_run_avx2<Kernel>(args...);
    case SimdLevel::baseline:
      return Kernel::run(args...);
  }
}

#else

template <typename Kernel, typename... Args>
void simd_run(Args... args) {
  Kernel::run(args...);
}

#endif

// ---- number formats ----

// The type that arithmetic on T is done in.
template <typename T>
struct Accumulate {
  using type = float;
};
template <>
struct Accumulate<double> {
  using type = double;
};
template <typename T>
using acc_t = typename Accumulate<T>::type;

PYRUNTIME_INLINE uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

PYRUNTIME_INLINE float bits_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

PYRUNTIME_INLINE double load(const double& value) {
  return value;
}
PYRUNTIME_INLINE float load(const float& value) {
  return value;
}
PYRUNTIME_INLINE float load(const c10::BFloat16& value) {
  return bits_float(static_cast<uint32_t>(value.x) << 16);
}

PYRUNTIME_INLINE float load(const c10::Half& value) {
  const uint32_t half = value.x;
  const uint32_t magnitude = (half & 0x7fffu) << 13;
  // The multiplication rebiases the exponent; it is exact, also for subnormals.
  const uint32_t finite = float_bits(bits_float(magnitude) * 0x1p112f);
  const uint32_t infinite_or_nan = magnitude | 0x7f800000u;
  return bits_float((half & 0x8000u) << 16 | (magnitude >= 0x0f800000u ? infinite_or_nan : finite));
}

// store() rounds to nearest, ties to even, and keeps NaN a NaN.
PYRUNTIME_INLINE void store(double& to, double value) {
  to = value;
}
PYRUNTIME_INLINE void store(float& to, float value) {
  to = value;
}

PYRUNTIME_INLINE void store(c10::BFloat16& to, float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  to.x = static_cast<uint16_t>((value != value ? 0x7fc00000u : rounded) >> 16);
}

// Rounds up or down with probabilities that make the mean exact. `random` is uniform; only its low 16 bits
// are used. Infinity and NaN are kept.
PYRUNTIME_INLINE void store_at_random(c10::BFloat16& to, float value, uint32_t random) {
  const uint32_t bits = float_bits(value);
  const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
  const uint32_t rounded = bits + (finite ? random & 0xffffu : 0u);
  to.x = static_cast<uint16_t>((value != value ? 0x7fc00000u : rounded) >> 16);
}

// Returns a uniform number for each (seed, index): the finaliser of MurmurHash3 (Appleby), twice.
PYRUNTIME_INLINE uint32_t random_bits(uint32_t seed, uint32_t index) {
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

PYRUNTIME_INLINE void store(c10::Half& to, float value) {
  const uint32_t bits = float_bits(value);
  uint32_t magnitude = bits & 0x7fffffffu;
  magnitude = magnitude < 0x47800000u ? magnitude : 0x47800000u;  // values from 2^16 on round to infinity
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  // Adding 0.5 rounds to multiples of 2^-24, the step of a subnormal half.
  const uint32_t subnormal = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t rounded = magnitude < 0x38800000u ? subnormal : normal;
  to.x = static_cast<uint16_t>((bits >> 16 & 0x8000u) | (value != value ? 0x7e00u : rounded));
}

// ---- exponential ----

// Returns e^x to 2 ulp if that is a normal float. Below (x < -87.6) it is 0, from e^88.4 on infinity; NaN
// stays NaN. Cody-Waite reduction to |r| <= ln(2)/2 and a polynomial of degree 6 (Cephes expf).
PYRUNTIME_INLINE float fast_exp(float x) {
  x = x < -88.0f ? -88.0f : x;
  x = x > 88.7f ? 88.7f : x;
  const float round_to_integer =
      12582912.0f;  // 1.5 * 2^23: the sum's low mantissa bits are the rounded integer
  const float shifted = x * 1.44269504088896341f + round_to_integer;
  const float k = shifted - round_to_integer;
  const float r = (x - k * 0.693359375f) - k * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  // k + 127, in -127..128 by the clamps, becomes the exponent field: 2^k, or 0 or infinity at the ends.
  return p * bits_float((float_bits(shifted) + 127u) << 23);
}

PYRUNTIME_INLINE double fast_exp(double x) {
  return std::exp(x);
}

}  // namespace pyruntime::layers
